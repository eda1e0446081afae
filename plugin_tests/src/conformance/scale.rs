//! Many connections with little room.

use super::Case;
use crate::ensure;
use crate::error::{Context, Result};
use crate::exchange::{exchange, Shape, Stream};
use crate::rank::{Ctx, Link};

pub const CASES: &[Case] = &[
    Case::new("two_hundred_connections", "scale", 2, two_hundred,
        "200 connections with 32 requests in flight each work at once")
        .processes_only(),
    Case { nofile: Some(1_024), ..Case::new("thousand_connections", "scale", 2, thousand,
        "1,000 connections with 32 requests in flight each work under a soft limit of 1,024 open files")
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
    ctx.state("closing all connections");
    ctx.close(&links)
}
