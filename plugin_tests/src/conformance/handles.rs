//! Handles come from another machine: nothing in them may be trusted.

use std::time::{Duration, Instant};

use super::util::{
    accept, accept_within, close_listen, connect, connect_within, listen, NOBODY_LIMIT,
};
use super::Case;
use crate::error::Result;
use crate::exchange::simple;
use crate::logs;
use crate::net::{Comm, Handle, SendComm};
use crate::pattern::Rng;
use crate::rank::{Ctx, Link};
use crate::worker::Idle;
use crate::{ensure, fail};

pub const CASES: &[Case] = &[
    Case::new("bad_handles", "handles", 2, bad_handles,
        "connect with random, empty and truncated handles is an error in bounded time, and harms no other connection")
    .without_memory(),
    Case::new("flipped_handles", "handles", 2, flipped_handles,
        "connect with any one bit of a handle flipped is an error in bounded time, and harms no other connection")
    .without_memory(),
    Case::new("connect_to_nobody", "handles", 3, connect_to_nobody,
        "connect to a listener that was closed, or whose process died, is an error within 10 s that is logged")
    .without_memory()
    .killing(&[2]),
];

/// Tries every handle at the same time, until each has given an error.
fn all_fail(ctx: &Ctx, named: Vec<(String, Handle)>) -> Result<()> {
    let dev = ctx.dev;
    let total = named.len();
    let (succeeded, still, uncoded) = ctx.service(|net| {
        let end = Instant::now() + NOBODY_LIMIT;
        let mut open = named;
        let mut succeeded: Vec<(String, SendComm)> = Vec::new();
        let mut uncoded = Vec::new();
        let mut idle = Idle::patient();
        while !open.is_empty() && Instant::now() < end {
            open.retain_mut(|(name, handle)| match net.connect(dev, handle) {
                Ok(None) => true,
                Ok(Some(c)) => {
                    succeeded.push((name.clone(), c));
                    false
                }
                Err(e) => {
                    if e.code().is_none() {
                        uncoded.push(format!("{name}: {e}"));
                    }
                    false
                }
            });
            idle.wait();
        }
        let names: Vec<String> = succeeded.iter().map(|s| s.0.clone()).collect();
        for (_, c) in succeeded {
            let _ = net.close(Comm::Send(c));
        }
        (
            names,
            open.into_iter().map(|o| o.0).collect::<Vec<_>>(),
            uncoded,
        )
    });
    let few = |v: &[String]| v.iter().take(12).cloned().collect::<Vec<_>>().join(", ");
    ensure!(
        succeeded.is_empty(),
        "connect succeeded with {} of {total} bad handles: {}",
        succeeded.len(),
        few(&succeeded)
    );
    ensure!(
        still.is_empty(),
        "connect still gives NULL after {NOBODY_LIMIT:?} with {} of {total} bad handles: {}",
        still.len(),
        few(&still)
    );
    ensure!(uncoded.is_empty(), "{}", few(&uncoded));
    Ok(())
}

/// Rank 1 listens and polls accept while rank 0 tries bad handles made from the good one; then the
/// good one must work, and be the only one that was accepted.
fn with_bad(ctx: &mut Ctx, make: impl Fn(&Handle) -> Vec<Vec<(String, Handle)>>) -> Result<()> {
    let bystander = ctx.connect(&[(0, 1), (1, 0)])?;
    simple(ctx, &bystander, 4, 10_000, 1)?;
    let id = ctx.next_connection();
    let link = if ctx.rank == 1 {
        let (handle, l) = listen(ctx)?;
        ctx.oob.send(0, handle.0)?;
        let c = loop {
            if let Some(c) = accept_within(ctx, l, Duration::from_millis(50))? {
                break c;
            }
            if let Ok(word) = ctx.oob.recv_within(0, Duration::from_millis(1)) {
                ensure!(word == b"good", "out of step");
                break accept(ctx, l)?;
            }
        };
        // That must be the good one: the data on it tells.
        let more = accept_within(ctx, l, Duration::from_millis(50))?;
        ensure!(
            more.is_none(),
            "accept gave a second connection, and one good handle was used"
        );
        close_listen(ctx, l)?;
        Link {
            id,
            peer: 0,
            comm: Comm::Recv(c),
        }
    } else {
        let good = ctx.recv_handle(1)?;
        for batch in make(&good) {
            ctx.state(format!("{} bad handles, from {}", batch.len(), batch[0].0));
            all_fail(ctx, batch)?;
        }
        ctx.oob.send(1, b"good".to_vec())?;
        let mut handle = good;
        let c = connect(ctx, &mut handle)?;
        Link {
            id,
            peer: 1,
            comm: Comm::Send(c),
        }
    };
    simple(ctx, &[link], 8, 10_000, 2)?;
    simple(ctx, &bystander, 4, 10_000, 3)?;
    ctx.close(&[link])?;
    ctx.close(&bystander)
}

fn bad_handles(ctx: &mut Ctx) -> Result<()> {
    with_bad(ctx, |good| {
        let mut bad = vec![
            ("all zero".to_string(), Handle([0; 128])),
            ("all ones".to_string(), Handle([0xff; 128])),
        ];
        let mut rng = Rng::new(7);
        for i in 0..60 {
            let mut h = Handle([0; 128]);
            h.0.iter_mut().for_each(|b| *b = rng.number() as u8);
            bad.push((format!("random {i}"), h));
        }
        let used = good.0.iter().rposition(|b| *b != 0).map_or(0, |p| p + 1);
        for keep in 0..used {
            // Both what a short copy and what a careless one would leave.
            let mut h = *good;
            h.0[keep..].fill(0);
            if h.0 != good.0 {
                bad.push((format!("cut to {keep} bytes"), h));
            }
        }
        for i in 0..40 {
            let mut h = *good;
            let from = rng.below(128);
            let len = 1 + rng.below(128 - from);
            h.0[from..from + len]
                .iter_mut()
                .for_each(|b| *b = rng.number() as u8);
            if h.0 != good.0 && from < used {
                bad.push((format!("random {i} in bytes {from} to {}", from + len), h));
            }
        }
        vec![bad]
    })
}

fn flipped_handles(ctx: &mut Ctx) -> Result<()> {
    with_bad(ctx, |good| {
        (0..128usize)
            .collect::<Vec<_>>()
            .chunks(16)
            .map(|bytes| {
                bytes
                    .iter()
                    .flat_map(|byte| (0..8).map(move |bit| (*byte, bit)))
                    .map(|(byte, bit)| {
                        let mut h = *good;
                        h.0[byte] ^= 1 << bit;
                        (format!("bit {bit} of byte {byte}"), h)
                    })
                    .collect()
            })
            .collect()
    })
}

fn connect_to_nobody(ctx: &mut Ctx) -> Result<()> {
    match ctx.rank {
        0 => {
            for (who, dies) in [(1, false), (2, true)] {
                let mut handle = ctx.recv_handle(who)?;
                if dies {
                    ctx.oob.wait_gone(who)?;
                } else {
                    ensure!(ctx.oob.recv(who)? == b"closed", "out of step");
                }
                let mark = logs::mark();
                ctx.state(format!("connecting to nobody (rank {who})"));
                match connect_within(ctx, &mut handle, NOBODY_LIMIT) {
                    Ok(Some(_)) => fail!("connect to a listener that is gone gave a comm"),
                    Ok(None) => fail!("connect to a listener that is gone waits {NOBODY_LIMIT:?}"),
                    Err(e) => ensure!(e.code().is_some(), "{e}"),
                }
                let said = logs::warnings_since(mark);
                ensure!(
                    said.iter().any(|s| s.len() > 20),
                    "the error was not explained: {said:?}"
                );
            }
            let links = ctx.connect(&[(0, 1)])?;
            simple(ctx, &links, 4, 1_000, 0)?;
            ctx.close(&links)
        }
        1 => {
            let (handle, l) = listen(ctx)?;
            ctx.oob.send(0, handle.0)?;
            close_listen(ctx, l)?;
            ctx.oob.send(0, b"closed".to_vec())?;
            let links = ctx.connect(&[(0, 1)])?;
            simple(ctx, &links, 4, 1_000, 0)?;
            ctx.close(&links)
        }
        _ => {
            let (handle, _) = listen(ctx)?;
            ctx.oob.send(0, handle.0)?;
            // The handle must be on its way before this process is gone.
            std::thread::sleep(Duration::from_millis(50));
            super::kill::die()
        }
    }
}
