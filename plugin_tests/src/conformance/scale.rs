//! Many connections with little room.

use super::Case;
use crate::ensure;
use crate::error::{Context, Result};
use crate::exchange::{exchange, Shape, Stream};
use crate::memory::Kind;
use crate::rank::{Ctx, Link};

pub const CASES: &[Case] = &[
    Case::new("two_hundred_connections", "scale", 2, two_hundred,
        "200 connections with 32 requests in flight each work at once")
        .processes_only(),
    Case { nofile: Some(1_024), ..Case::new("thousand_connections", "scale", 2, thousand,
        "1,000 connections with 32 requests in flight each work under a soft limit of 1,024 open files, and take less than 1 GiB")
        .processes_only() },
];

fn two_hundred(ctx: &mut Ctx) -> Result<()> {
    many(ctx, 200)
}

fn thousand(ctx: &mut Ctx) -> Result<()> {
    many(ctx, 1_000)
}

fn many(ctx: &mut Ctx, all: usize) -> Result<()> {
    const STEP: usize = 50;
    let before = taken()?;
    // Not half from each side: every descriptor that a connection needs is needed in both processes.
    let mut links: Vec<Link> = Vec::new();
    for done in (0..all).step_by(STEP) {
        ctx.state(format!("{done} connections are open"));
        let pairs: Vec<(usize, usize)> = (0..STEP)
            .map(|i| if i % 2 == 0 { (0, 1) } else { (1, 0) })
            .collect();
        let new = ctx
            .connect(&pairs)
            .context(|| format!("with {done} connections open"))?;
        links.extend(new);
    }
    ensure!(links.len() == all, "{} of {all} connections", links.len());
    let shape = |i: usize| Shape::plain(200 + i % 50);
    let streams: Vec<Stream> = links
        .iter()
        .map(|l| Stream {
            window: 32,
            slots: 32,
            ..Stream::new(l, 64, &shape)
        })
        .collect();
    ctx.state("moving data on all connections");
    exchange(ctx, &streams)?;
    // Also what the driver and the stand-in for CUDA need for them, which is little.
    let taken = taken()?.saturating_sub(before);
    if std::env::var_os("VCCL_DRIVER_LOG").is_some() {
        eprintln!(
            "rank {}: {all} connections take {} MiB",
            ctx.rank,
            taken >> 20
        );
    }
    // What a GPU has for memory that cannot be exported has a limit of its own (VCCL_STAGING_MEMORY), and the
    // stand-in's GPUs have their memory here, seen by both ends.
    let gpu = match ctx.recv_kind()? {
        Kind::VmmPrivate => 2 << 30,
        _ => 0,
    };
    ensure!(
        taken < (1 << 30) + gpu,
        "{all} connections take {} MiB",
        taken >> 20
    );
    ctx.state("closing all connections");
    ctx.close(&links)
}

/// Bytes of memory that this process has: its own pages, and all of the shared memory that it has mapped, which
/// a real driver page-locks whole.
fn taken() -> Result<usize> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages: Vec<usize> = text
        .split_whitespace()
        .filter_map(|n| n.parse().ok())
        .collect();
    ensure!(pages.len() > 2, "/proc/self/statm reads {text:?}");
    // SAFETY: takes a number only.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let shared = std::fs::read_to_string("/proc/self/maps")?
        .lines()
        .filter(|l| l.contains("/memfd:vccl"))
        .filter_map(|l| {
            let (from, to) = l.split_whitespace().next()?.split_once('-')?;
            let number = |n| usize::from_str_radix(n, 16).ok();
            Some(number(to)? - number(from)?)
        })
        .sum::<usize>();
    Ok((pages[1] - pages[2]) * page + shared)
}
