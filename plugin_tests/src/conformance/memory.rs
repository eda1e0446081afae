//! Registrations: several in one page, one after the other at the same address, while data flows.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use vccl::error::ResultCode;

use super::util::{put, recv, send, verify, wait};
use super::Case;
use crate::ensure;
use crate::error::{Context, Error, Result};
use crate::exchange::{exchange, Shape, Stream};
use crate::memory::{Buffer, Kind};
use crate::net::Registered;
use crate::pattern::Key;
use crate::rank::Ctx;

pub const CASES: &[Case] = &[
    Case::new("registrations", "memory", 2, registrations,
        "registrations that share a page, overlap, or lie within one allocation each work until they end"),
    Case::new("reregister", "memory", 2, reregister,
        "memory that is freed and allocated again at the same address is registered anew, with its new content"),
    Case::new("reg_race", "memory", 2, reg_race,
        "regMr and deregMr on the service thread disturb no message on the progress thread"),
    Case::new("users_memory", "memory", 2, users_memory,
        "a user's cudaMalloc memory beside NCCL's VMM buffers is registered, or refused where it would be staged, by \
         both ends alike; the buffers carry messages all the same"),
];

/// What NCCL does with a buffer of the user's: registered behind its own, and if that is refused used without.
fn users_memory(ctx: &mut Ctx) -> Result<()> {
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    if ctx.send_kind()? != Kind::Vmm || ctx.recv_kind()? != Kind::Vmm {
        return Err(Error::skip("it takes VMM memory on both sides"));
    }
    let shape = |_: usize| Shape::plain(300_000);
    let both = |ctx: &Ctx| {
        let streams: Vec<Stream> = links.iter().map(|l| Stream::new(l, 20, &shape)).collect();
        exchange(ctx, &streams)
    };
    both(ctx)?;
    let user = Arc::new(Buffer::new(Kind::Cuda, 1 << 20, ctx.gpu)?);
    let staged = std::env::var("VCCL_TRANSPORT").is_ok_and(|t| t == "tcp");
    let eager = std::env::var("CUDA_MODULE_LOADING").is_ok_and(|m| m == "EAGER");
    for link in &links {
        let mut registered = false;
        match ctx.register(link, &user) {
            Ok(reg) => {
                registered = true;
                ensure!(
                    eager || !staged,
                    "cudaMalloc memory is staged beside VMM memory"
                );
                ctx.deregister(vec![reg])?;
            }
            Err(e) => {
                ensure!(e.code() == Some(ResultCode::INVALID_USAGE), "{e}");
                // RDMA may stage too; the copy engines have no reason.
                let copies = std::env::var("VCCL_TRANSPORT").is_ok_and(|t| t == "copy_engine");
                ensure!(!copies, "refused by the copy engines: {e}");
            }
        }
        // Memory that is registered at one end alone makes NCCL hang.
        let ends = ctx.oob.all_gather(&[registered.into()])?;
        ensure!(
            ends.iter().all(|e| *e == ends[0]),
            "{}: the ends differ: {ends:?}",
            link.id
        );
    }
    // NCCL's own may be several.
    let own = Arc::new(Buffer::new(Kind::Vmm, 1 << 20, ctx.gpu)?);
    for link in &links {
        let reg = ctx.register(link, &own)?;
        ctx.deregister(vec![reg])?;
    }
    both(ctx)?;
    ctx.close(&links)
}

fn registrations(ctx: &mut Ctx) -> Result<()> {
    const LEN: usize = 4 << 20;
    let links = ctx.connect(&[(0, 1)])?;
    let link = links[0];
    let buffer = ctx.buffer(&link, LEN)?;
    // Sixteen in one page, some that overlap them, and some further off in the allocation.
    let mut ranges: Vec<(usize, usize)> = (0..16).map(|i| (i * 256, 256)).collect();
    ranges.extend([
        (0, 4096),
        (100, 5_000),
        (4_095, 2),
        (0, LEN),
        (65_537, 100_000),
    ]);
    ranges.extend((0..8).map(|i| ((1 << 20) + i * 300_001, 300_000)));
    let mut regs: Vec<Option<Registered>> = Vec::new();
    for (offset, len) in &ranges {
        regs.push(Some(
            ctx.service(|net| net.reg_mr(link.comm, &buffer, *offset, *len))
                .context(|| format!("registration of {len} bytes at {offset}"))?,
        ));
    }
    let mut number = 0;
    let mut through_all = |ctx: &Ctx, regs: &[Option<Registered>]| -> Result<()> {
        for (i, reg) in regs.iter().enumerate() {
            let Some(reg) = reg else { continue };
            let len = reg.len.min(40_000);
            let at = reg.len - len;
            let key = Key {
                seed: 5,
                rank: 0,
                connection: link.id,
                message: number,
            };
            number += 1;
            let what = format!("registration {i} of {:?}", ranges[i]);
            if link.sends() {
                put(&buffer, reg.offset + at, len, key)?;
                let r = send(ctx, &link, reg, at, len, 0).context(|| &what)?;
                wait(ctx, &what, r)?;
            } else {
                let r = recv(ctx, &link, reg, at, len, 0).context(|| &what)?;
                let size = wait(ctx, &what, r)?;
                ensure!(size == len, "{what}: test gave {size} bytes of {len}");
                verify(&buffer, reg.offset + at, len, key).context(|| &what)?;
            }
        }
        Ok(())
    };
    through_all(ctx, &regs)?;
    // The ends end different ones: what one end has registered is no matter of the other's.
    for step in [2usize, 3, 5] {
        let mine = step + usize::from(link.sends());
        let mut ended = Vec::new();
        for (i, r) in regs.iter_mut().enumerate() {
            if i % 6 == mine % 6 {
                ended.extend(r.take());
            }
        }
        ensure!(!ended.is_empty(), "the case ends no registration");
        ctx.deregister(ended)?;
        // Both ends use the same registrations: those that are left at both.
        let left: Vec<Option<Registered>> = regs
            .iter()
            .enumerate()
            .map(|(i, r)| {
                let gone = |s: usize, extra: usize| s <= step && i % 6 == (s + extra) % 6;
                let any = [2, 3, 5].into_iter().any(|s| gone(s, 0) || gone(s, 1));
                if any {
                    None
                } else {
                    r.clone()
                }
            })
            .collect();
        ensure!(
            left.iter().any(Option::is_some),
            "the case leaves no registration"
        );
        through_all(ctx, &left)?;
    }
    ctx.deregister(regs.into_iter().flatten().collect())?;
    ctx.close(&links)
}

fn reregister(ctx: &mut Ctx) -> Result<()> {
    const ROUNDS: usize = 20;
    let links = ctx.connect(&[(0, 1)])?;
    let link = &links[0];
    let place = AtomicUsize::new(0);
    let mut same = 0;
    for round in 0..ROUNDS {
        // Now and then another length, so that what is known of the address is wrong in that too.
        let size = if round % 4 == 3 { 3_000_000 } else { 1_000_000 };
        let shape = move |_: usize| Shape::plain(size);
        let before = place.load(Ordering::Relaxed);
        let stream = Stream {
            place: Some(&place),
            seed: round as u64,
            ..Stream::new(link, 2, &shape)
        };
        exchange(ctx, &[stream]).context(|| format!("round {round}"))?;
        same += usize::from(place.load(Ordering::Relaxed) == before);
    }
    ensure!(
        same > 0,
        "no allocation came back at its address: the case has shown nothing"
    );
    ctx.close(&links)
}

fn reg_race(ctx: &mut Ctx) -> Result<()> {
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    let mut kinds = vec![ctx.send_kind()?, ctx.recv_kind()?, Kind::Malloc];
    let staged = std::env::var("VCCL_TRANSPORT").is_ok_and(|t| t != "copy_engine");
    if staged && kinds.contains(&Kind::Vmm) && kinds.contains(&Kind::Cuda) {
        // One end takes no mixture: see `users_memory`.
        kinds = vec![Kind::Malloc];
    }
    let buffers: Vec<Arc<Buffer>> = kinds
        .iter()
        .flat_map(|k| [4_096usize, 300_000, 2 << 20].map(|len| (*k, len)))
        .map(|(k, len)| Ok(Arc::new(Buffer::new(k, len, ctx.gpu)?)))
        .collect::<Result<_>>()?;
    let shape = |i: usize| Shape::plain(if i.is_multiple_of(2) { 65_536 } else { 1_000 });
    let ctx: &Ctx = ctx;
    let links_ref = &links;
    // Fewer do not race.
    const ENOUGH: usize = 20;
    let pairs = AtomicUsize::new(0);
    std::thread::scope(|scope| -> Result<()> {
        let mover = scope.spawn(|| -> Result<()> {
            // As often as both ranks need.
            loop {
                let streams: Vec<Stream> = links_ref
                    .iter()
                    .map(|l| Stream {
                        slots: 100,
                        ..Stream::new(l, 2_000, &shape)
                    })
                    .collect();
                exchange(ctx, &streams)?;
                let enough = pairs.load(Ordering::Relaxed) >= ENOUGH;
                ctx.oob.send(1 - ctx.rank, vec![enough.into()])?;
                let other = ctx.oob.recv(1 - ctx.rank)?;
                if enough && other == [1] {
                    return Ok(());
                }
            }
        });
        let mut failure = None;
        while !mover.is_finished() && failure.is_none() {
            let n = pairs.fetch_add(1, Ordering::Relaxed);
            let b = &buffers[n % buffers.len()];
            let link = &links_ref[n % links_ref.len()];
            let done = ctx
                .service(|net| {
                    let r = net.reg_mr(link.comm, b, 0, b.len())?;
                    net.dereg_mr(r)
                })
                .context(|| format!("registration {n} while data flows"));
            failure = done.err();
            if failure.is_some() {
                pairs.fetch_max(ENOUGH, Ordering::Relaxed);
            }
        }
        mover.join().expect("the exchange does not panic")?;
        failure.map_or(Ok(()), Err)
    })?;
    ctx.close(&links)
}
