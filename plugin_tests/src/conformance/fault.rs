//! Faults of the network under a connection. Commands from outside make them, so that these cases run
//! only where somebody gives the commands: `VCCL_DRIVER_FAULT`, and `VCCL_DRIVER_HEAL`, which undoes it.

use std::process::Command;
use std::time::{Duration, Instant};

use vccl::error::ResultCode;

use super::util::{memory, put, verify};
use super::Case;
use crate::error::{Context, Error, Result};
use crate::exchange::simple;
use crate::flow::{Flow, Message};
use crate::memory::Buffer;
use crate::net::Registered;
use crate::pattern::Key;
use crate::rank::{Ctx, Link};
use crate::worker::Idle;
use crate::{ensure, fail};

pub const CASES: &[Case] = &[
    Case::new("fault_transfer", "fault", 2, fault_transfer,
        "a fault in the middle of transfers lets them complete with the right data or gives an error at both \
         ends, as VCCL_DRIVER_OUTCOME (completes, fails, either) says; a connection that has failed touches no \
         memory; new connections work once it is over"),
    Case::new("fault_between", "fault", 2, fault_between,
        "what changes in the network between two connections, an address say, does not disturb the second"),
];

/// How long a fault may last: until the transfer goes on, or until the error.
const FAULT_LIMIT: Duration = Duration::from_secs(60);

/// How long the fault lasts.
const FAULT_TIME: Duration = Duration::from_secs(1);

/// What a network needs after a fault before new connections must work.
const SETTLE: Duration = Duration::from_secs(1);

/// Bytes of a message, unless `VCCL_DRIVER_SIZE` says otherwise: with more, messages are under way for longer
/// than the command takes.
const SIZE: usize = 100_000;
const SLOTS: usize = 8;
const COUNT: usize = 80;

/// The command in that variable; the case does not apply without it.
fn given(variable: &str) -> Result<String> {
    std::env::var(variable).map_err(|_| Error::skip(format!("{variable} is not set")))
}

fn sh(command: &str) -> Result<()> {
    let status = Command::new("/bin/sh").args(["-c", command]).status()?;
    ensure!(status.success(), "{command}: {status}");
    Ok(())
}

/// The messages of one end, each with its own data, which the receiver checks.
fn flow<'a>(
    ctx: &Ctx,
    link: &Link,
    bytes: usize,
    buffer: &'a Buffer,
    memory: &'a Registered,
) -> Flow<'a> {
    let (sends, connection) = (link.sends(), link.id);
    let rank = if sends { ctx.rank } else { link.peer };
    let key = move |message| Key {
        seed: 0,
        rank,
        connection,
        message,
    };
    let offset = move |i: usize| (i % SLOTS) * bytes;
    Flow::new(
        format!("connection {connection} with rank {}", link.peer),
        link.comm,
        COUNT,
        SLOTS,
        move |i| {
            if sends {
                put(buffer, offset(i), bytes, key(i)).expect("the buffer has room for its slots");
            }
            Message {
                memory,
                offset: offset(i),
                size: bytes,
                tag: 0,
            }
        },
        move |i, size| {
            ensure!(size == bytes, "test gave {size} bytes for {bytes}");
            if sends {
                return Ok(());
            }
            verify(buffer, offset(i), bytes, key(i))
        },
    )
}

/// Moves everything, or as much as goes, until each flow has ended: how. `half` is called once when half of it is
/// there.
fn move_all(
    ctx: &Ctx,
    flows: &mut [Flow],
    half: impl FnOnce() -> Result<()> + Send,
) -> Result<Vec<Result<()>>> {
    ctx.progress(|io| {
        let mut half = Some(half);
        let mut idle = Idle::patient();
        let mut last = Instant::now();
        let mut ends: Vec<Result<()>> = flows.iter().map(|_| Ok(())).collect();
        loop {
            let (mut moved, mut over) = (false, true);
            for (f, end) in flows.iter_mut().zip(&mut ends) {
                over &= if end.is_err() {
                    f.wind_up(io)
                } else {
                    match f.poll(io) {
                        Ok(any) => moved |= any,
                        Err(e) => *end = Err(e),
                    }
                    end.is_ok() && f.finished()
                };
            }
            if over {
                return Ok(ends);
            }
            if flows.iter().all(|f| f.done() >= COUNT / 2) {
                if let Some(half) = half.take() {
                    half()?;
                }
            }
            if moved {
                last = Instant::now();
                idle.reset();
            } else {
                ensure!(
                    last.elapsed() < FAULT_LIMIT,
                    "nothing moved for {FAULT_LIMIT:?} and there was no error: {}",
                    flows[0].describe()
                );
                idle.wait();
            }
        }
    })
}

/// What an end that has failed was given is the user's again: nothing is written there, even if the fault ends.
fn is_left_alone(buffer: &Buffer) -> Result<()> {
    const MARK: u8 = 0xa5;
    buffer.set(MARK)?;
    std::thread::sleep(FAULT_TIME + SETTLE);
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes)?;
    match bytes.iter().position(|b| *b != MARK) {
        None => Ok(()),
        Some(at) => fail!("byte {at} was written after the receive had ended in an error"),
    }
}

fn fault_transfer(ctx: &mut Ctx) -> Result<()> {
    let fault = given("VCCL_DRIVER_FAULT")?;
    let heal = given("VCCL_DRIVER_HEAL")?;
    let outcome = std::env::var("VCCL_DRIVER_OUTCOME").unwrap_or_else(|_| "either".into());
    ensure!(
        ["completes", "fails", "either"].contains(&outcome.as_str()),
        "VCCL_DRIVER_OUTCOME={outcome}"
    );
    let bytes = match std::env::var("VCCL_DRIVER_SIZE") {
        Ok(text) => text
            .parse()
            .map_err(|_| Error::new(format!("VCCL_DRIVER_SIZE={text}")))?,
        Err(_) => SIZE,
    };
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    let places: Vec<_> = links
        .iter()
        .map(|l| memory(ctx, l, SLOTS * bytes))
        .collect::<Result<_>>()?;
    let mut healer = None;
    let ends = {
        let mut flows: Vec<Flow> = links
            .iter()
            .zip(&places)
            .map(|(l, (buffer, reg))| flow(ctx, l, bytes, buffer, reg))
            .collect();
        move_all(ctx, &mut flows, || {
            if ctx.rank == 0 {
                // Messages are in flight, and nobody looks after them meanwhile.
                sh(&fault)?;
                healer = Some(std::thread::spawn(move || {
                    std::thread::sleep(FAULT_TIME);
                    sh(&heal)
                }));
            }
            Ok(())
        })?
    };
    ensure!(
        ctx.rank != 0 || healer.is_some(),
        "the connections ended before the fault"
    );
    for e in ends.iter().filter_map(|e| e.as_ref().err()) {
        let good = matches!(e.code(), Some(ResultCode::REMOTE | ResultCode::SYSTEM));
        ensure!(good, "neither ncclRemoteError nor ncclSystemError: {e}");
    }
    for ((link, end), (buffer, _)) in links.iter().zip(&ends).zip(&places) {
        if end.is_err() && !link.sends() {
            is_left_alone(buffer)?;
        }
    }
    let moved: Result<()> = ends.into_iter().collect();
    ctx.deregister(places.into_iter().map(|p| p.1).collect())?;
    ctx.close(&links)?;
    let all = ctx.oob.all_gather(&[u8::from(moved.is_err())])?;
    let failed = all.iter().any(|f| f == &[1]);
    match outcome.as_str() {
        "completes" if failed => {
            let mine = moved.err().map_or("not here".into(), |e| e.to_string());
            fail!("the transfer should have survived the fault: {mine}")
        }
        "fails" if !failed => fail!("the transfer should not have survived the fault"),
        _ => {}
    }
    if let Some(h) = healer {
        h.join().map_err(|_| Error::new("the healing thread"))??;
    }
    ctx.oob.barrier()?;
    std::thread::sleep(SETTLE);
    ctx.oob.barrier()?;
    let again = ctx.connect(&[(0, 1), (1, 0)]).context(|| "after it")?;
    simple(ctx, &again, 16, SIZE, 1).context(|| "after it")?;
    ctx.close(&again)
}

fn fault_between(ctx: &mut Ctx) -> Result<()> {
    let fault = given("VCCL_DRIVER_FAULT")?;
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    simple(ctx, &links, 16, SIZE, 0)?;
    ctx.close(&links)?;
    ctx.oob.barrier()?;
    // Each rank in its own network, with its number in $RANK.
    sh(&format!("RANK={}; {fault}", ctx.rank))?;
    std::thread::sleep(SETTLE);
    ctx.oob.barrier()?;
    let again = ctx.connect(&[(0, 1), (1, 0)]).context(|| "after it")?;
    simple(ctx, &again, 16, SIZE, 1).context(|| "after it")?;
    ctx.close(&again)
}
