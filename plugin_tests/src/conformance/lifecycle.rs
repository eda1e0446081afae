//! Loading, init, finalize and unloading, from several threads and again and again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Case;
use crate::cuda;
use crate::error::{Context, Result};
use crate::memory::{Buffer, Kind};
use crate::net::{Comm, Plugin, Progress};
use crate::pattern::{self, Key};
use crate::rank::Ctx;
use crate::worker::Idle;
use crate::{ensure, fail};

pub const CASES: &[Case] = &[
    Case::new("init_threads", "lifecycle", 1, init_threads,
        "init, a connection to oneself, data, close and finalize work in four threads at once, five times each"),
    Case::new("reload", "lifecycle", 1, reload,
        "the library can be closed and opened again, with a working connection each time"),
    Case::new("newest_abi", "lifecycle", 1, newest_abi,
        "the plugin exports every version from 6 to 12 under one network name"),
];

/// A whole life in the calling thread: init to finalize.
fn life(ctx: &Ctx, plugin: &Plugin, number: usize) -> Result<()> {
    if let Some(gpu) = ctx.gpu() {
        cuda::get()?.bind(gpu)?;
    }
    let net = plugin.init()?;
    let n = net.devices()?;
    ensure!(n > 0, "devices() gave {n}");
    let dev = number as i32 % n;
    net.properties(dev)?;
    let (mut handle, listener) = net.listen(dev)?;
    let end = Instant::now() + Duration::from_secs(20);
    let (mut out, mut inn) = (None, None);
    let mut idle = Idle::patient();
    while out.is_none() || inn.is_none() {
        if out.is_none() {
            out = net.connect(dev, &mut handle)?;
        }
        if inn.is_none() {
            inn = net.accept(listener)?;
        }
        ensure!(
            Instant::now() < end,
            "a connection to oneself does not come about"
        );
        idle.wait();
    }
    let (Some(out), Some(inn)) = (out, inn) else {
        fail!("no connection")
    };
    net.close_listen(listener)?;
    const SIZE: usize = 10_000;
    let key = Key {
        seed: 0,
        rank: ctx.rank,
        connection: number,
        message: 0,
    };
    let from = Arc::new(Buffer::new(Kind::Malloc, SIZE, 0)?);
    let to = Arc::new(Buffer::new(Kind::Malloc, SIZE, 0)?);
    to.set(0)?;
    super::util::put(&from, 0, SIZE, key)?;
    let from_reg = net.reg_mr(Comm::Send(out), &from, 0, SIZE)?;
    let to_reg = net.reg_mr(Comm::Recv(inn), &to, 0, SIZE)?;
    let io = Progress::new(net.clone(), ctx.double());
    let (mut sent, mut received) = (None, None);
    let (mut sent_done, mut received_done) = (false, false);
    while !(sent_done && received_done) {
        match received {
            None => received = io.irecv(inn, &to_reg, 0, SIZE, 0)?,
            Some(r) if !received_done => received_done = io.test(r)?.is_some(),
            Some(_) => {}
        }
        match sent {
            None => sent = io.isend(out, &from_reg, 0, SIZE, 0)?,
            Some(r) if !sent_done => sent_done = io.test(r)?.is_some(),
            Some(_) => {}
        }
        ensure!(Instant::now() < end, "a message to oneself does not arrive");
        idle.wait();
    }
    let mut bytes = vec![0u8; SIZE];
    to.read(0, &mut bytes)?;
    if let Some(m) = pattern::check(key, &bytes) {
        fail!("{m}");
    }
    net.dereg_mr(from_reg)?;
    net.dereg_mr(to_reg)?;
    net.close(Comm::Send(out))?;
    net.close(Comm::Recv(inn))?;
    drop(io);
    net.finalize()
}

fn init_threads(ctx: &mut Ctx) -> Result<()> {
    let ctx: &Ctx = ctx;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|t| {
                scope.spawn(move || -> Result<()> {
                    for round in 0..5 {
                        life(ctx, &ctx.plugin, t * 5 + round)
                            .context(|| format!("thread {t}, round {round}"))?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|t| match t.join() {
            Ok(r) => r,
            Err(_) => fail!("a thread panicked"),
        })
    })
}

fn reload(ctx: &mut Ctx) -> Result<()> {
    let path: String = ctx.params.get("driver.plugin")?;
    for round in 0..5 {
        let plugin = Plugin::load(&path, Some(ctx.plugin.abi()))?;
        life(ctx, &plugin, round).context(|| format!("load number {round}"))?;
        drop(plugin);
    }
    // And the first one still works.
    let plugin = ctx.plugin.clone();
    life(ctx, &plugin, 99).context(|| "the library that was open all the time")
}

fn newest_abi(ctx: &mut Ctx) -> Result<()> {
    let path: String = ctx.params.get("driver.plugin")?;
    for v in crate::net::VERSIONS {
        let p = Plugin::load(&path, Some(v))?;
        ensure!(p.abi() == v, "asked for version {v}, got {}", p.abi());
        let (a, b) = (p.name(), ctx.plugin.name());
        ensure!(
            a == b,
            "version {v} calls the network {a}, and version {} calls it {b}",
            ctx.plugin.abi()
        );
    }
    let newest = Plugin::load(&path, None)?;
    ensure!(newest.abi() == 12, "the newest version is {}", newest.abi());
    Ok(())
}
