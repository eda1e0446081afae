//! Peers that die: killed while connecting, with receives posted, or in the middle of a transfer.
//! Each victim is a rank of its own; rank 0 survives them all, and the last rank is a bystander
//! whose connection to rank 0 must go on.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::util::{
    accept_within, close_listen, connect_within, is_remote, listen, memory, receiver, recv,
    remote_error_of, remote_error_of_send, NOBODY_LIMIT, REMOTE_LIMIT,
};
use super::Case;
use crate::error::{Context, Result};
use crate::exchange::simple;
use crate::flow::{Flow, Message};
use crate::net::Comm;
use crate::pattern::Rng;
use crate::rank::{Ctx, Link};
use crate::worker::Idle;
use crate::{ensure, fail};

pub const CASES: &[Case] = &[
    Case::new("kill_connecting", "kill", 10, kill_connecting,
        "a peer that is killed while connecting gives an error or no connection, in bounded time, and leaves nothing open")
    .without_memory()
    .killing(&[1, 2, 3, 4, 5, 6, 7, 8]),
    Case::new("kill_posted", "kill", 5, kill_posted,
        "a peer that is killed turns posted receives into ncclRemoteError within 5 s; close takes at most 1 s")
    .killing(&[1, 2, 3]),
    Case::new("kill_transfer", "kill", 7, kill_transfer,
        "a peer that is killed in the middle of transfers gives ncclRemoteError within 5 s at both kinds of end")
    .killing(&[1, 2, 3, 4, 5]),
];

/// Ends this process as the kernel would.
pub fn die() -> ! {
    // SAFETY: the signal goes to this very process.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Kills this process after a while that differs from run to run, at most `most`.
fn die_within(ctx: &Ctx, most: Duration) {
    let clock = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.subsec_nanos());
    let mut rng = Rng::new(u64::from(clock) + ctx.rank as u64);
    let after = Duration::from_micros(rng.below(most.as_micros() as usize) as u64);
    std::thread::spawn(move || {
        std::thread::sleep(after);
        die();
    });
}

/// This process's open descriptors, by what they are.
fn open_files() -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for f in std::fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .flatten()
    {
        if let Ok(target) = std::fs::read_link(f.path()) {
            let text = target.to_string_lossy();
            let kind = text.split(":[").next().unwrap_or("").to_string();
            *out.entry(kind).or_default() += 1;
        }
    }
    out
}

/// Waits until no more descriptors are open than before.
fn nothing_left_open(before: &BTreeMap<String, usize>) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(3);
    loop {
        let now = open_files();
        let more: Vec<String> = now
            .iter()
            .filter(|(k, n)| *n > before.get(*k).unwrap_or(&0))
            .map(|(k, n)| format!("{} more of {k}", n - before.get(k).unwrap_or(&0)))
            .collect();
        if more.is_empty() {
            return Ok(());
        }
        ensure!(
            Instant::now() < end,
            "after every comm to dead peers was closed, descriptors are left open: {}",
            more.join(", ")
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What happens between rank 0 and the bystander while others die.
fn bystand(ctx: &mut Ctx, rounds: usize) -> Result<()> {
    let last = ctx.nranks - 1;
    let links = ctx.connect(&[(0, last), (last, 0)])?;
    for round in 0..=rounds {
        simple(ctx, &links, 8, 30_000, round as u64)?;
        ctx.oob.barrier_of(&[0, last])?;
    }
    ctx.close(&links)
}

/// The survivor's part: `round` is called once for each victim, with the bystander's connection
/// checked in between, and no descriptor left open after all.
fn survive(
    ctx: &mut Ctx,
    victims: usize,
    round: impl Fn(&mut Ctx, usize) -> Result<()>,
) -> Result<()> {
    let last = ctx.nranks - 1;
    let links = ctx.connect(&[(0, last), (last, 0)])?;
    simple(ctx, &links, 8, 30_000, 0)?;
    ctx.oob.barrier_of(&[0, last])?;
    let mut before = open_files();
    for v in 1..=victims {
        round(ctx, v).context(|| format!("victim {v}"))?;
        ctx.oob.wait_gone(v)?;
        simple(ctx, &links, 8, 30_000, v as u64).context(|| "the bystander's connection")?;
        ctx.oob.barrier_of(&[0, last])?;
        if v == 1 {
            // What the plugin keeps for its own use, once it has seen a death, is kept once.
            std::thread::sleep(Duration::from_millis(50));
            for (k, n) in open_files() {
                let was = before.entry(k).or_default();
                ensure!(
                    n <= *was + 4,
                    "one dead peer left {} descriptors open",
                    n - *was
                );
                *was = n.max(*was);
            }
        }
    }
    nothing_left_open(&before)?;
    ctx.close(&links)
}

fn kill_connecting(ctx: &mut Ctx) -> Result<()> {
    let victims = ctx.nranks - 2;
    match ctx.rank {
        0 => survive(ctx, victims, |ctx, v| match v % 4 {
            // The victim listened, and is dead before anybody connects.
            1 => {
                let mut handle = ctx.recv_handle(v)?;
                ctx.oob.wait_gone(v)?;
                outcome_of_connect(ctx, v, &mut handle)
            }
            // It listened and accepts, and dies at some moment of that.
            2 | 3 => {
                let mut handle = ctx.recv_handle(v)?;
                outcome_of_connect(ctx, v, &mut handle)
            }
            // It connects, and dies at some moment of that.
            _ => {
                let (handle, l) = listen(ctx)?;
                ctx.oob.send(v, handle.0)?;
                let mut got = Vec::new();
                let end = Instant::now() + Duration::from_millis(500);
                while Instant::now() < end {
                    got.extend(
                        accept_within(ctx, l, Duration::from_millis(20))
                            .context(|| "accept while the connector dies")?,
                    );
                }
                for c in got {
                    let link = Link {
                        id: 1000 + v,
                        peer: v,
                        comm: Comm::Recv(c),
                    };
                    must_fail(ctx, &link)?;
                }
                close_listen(ctx, l)
            }
        }),
        r if r <= victims => {
            match r % 4 {
                1 => {
                    let (handle, _) = listen(ctx)?;
                    ctx.oob.send(0, handle.0)?;
                    std::thread::sleep(Duration::from_millis(50));
                    die();
                }
                2 | 3 => {
                    let (handle, l) = listen(ctx)?;
                    ctx.oob.send(0, handle.0)?;
                    std::thread::sleep(Duration::from_millis(20));
                    die_within(ctx, Duration::from_millis(10));
                    accept_within(ctx, l, Duration::from_secs(10))?;
                }
                _ => {
                    let mut handle = ctx.recv_handle(0)?;
                    die_within(ctx, Duration::from_millis(10));
                    connect_within(ctx, &mut handle, Duration::from_secs(10))?;
                }
            }
            std::thread::sleep(Duration::from_secs(60));
            fail!("not killed")
        }
        _ => bystand(ctx, victims),
    }
}

fn outcome_of_connect(ctx: &Ctx, v: usize, handle: &mut crate::net::Handle) -> Result<()> {
    match connect_within(ctx, handle, NOBODY_LIMIT) {
        Ok(Some(c)) => must_fail(
            ctx,
            &Link {
                id: 1000 + v,
                peer: v,
                comm: Comm::Send(c),
            },
        ),
        Ok(None) => fail!("connect to a process that died waits for {NOBODY_LIMIT:?}"),
        Err(e) => {
            ensure!(e.code().is_some(), "{e}");
            Ok(())
        }
    }
}

/// A connection to a dead peer: its next use must give ncclRemoteError in time.
fn must_fail(ctx: &Ctx, link: &Link) -> Result<()> {
    ctx.oob.wait_gone(link.peer)?;
    let (_buffer, reg) = memory(ctx, link, 4_096)?;
    if link.sends() {
        remote_error_of_send(ctx, link, &reg)?;
    } else {
        let c = receiver(link)?;
        let mut request = None;
        let what = "a receive from a peer that died while connecting";
        let e = super::util::error_within(ctx, what, REMOTE_LIMIT, |io| {
            match request {
                None => request = io.irecv(c, &reg, 0, 4_096, 0)?,
                Some(r) => ensure!(io.test(r)?.is_none(), "it completed"),
            }
            Ok(())
        })?;
        is_remote(what, &e)?;
    }
    ctx.deregister(vec![reg])?;
    ctx.close(&[*link])
}

/// Opens connections between rank 0 and victim `v`, both ways.
fn with_victim(ctx: &mut Ctx, v: usize) -> Result<(Link, Link)> {
    let mut links = ctx.connect(&[(0, v), (v, 0)])?;
    links.sort_by_key(|l| !l.sends());
    Ok((links[0], links[1]))
}

fn kill_posted(ctx: &mut Ctx) -> Result<()> {
    let victims = ctx.nranks - 2;
    match ctx.rank {
        0 => survive(ctx, victims, |ctx, v| {
            let (out, inn) = with_victim(ctx, v)?;
            let (_a, out_reg) = memory(ctx, &out, 4_096)?;
            let (_b, in_reg) = memory(ctx, &inn, 8 * 4_096)?;
            let mut requests = Vec::new();
            for i in 0..8 {
                requests.push(recv(ctx, &inn, &in_reg, i * 4_096, 4_096, 0)?);
            }
            ctx.oob.send(v, b"posted".to_vec())?;
            ctx.oob.wait_gone(v)?;
            for (i, r) in requests.into_iter().enumerate() {
                let what = format!("posted receive {i} of a peer that was killed");
                ensure!(remote_error_of(ctx, &what, r)?, "{what}: it completed");
            }
            remote_error_of_send(ctx, &out, &out_reg)?;
            ctx.deregister(vec![out_reg, in_reg])?;
            ctx.close(&[out, inn])
        }),
        r if r <= victims => {
            let (_, inn) = with_victim(ctx, r)?;
            // It has receives posted as well, so that the survivor knows of its memory.
            let (_b, reg) = memory(ctx, &inn, 4_096)?;
            recv(ctx, &inn, &reg, 0, 4_096, 0)?;
            ensure!(ctx.oob.recv(0)? == b"posted", "out of step");
            die()
        }
        _ => bystand(ctx, victims),
    }
}

fn kill_transfer(ctx: &mut Ctx) -> Result<()> {
    const SIZE: usize = 1 << 20;
    const SLOTS: usize = 8;
    let victims = ctx.nranks - 2;
    match ctx.rank {
        0 => survive(ctx, victims, |ctx, v| {
            let (out, inn) = with_victim(ctx, v)?;
            let (_a, out_reg) = memory(ctx, &out, SLOTS * SIZE)?;
            let (_b, in_reg) = memory(ctx, &inn, SLOTS * SIZE)?;
            ctx.oob.send(v, b"go".to_vec())?;
            // Each end on its own, so that each must notice by itself.
            let oob = ctx.oob.clone();
            let moved = ctx.progress(|io| -> Result<usize> {
                let mut flows = endless(&out, &out_reg, &inn, &in_reg, SLOTS, SIZE);
                let mut ended = [false, false];
                let mut idle = Idle::patient();
                let started = Instant::now();
                while ended != [true, true] {
                    let mut any = false;
                    for (f, end) in flows.iter_mut().zip(&mut ended) {
                        if *end {
                            continue;
                        }
                        match f.poll(io) {
                            Ok(m) => any |= m,
                            Err(e) => {
                                is_remote("a transfer whose peer was killed", &e)?;
                                *end = true;
                            }
                        }
                    }
                    if any {
                        idle.reset();
                    } else {
                        idle.wait();
                    }
                    if let Some(t) = oob.gone(v) {
                        ensure!(
                            t.elapsed() < REMOTE_LIMIT,
                            "{REMOTE_LIMIT:?} after the peer was killed there is no error (send \
                             ended: {}, receive ended: {}): {}; {}",
                            ended[0],
                            ended[1],
                            flows[0].describe(),
                            flows[1].describe()
                        );
                    }
                    ensure!(
                        started.elapsed() < Duration::from_secs(30),
                        "the victim lives on"
                    );
                }
                Ok(flows.iter().map(Flow::done).sum())
            })?;
            ensure!(
                moved > 0 || v % 2 == 1,
                "nothing moved before the peer was killed"
            );
            ctx.deregister(vec![out_reg, in_reg])?;
            ctx.close(&[out, inn])
        }),
        r if r <= victims => {
            let (out, inn) = with_victim(ctx, r)?;
            let (_a, out_reg) = memory(ctx, &out, SLOTS * SIZE)?;
            let (_b, in_reg) = memory(ctx, &inn, SLOTS * SIZE)?;
            ensure!(ctx.oob.recv(0)? == b"go", "out of step");
            if r % 2 == 1 {
                die_within(ctx, Duration::from_millis(60));
            }
            ctx.progress(|io| -> Result<()> {
                let mut flows = endless(&out, &out_reg, &inn, &in_reg, SLOTS, SIZE);
                let end = Instant::now() + Duration::from_secs(20);
                while Instant::now() < end {
                    for f in &mut flows {
                        f.poll(io)?;
                    }
                    // The others die once they are well in the middle.
                    if r % 2 == 0 && flows.iter().all(|f| f.done() >= 20) {
                        die();
                    }
                }
                Ok(())
            })?;
            std::thread::sleep(Duration::from_secs(60));
            fail!("not killed")
        }
        _ => bystand(ctx, victims),
    }
}

fn endless<'a>(
    out: &Link,
    out_reg: &'a crate::net::Registered,
    inn: &Link,
    in_reg: &'a crate::net::Registered,
    slots: usize,
    size: usize,
) -> [Flow<'a>; 2] {
    let flow = |name: &str, comm: Comm, memory: &'a crate::net::Registered| {
        Flow::new(
            name.to_string(),
            comm,
            usize::MAX,
            slots,
            move |i| Message {
                memory,
                offset: (i % slots) * size,
                size,
                tag: 0,
            },
            |_, _| Ok(()),
        )
    };
    [
        flow("send", out.comm, out_reg),
        flow("receive", inn.comm, in_reg),
    ]
}
