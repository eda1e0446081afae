//! Requests: how many, in which order, and on how many connections at once.

use std::time::{Duration, Instant};

use super::util::{memory, put, receiver, recv, send, sender, until, verify, wait, WORK_LIMIT};
use super::Case;
use crate::error::{Context, Error, Result};
use crate::exchange::{exchange, simple, Shape, Stream};
use crate::net::{RecvPart, Request, MAX_REQUESTS};
use crate::pattern::{Key, Rng};
use crate::rank::{Ctx, Link};
use crate::worker::Idle;
use crate::{ensure, fail};

pub const CASES: &[Case] = &[
    Case::new(
        "inflight_8",
        "data",
        2,
        inflight_8,
        "8 requests in flight complete in order at both ends, however they are tested",
    ),
    Case::new(
        "inflight_32",
        "data",
        2,
        inflight_32,
        "32 requests in flight complete in order at both ends, however they are tested",
    ),
    Case::new(
        "table_full",
        "data",
        2,
        table_full,
        "with 32 requests in flight, one more gives NULL or works, and is never an error",
    ),
    Case::new(
        "pingpong",
        "data",
        2,
        pingpong,
        "2,000 messages go to and fro, each sent when the one before has been seen",
    ),
    Case::new(
        "bidirectional",
        "data",
        2,
        bidirectional,
        "both directions move 1 MiB messages at once in one progress thread",
    ),
    Case::new(
        "mixed_comms",
        "data",
        2,
        mixed_comms,
        "16 connections with messages of different sizes share one progress thread",
    ),
    Case::new(
        "ring",
        "data",
        4,
        ring,
        "four ranks in a ring send and receive at once",
    ),
    Case::new(
        "many_small",
        "data",
        2,
        many_small,
        "100,000 small messages arrive in order and unchanged",
    ),
    Case::new(
        "tags",
        "data",
        2,
        tags,
        "a message never lands in a receive that has another tag",
    ),
    Case::new(
        "late_receives",
        "data",
        2,
        late_receives,
        "sends that are tried before any receive is posted wait without error, and then arrive",
    ),
    Case::new(
        "optional_completion",
        "data",
        2,
        optional_completion,
        "a receive with NCCL's hint that nobody looks at its completion still gets its data",
    ),
    Case::new(
        "grouped",
        "data",
        2,
        grouped,
        "one irecv of several parts gets each message by its tag and reports every size",
    ),
];

fn inflight_8(ctx: &mut Ctx) -> Result<()> {
    inflight(ctx, 8)
}

fn inflight_32(ctx: &mut Ctx) -> Result<()> {
    inflight(ctx, MAX_REQUESTS)
}

/// Posts `n` requests before any is tested; then tests the newest first. What is older than a
/// request that is done must be done as well.
fn inflight(ctx: &mut Ctx, n: usize) -> Result<()> {
    // What has been small may be announced otherwise from then on.
    const SIZES: [usize; 7] = [20_000, 1_000, 1_000, 20_000, 8, 8, 20_000];
    let links = ctx.connect(&[(0, 1)])?;
    let link = links[0];
    let (buffer, reg) = memory(ctx, &link, n * SIZES[0])?;
    for (round, bytes) in (0..).zip(SIZES) {
        let key = |i: usize| Key {
            seed: round,
            rank: 0,
            connection: link.id,
            message: i,
        };
        let mut requests: Vec<Option<Request>> = Vec::new();
        for i in 0..n {
            requests.push(Some(if link.sends() {
                put(&buffer, i * bytes, bytes, key(i))?;
                send(ctx, &link, &reg, i * bytes, bytes, 0)
                    .context(|| format!("send {i} of {n} that are not yet tested"))?
            } else {
                recv(ctx, &link, &reg, i * bytes, bytes, 0)
                    .context(|| format!("receive {i} of {n} that are not yet tested"))?
            }));
        }
        ctx.state(format!("round {round}: {n} requests in flight"));
        let what = format!("the {n} requests in flight");
        until(ctx, &what, WORK_LIMIT, |io| {
            let mut newer_done = None;
            for i in (0..n).rev() {
                let Some(r) = requests[i] else { continue };
                match io.test(r).context(|| format!("message {i}"))? {
                    Some(size) => {
                        ensure!(
                            size == bytes,
                            "message {i}: test gave {size} bytes of {bytes}"
                        );
                        requests[i] = None;
                        newer_done = newer_done.or(Some(i));
                    }
                    None => {
                        if let Some(newer) = newer_done {
                            fail!("message {newer} is done and the older message {i} is not");
                        }
                    }
                }
            }
            Ok(requests.iter().all(Option::is_none).then_some(()))
        })?;
        if !link.sends() {
            for i in 0..n {
                verify(&buffer, i * bytes, bytes, key(i))?;
            }
        }
    }
    ctx.deregister(vec![reg])?;
    ctx.close(&links)
}

fn table_full(ctx: &mut Ctx) -> Result<()> {
    const SIZE: usize = 3_000;
    const MOST: usize = 3 * MAX_REQUESTS;
    let links = ctx.connect(&[(0, 1)])?;
    let link = links[0];
    let (buffer, reg) = memory(ctx, &link, MOST * SIZE)?;
    let key = |i: usize| Key {
        seed: 0,
        rank: 0,
        connection: link.id,
        message: i,
    };
    let mut requests = Vec::new();
    if link.sends() {
        let posted = u64::from_le_bytes(
            ctx.oob
                .recv(1)?
                .try_into()
                .map_err(|_| Error::new("no number"))?,
        ) as usize;
        for i in 0..posted {
            put(&buffer, i * SIZE, SIZE, key(i))?;
        }
        for i in 0..posted.min(MAX_REQUESTS) {
            requests.push(send(ctx, &link, &reg, i * SIZE, SIZE, 0)?);
        }
        let c = sender(&link)?;
        // One more than the table holds, many times; none of the requests is tested.
        for attempt in 0..200 {
            let i = requests.len();
            if i < posted {
                let more = ctx.progress(|io| io.isend(c, &reg, i * SIZE, SIZE, 0));
                requests.extend(more.context(|| format!("isend {i}, attempt {attempt}"))?);
            }
        }
        let first = requests.len();
        for (i, r) in requests.into_iter().enumerate() {
            wait(ctx, &format!("send {i}"), r)?;
        }
        for i in first..posted {
            let r = send(ctx, &link, &reg, i * SIZE, SIZE, 0)?;
            wait(ctx, &format!("send {i}"), r)?;
        }
    } else {
        for i in 0..MAX_REQUESTS {
            requests.push(recv(ctx, &link, &reg, i * SIZE, SIZE, 0)?);
        }
        let c = receiver(&link)?;
        for attempt in 0..200 {
            let i = requests.len();
            if i < MOST {
                let more = ctx.progress(|io| io.irecv(c, &reg, i * SIZE, SIZE, 0));
                requests.extend(more.context(|| format!("irecv {i}, attempt {attempt}"))?);
            }
        }
        ctx.oob.send(0, (requests.len() as u64).to_le_bytes())?;
        for (i, r) in requests.into_iter().enumerate() {
            let size = wait(ctx, &format!("receive {i}"), r)?;
            ensure!(
                size == SIZE,
                "receive {i}: test gave {size} bytes of {SIZE}"
            );
            verify(&buffer, i * SIZE, SIZE, key(i))?;
        }
    }
    ctx.deregister(vec![reg])?;
    simple(ctx, &links, 4, 1_000, 1)?;
    ctx.close(&links)
}

fn pingpong(ctx: &mut Ctx) -> Result<()> {
    const ROUNDS: usize = 1_000;
    const SIZES: [usize; 5] = [1, 8, 64, 1_000, 65_536];
    let mut links = ctx.connect(&[(0, 1), (1, 0)])?;
    links.sort_by_key(|l| !l.sends());
    let (out, inn) = (links[0], links[1]);
    let most = SIZES[SIZES.len() - 1];
    let (out_buffer, out_reg) = memory(ctx, &out, most)?;
    let (in_buffer, in_reg) = memory(ctx, &inn, most)?;
    let key = |rank: usize, i: usize| Key {
        seed: 0,
        rank,
        connection: 0,
        message: i,
    };
    let (me, peer) = (ctx.rank, 1 - ctx.rank);
    for i in 0..ROUNDS {
        let size = SIZES[i % SIZES.len()];
        let r = recv(ctx, &inn, &in_reg, 0, size, 0)?;
        put(&out_buffer, 0, size, key(me, i))?;
        let back = |r: Request| -> Result<()> {
            let got = wait(ctx, &format!("message {i} from rank {peer}"), r)?;
            ensure!(got == size, "message {i}: test gave {got} bytes of {size}");
            verify(&in_buffer, 0, size, key(peer, i))
        };
        if me == 0 {
            let s = send(ctx, &out, &out_reg, 0, size, 0)?;
            wait(ctx, &format!("message {i}, send"), s)?;
            back(r)?;
        } else {
            back(r)?;
            let s = send(ctx, &out, &out_reg, 0, size, 0)?;
            wait(ctx, &format!("message {i}, send"), s)?;
        }
    }
    ctx.deregister(vec![out_reg, in_reg])?;
    ctx.close(&links)
}

fn bidirectional(ctx: &mut Ctx) -> Result<()> {
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    let shape = |_: usize| Shape::plain(1 << 20);
    let streams: Vec<Stream> = links
        .iter()
        .map(|l| Stream {
            slots: 16,
            ..Stream::new(l, 48, &shape)
        })
        .collect();
    exchange(ctx, &streams)?;
    ctx.close(&links)
}

fn mixed_comms(ctx: &mut Ctx) -> Result<()> {
    const SIZES: [usize; 8] = [8, 100, 4_096, 65_536, 70_001, 300_000, (1 << 20) + 3, 0];
    let pairs: Vec<(usize, usize)> = (0..16).map(|i| (i % 2, 1 - i % 2)).collect();
    let links = ctx.connect(&pairs)?;
    let shapes: Vec<Box<dyn Fn(usize) -> Shape + Sync>> = links
        .iter()
        .map(|l| {
            let id = l.id;
            Box::new(move |i: usize| {
                let size = SIZES[(id / 2 + if i % 4 == 3 { i } else { 0 }) % SIZES.len()];
                Shape {
                    size,
                    capacity: size,
                    offset: (id + i) % 7,
                }
            }) as Box<dyn Fn(usize) -> Shape + Sync>
        })
        .collect();
    let streams: Vec<Stream> = links
        .iter()
        .zip(&shapes)
        .map(|(l, s)| Stream {
            slots: 4,
            window: 1 + l.id % 8,
            ..Stream::new(l, 16, s)
        })
        .collect();
    exchange(ctx, &streams)?;
    ctx.close(&links)
}

fn ring(ctx: &mut Ctx) -> Result<()> {
    let n = ctx.nranks;
    let pairs: Vec<(usize, usize)> = (0..n).map(|r| (r, (r + 1) % n)).collect();
    let links = ctx.connect(&pairs)?;
    simple(ctx, &links, 32, 100_000, 0)?;
    simple(ctx, &links, 200, 64, 1)?;
    ctx.close(&links)
}

fn many_small(ctx: &mut Ctx) -> Result<()> {
    let links = ctx.connect(&[(0, 1)])?;
    let shape = |i: usize| Shape {
        size: 1 + (i * 7) % 61,
        capacity: 64,
        offset: i % 3,
    };
    exchange(
        ctx,
        &[Stream {
            slots: 5_000,
            ..Stream::new(&links[0], 100_000, &shape)
        }],
    )?;
    ctx.close(&links)
}

fn tags(ctx: &mut Ctx) -> Result<()> {
    const SIZE: usize = 500;
    let links = ctx.connect(&[(0, 1)])?;
    let link = links[0];
    let (buffer, reg) = memory(ctx, &link, 2 * SIZE)?;
    let key = |tag: i32| Key {
        seed: 0,
        rank: 0,
        connection: link.id,
        message: tag as usize,
    };
    // The receives are posted with tags 7 and 9, and the sender begins with 9.
    if link.sends() {
        put(&buffer, 0, SIZE, key(7))?;
        put(&buffer, SIZE, SIZE, key(9))?;
        ensure!(ctx.oob.recv(1)? == b"posted", "out of step");
        let c = sender(&link)?;
        let end = Instant::now() + Duration::from_millis(200);
        let early = ctx.progress(|io| {
            let mut idle = Idle::patient();
            while Instant::now() < end {
                if let Some(r) = io.isend(c, &reg, SIZE, SIZE, 9)? {
                    return Ok(Some(r));
                }
                idle.wait();
            }
            Ok::<_, Error>(None)
        })?;
        let seven = send(ctx, &link, &reg, 0, SIZE, 7)?;
        let nine = match early {
            Some(r) => r,
            None => send(ctx, &link, &reg, SIZE, SIZE, 9)?,
        };
        wait(ctx, "the send with tag 7", seven)?;
        wait(ctx, "the send with tag 9", nine)?;
    } else {
        let seven = recv(ctx, &link, &reg, 0, SIZE, 7)?;
        let nine = recv(ctx, &link, &reg, SIZE, SIZE, 9)?;
        ctx.oob.send(0, b"posted".to_vec())?;
        wait(ctx, "the receive with tag 7", seven)?;
        wait(ctx, "the receive with tag 9", nine)?;
        verify(&buffer, 0, SIZE, key(7)).context(|| "the receive with tag 7")?;
        verify(&buffer, SIZE, SIZE, key(9)).context(|| "the receive with tag 9")?;
    }
    ctx.deregister(vec![reg])?;
    ctx.close(&links)
}

fn late_receives(ctx: &mut Ctx) -> Result<()> {
    const SIZE: usize = 10_000;
    let links = ctx.connect(&[(0, 1)])?;
    let link = links[0];
    if link.sends() {
        let (buffer, reg) = memory(ctx, &link, SIZE)?;
        put(
            &buffer,
            0,
            SIZE,
            Key {
                seed: 0,
                rank: 0,
                connection: link.id,
                message: 0,
            },
        )?;
        let c = sender(&link)?;
        // Nobody has posted anything: it may take the message (if it stages it) or say 'again'.
        let mut request = None;
        for attempt in 0..1_000 {
            if request.is_none() {
                request = ctx
                    .progress(|io| io.isend(c, &reg, 0, SIZE, 0))
                    .context(|| format!("isend before any irecv, attempt {attempt}"))?;
            }
        }
        if let Some(r) = request {
            for _ in 0..1_000 {
                if ctx.progress(|io| io.test(r))?.is_some() {
                    // Done before a receive is posted: then the data must lie somewhere.
                    request = None;
                    break;
                }
            }
            if request.is_none() {
                ctx.oob.send(1, b"now".to_vec())?;
                ctx.oob.recv(1)?;
                ctx.deregister(vec![reg])?;
                return ctx.close(&links);
            }
        }
        ctx.oob.send(1, b"now".to_vec())?;
        let r = match request {
            Some(r) => r,
            None => send(ctx, &link, &reg, 0, SIZE, 0)?,
        };
        wait(ctx, "the send", r)?;
        ctx.oob.recv(1)?;
        ctx.deregister(vec![reg])?;
    } else {
        let (buffer, reg) = memory(ctx, &link, SIZE)?;
        ctx.oob.recv(0)?;
        let r = recv(ctx, &link, &reg, 0, SIZE, 0)?;
        let size = wait(ctx, "the receive", r)?;
        ensure!(size == SIZE, "test gave {size} bytes of {SIZE}");
        verify(
            &buffer,
            0,
            SIZE,
            Key {
                seed: 0,
                rank: 0,
                connection: link.id,
                message: 0,
            },
        )?;
        ctx.oob.send(0, b"seen".to_vec())?;
        ctx.deregister(vec![reg])?;
    }
    ctx.close(&links)
}

fn optional_completion(ctx: &mut Ctx) -> Result<()> {
    if ctx.plugin.abi() < 9 {
        return Err(Error::skip("NCCL passes the hint from ABI version 9 on"));
    }
    const SIZE: usize = 4_000;
    const PAIRS: usize = 50;
    let links = ctx.connect(&[(0, 1)])?;
    let link = links[0];
    let (buffer, reg) = memory(ctx, &link, 2 * SIZE)?;
    let key = |i: usize| Key {
        seed: 0,
        rank: 0,
        connection: link.id,
        message: i,
    };
    // A receive with the hint and one without, again and again: when the second is done, the first
    // has its data too.
    for pair in 0..PAIRS {
        let (hinted, plain) = (2 * pair, 2 * pair + 1);
        if link.sends() {
            put(&buffer, 0, SIZE, key(hinted))?;
            put(&buffer, SIZE, SIZE, key(plain))?;
            let a = send(ctx, &link, &reg, 0, SIZE, 0)?;
            let b = send(ctx, &link, &reg, SIZE, SIZE, 0)?;
            wait(ctx, "the send to the receive with the hint", a)?;
            wait(ctx, "the send to the receive without", b)?;
        } else {
            let c = receiver(&link)?;
            let part = || RecvPart {
                memory: &reg,
                offset: 0,
                capacity: SIZE,
                tag: 0,
            };
            let a = until(ctx, "irecv with the hint", WORK_LIMIT, |io| {
                io.irecv_group(c, &[part()], true)
            })?;
            let b = recv(ctx, &link, &reg, SIZE, SIZE, 0)?;
            // NCCL does test the request: it just may be done early.
            wait(ctx, "the receive with the hint", a)?;
            wait(ctx, "the receive without", b)?;
            verify(&buffer, 0, SIZE, key(hinted)).context(|| "the receive with the hint")?;
            verify(&buffer, SIZE, SIZE, key(plain)).context(|| "the receive without")?;
        }
    }
    ctx.deregister(vec![reg])?;
    ctx.close(&links)
}

fn grouped(ctx: &mut Ctx) -> Result<()> {
    let most = ctx.session.properties(ctx.dev)?.max_recvs as usize;
    if most < 2 {
        return Err(Error::skip("the plugin groups no receives (maxRecvs is 1)"));
    }
    const SIZE: usize = 1_000;
    let links = ctx.connect(&[(0, 1)])?;
    let link: Link = links[0];
    let (buffer, reg) = memory(ctx, &link, most * SIZE)?;
    let mut rng = Rng::new(1);
    for n in 2..=most {
        let key = |i: usize| Key {
            seed: n as u64,
            rank: 0,
            connection: link.id,
            message: i,
        };
        let size = |i: usize| SIZE - i;
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, rng.below(i + 1));
        }
        if link.sends() {
            let mut requests = Vec::new();
            for i in order {
                put(&buffer, i * SIZE, size(i), key(i))?;
                requests.push(send(ctx, &link, &reg, i * SIZE, size(i), 100 + i as i32)?);
            }
            for r in requests {
                wait(ctx, "a send to a grouped receive", r)?;
            }
        } else {
            let c = receiver(&link)?;
            let parts: Vec<RecvPart> = (0..n)
                .map(|i| RecvPart {
                    memory: &reg,
                    offset: i * SIZE,
                    capacity: SIZE,
                    tag: 100 + i as i32,
                })
                .collect();
            let r = until(ctx, "grouped irecv", WORK_LIMIT, |io| {
                io.irecv_group(c, &parts, false)
            })?;
            let mut sizes = vec![0; MAX_REQUESTS];
            until(ctx, "grouped receive", WORK_LIMIT, |io| {
                Ok(io.test_sizes(r, &mut sizes)?.then_some(()))
            })?;
            for (i, got) in sizes.iter().enumerate().take(n) {
                ensure!(
                    *got as usize == size(i),
                    "part {i} of {n}: test gave {got} bytes"
                );
                verify(&buffer, i * SIZE, size(i), key(i))?;
            }
        }
    }
    ctx.deregister(vec![reg])?;
    ctx.close(&links)
}
