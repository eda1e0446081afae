//! What goes wrong without anybody dying: overruns, closed peers, closes with requests in flight.

use std::time::Duration;

use super::util::{
    error_within, is_remote, memory, put, recv, remote_error_of, remote_error_of_send, send,
    sender, verify, wait,
};
use super::Case;
use crate::error::{Context, Result};
use crate::exchange::simple;
use crate::logs;
use crate::net::Request;
use crate::pattern::{self, Key};
use crate::rank::{Ctx, Link};
use crate::{ensure, fail};

pub const CASES: &[Case] = &[
    Case::new("send_larger", "errors", 2, send_larger,
        "a send larger than its receive is an error at both ends that names both sizes, and overruns nothing")
    .processes_only(),
    Case::new("close_inflight", "errors", 2, close_inflight,
        "deregMr and close with requests in flight return within 1 s, and other connections go on"),
    Case::new("peer_closes", "errors", 2, peer_closes,
        "a peer that closes its end turns posted receives and further sends into ncclRemoteError"),
    Case::new("sender_closes_early", "errors", 2, sender_closes_early,
        "what was sent and completed before the sender closed still arrives; the next receive fails"),
    Case::new("close_race", "errors", 2, close_race,
        "in 300 short connections, what the sender completed before it closed is received without error"),
    Case::new("closed_with_receives", "errors", 2, closed_with_receives,
        "nothing is written any more once a receiver with posted receives has closed, whatever the sender does"),
    Case::new("after_an_error", "errors", 2, after_an_error,
        "a connection that saw an error leaves the next connection between the same ranks alone"),
];

const OVERSIZE: [(usize, usize); 4] = [
    (1_001, 1_000),
    ((1 << 20) + 1, 1 << 20),
    (3 << 20, 1 << 20),
    (1, 0),
];

fn send_larger(ctx: &mut Ctx) -> Result<()> {
    let bystander = ctx.connect(&[(0, 1)])?;
    for (round, (size, capacity)) in OVERSIZE.into_iter().enumerate() {
        let links = ctx.connect(&[(0, 1)])?;
        one_too_large(ctx, &links[0], size, capacity)
            .context(|| format!("{size} bytes sent to a receive of {capacity}"))?;
        ctx.close(&links)?;
        simple(ctx, &bystander, 4, 5_000, round as u64).context(|| "another connection")?;
    }
    ctx.close(&bystander)
}

fn one_too_large(ctx: &Ctx, link: &Link, size: usize, capacity: usize) -> Result<()> {
    const AROUND: usize = 4_096;
    let mark = logs::mark();
    let limit = super::util::REMOTE_LIMIT;
    let (buffer, reg) = memory(ctx, link, AROUND + size.max(capacity) + AROUND)?;
    let key = Key {
        seed: 1,
        rank: 7,
        connection: link.id,
        message: 0,
    };
    let error = if link.sends() {
        ensure!(ctx.oob.recv(1)? == b"posted", "out of step");
        let c = sender(link)?;
        let mut request: Option<Request> = None;
        let mut finished = false;
        let e = error_within(ctx, "a send larger than its receive", limit, |io| {
            match request {
                None => request = io.isend(c, &reg, AROUND, size, 0)?,
                Some(r) => {
                    if io.test(r)?.is_some() {
                        finished = true;
                        fail!("it completed without an error");
                    }
                }
            }
            Ok(())
        })?;
        ensure!(!finished, "the send: {e}");
        e
    } else {
        let mut image = vec![0u8; buffer.len()];
        pattern::fill(key, &mut image);
        buffer.write(0, &image)?;
        let r = recv(ctx, link, &reg, AROUND, capacity, 0)?;
        ctx.oob.send(0, b"posted".to_vec())?;
        let mut finished = None;
        let e = error_within(ctx, "a receive smaller than its send", limit, |io| {
            if let Some(n) = io.test(r)? {
                finished = Some(n);
                fail!("it completed without an error, with {n} bytes");
            }
            Ok(())
        })?;
        ensure!(finished.is_none(), "the receive: {e}");
        e
    };
    ensure!(error.code().is_some(), "no error of the plugin: {error}");
    // Both ends are done with it before anything is closed.
    ctx.oob.barrier()?;
    if !link.sends() {
        let mut image = vec![0u8; buffer.len()];
        buffer.read(0, &mut image)?;
        let mut expected = vec![0u8; buffer.len()];
        pattern::fill(key, &mut expected);
        for (at, (have, want)) in image.iter().zip(&expected).enumerate() {
            if (AROUND..AROUND + capacity).contains(&at) {
                continue;
            }
            let place = at as isize - AROUND as isize;
            ensure!(
                have == want,
                "the byte at {place} from the receive's start was overwritten"
            );
        }
    }
    let texts = logs::warnings_since(mark);
    let (a, b) = (size.to_string(), capacity.to_string());
    let named = texts.iter().any(|t| has_number(t, &a) && has_number(t, &b));
    ensure!(
        named,
        "no warning at the {} names both sizes, {size} and {capacity}: {texts:?}",
        if link.sends() { "sender" } else { "receiver" }
    );
    ctx.deregister(vec![reg])
}

/// Whether the text has that number, not as a part of a longer one.
fn has_number(text: &str, number: &str) -> bool {
    text.split(|c: char| !c.is_ascii_digit())
        .any(|n| n == number)
}

fn close_inflight(ctx: &mut Ctx) -> Result<()> {
    const SIZE: usize = 4 << 20;
    let bystander = ctx.connect(&[(0, 1)])?;
    // Who closes first, and whether any send was started.
    for round in 0..6 {
        let (sender_first, started) = (round % 2 == 0, round % 3 != 0);
        let links = ctx.connect(&[(0, 1)])?;
        let link = links[0];
        let (buffer, reg) = memory(ctx, &link, 8 * SIZE)?;
        let what = format!("round {round}");
        if link.sends() {
            put(
                &buffer,
                0,
                1_000,
                Key {
                    seed: 0,
                    rank: 0,
                    connection: 0,
                    message: 0,
                },
            )?;
            ensure!(ctx.oob.recv(1)? == b"posted", "out of step");
            for i in 0..if started { 8 } else { 0 } {
                match send(ctx, &link, &reg, i * SIZE, SIZE, 0).context(|| &what) {
                    Ok(_) => {}
                    // The receiver may have closed by now, and then it must say just that.
                    Err(e) if !sender_first => {
                        is_remote("isend to a receiver that has closed", &e)?;
                        break;
                    }
                    Err(e) => return Err(e),
                }
            }
        } else {
            for i in 0..8 {
                recv(ctx, &link, &reg, i * SIZE, SIZE, 0).context(|| &what)?;
            }
            ctx.oob.send(0, b"posted".to_vec())?;
        }
        let first = link.sends() == sender_first;
        let peer = 1 - ctx.rank;
        if !first {
            ensure!(ctx.oob.recv(peer)? == b"closed", "out of step");
        }
        ctx.deregister(vec![reg])
            .context(|| format!("{what}, with requests in flight"))?;
        ctx.close(&links)
            .context(|| format!("{what}, with requests in flight"))?;
        if first {
            ctx.oob.send(peer, b"closed".to_vec())?;
        }
        drop(buffer);
        simple(ctx, &bystander, 8, 50_000, round).context(|| "another connection")?;
    }
    ctx.close(&bystander)
}

fn peer_closes(ctx: &mut Ctx) -> Result<()> {
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    // Rank 1 closes both of its ends; rank 0 has receives posted and goes on sending.
    if ctx.rank == 1 {
        ensure!(ctx.oob.recv(0)? == b"posted", "out of step");
        ctx.close(&links)?;
        ctx.oob.send(0, b"closed".to_vec())?;
        ctx.oob.recv(0)?;
        return Ok(());
    }
    let (out, inn) = (links[0], links[1]);
    let (_b, in_reg) = memory(ctx, &inn, 8 * 1_000)?;
    let (_c, out_reg) = memory(ctx, &out, 1_000)?;
    let mut requests = Vec::new();
    for i in 0..8 {
        requests.push(recv(ctx, &inn, &in_reg, i * 1_000, 1_000, 0)?);
    }
    ctx.oob.send(1, b"posted".to_vec())?;
    ensure!(ctx.oob.recv(1)? == b"closed", "out of step");
    for (i, r) in requests.into_iter().enumerate() {
        let what = format!("posted receive {i} when the sender has closed");
        ensure!(remote_error_of(ctx, &what, r)?, "{what}: it completed");
    }
    remote_error_of_send(ctx, &out, &out_reg)?;
    ctx.deregister(vec![in_reg, out_reg])?;
    ctx.close(&links)?;
    ctx.oob.send(1, b"done".to_vec())
}

fn sender_closes_early(ctx: &mut Ctx) -> Result<()> {
    const SIZE: usize = 100_000;
    let links = ctx.connect(&[(0, 1)])?;
    let link = links[0];
    let (buffer, reg) = memory(ctx, &link, 9 * SIZE)?;
    let key = |i: usize| Key {
        seed: 0,
        rank: 0,
        connection: link.id,
        message: i,
    };
    if link.sends() {
        ensure!(ctx.oob.recv(1)? == b"posted", "out of step");
        let mut requests = Vec::new();
        for i in 0..8 {
            put(&buffer, i * SIZE, SIZE, key(i))?;
            requests.push(send(ctx, &link, &reg, i * SIZE, SIZE, 0)?);
        }
        for (i, r) in requests.into_iter().enumerate() {
            wait(ctx, &format!("send {i}"), r)?;
        }
        ctx.deregister(vec![reg])?;
        ctx.close(&links)?;
        drop(buffer);
        return ctx.oob.send(1, b"closed".to_vec());
    }
    let mut requests = Vec::new();
    for i in 0..9 {
        requests.push(recv(ctx, &link, &reg, i * SIZE, SIZE, 0)?);
    }
    ctx.oob.send(0, b"posted".to_vec())?;
    let last = requests.pop();
    let late = requests.pop();
    let mut sizes = Vec::new();
    for (i, r) in requests.into_iter().enumerate() {
        sizes.push(wait(
            ctx,
            &format!("receive {i} of what was sent before the close"),
            r,
        )?);
    }
    // The eighth is not tested until the sender has closed, unless the sender needs that to
    // complete: a receiver that copies host memory itself does so while it tests.
    let mut closed = ctx.oob.recv_within(0, Duration::from_secs(2)).is_ok();
    if let Some(r) = late {
        sizes.push(wait(
            ctx,
            "receive 7, of what was sent and completed before the close",
            r,
        )?);
    }
    if !closed {
        closed = ctx.oob.recv(0)? == b"closed";
    }
    ensure!(closed, "out of step");
    for (i, size) in sizes.into_iter().enumerate() {
        ensure!(
            size == SIZE,
            "receive {i}: test gave {size} bytes of {SIZE}"
        );
        verify(&buffer, i * SIZE, SIZE, key(i))?;
    }
    if let Some(r) = last {
        ensure!(
            remote_error_of(ctx, "a receive that nobody will send to", r)?,
            "a receive completed that nobody sent to"
        );
    }
    ctx.deregister(vec![reg])?;
    ctx.close(&links)
}

/// After an error on one connection, a new one between the same ranks works.
fn after_an_error(ctx: &mut Ctx) -> Result<()> {
    for round in 0..3 {
        let links = ctx.connect(&[(0, 1)])?;
        let link = links[0];
        let (buffer, reg) = memory(ctx, &link, 10_000)?;
        if link.sends() {
            ensure!(ctx.oob.recv(1)? == b"closed", "out of step");
            remote_error_of_send(ctx, &link, &reg)?;
            // The error stays: a connection does not come back.
            let c = sender(&link)?;
            let again = ctx.progress(|io| io.isend(c, &reg, 0, 100, 0));
            match again {
                Err(e) => is_remote("isend after ncclRemoteError", &e)?,
                Ok(_) => fail!("isend works again after ncclRemoteError"),
            }
            ctx.deregister(vec![reg])?;
            ctx.close(&links)?;
        } else {
            ctx.deregister(vec![reg])?;
            ctx.close(&links)?;
            ctx.oob.send(0, b"closed".to_vec())?;
        }
        drop(buffer);
        let links = ctx.connect(&[(0, 1), (1, 0)])?;
        simple(ctx, &links, 8, 20_000, round)?;
        ctx.close(&links)?;
    }
    Ok(())
}

/// Send, complete, close, at once and often: the close must not overtake the data.
fn close_race(ctx: &mut Ctx) -> Result<()> {
    const SIZE: usize = 3_000;
    for round in 0..300 {
        let links = ctx.connect(&[if round % 2 == 0 { (0, 1) } else { (1, 0) }])?;
        let count = 1 + round % 4;
        simple(ctx, &links, count, SIZE, round as u64).context(|| format!("round {round}"))?;
        ctx.close(&links)?;
    }
    Ok(())
}

fn closed_with_receives(ctx: &mut Ctx) -> Result<()> {
    const SIZE: usize = 100_000;
    const N: usize = 4;
    // What all connections of a process share does not end with the one that is closed.
    let links = ctx.connect(&[(0, 1), (0, 1)])?;
    let (bystander, link) = (links[0], links[1]);
    let (buffer, reg) = memory(ctx, &link, N * SIZE)?;
    if link.sends() {
        buffer.set(0x55)?;
        let word = ctx.oob.recv(1)?;
        ensure!(word == b"closed", "out of step");
        for i in 0..N {
            // One that is on its way already may count as sent.
            let sent =
                send(ctx, &link, &reg, i * SIZE, SIZE, 0).and_then(|r| wait(ctx, "a send", r));
            if let Err(e) = sent {
                is_remote("a send to a receiver that has closed", &e)?;
                break;
            }
        }
        ctx.oob.send(1, b"sent".to_vec())?;
        ctx.oob.recv(1)?;
        ctx.deregister(vec![reg])?;
    } else {
        buffer.set(0xaa)?;
        for i in 0..N {
            recv(ctx, &link, &reg, i * SIZE, SIZE, 0)?;
        }
        // The sender shall know of them.
        std::thread::sleep(Duration::from_millis(100));
        ctx.close(&[link])?;
        ctx.oob.send(0, b"closed".to_vec())?;
        ctx.oob.recv(0)?;
        let mut image = vec![0u8; buffer.len()];
        buffer.read(0, &mut image)?;
        let written = image.iter().filter(|b| **b != 0xaa).count();
        ensure!(
            written == 0,
            "{written} bytes were written after closeRecv had returned"
        );
        // The registration has ended with its connection.
        std::mem::forget(reg);
        ctx.oob.send(0, b"seen".to_vec())?;
        return ctx.close(&[bystander]);
    }
    ctx.close(&links)
}
