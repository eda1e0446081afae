//! What each rank does: connects, moves data, measures, checks, reports.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use clap::ValueEnum;
use plugin_tests::error::{Error, Result};
use plugin_tests::flow::{stall_limit, stalled, Flow, Message};
use plugin_tests::memory::{Buffer, Kind};
use plugin_tests::net::{Progress, Registered, MAX_REQUESTS};
use plugin_tests::params::Params;
use plugin_tests::pattern::{self, Key};
use plugin_tests::rank::{Ctx, Link};
use plugin_tests::worker::Idle;

use super::plan::{self, Part};
use super::sizes::{Sizes, ELEMENT};
use super::{Op, Way};

/// One connection, with the memory registered on it.
struct Channel {
    link: Link,
    pair: (usize, usize),
    number: usize,
    memory: Registered,
}

struct Bench {
    op: Op,
    steps: usize,
    channels: usize,
    way: Way,
    buffers: usize,
    ranks: usize,
    cores: usize,
}

impl Bench {
    /// Bytes from one of the buffers in a piece of memory to the next.
    fn stride(&self, memory: &Buffer) -> usize {
        memory.len() / self.buffers
    }

    /// Whether a rank that waits lets others have its core. The kernel has its share of moving many bytes, and
    /// so have helping threads; a small message waits for nothing but its receiver's next look.
    fn yields(&self, size: usize) -> bool {
        let others = self.way != Way::PingPong || size >= 64 << 10;
        self.ranks + usize::from(others) > self.cores
    }
}

/// The entry of a rank.
pub fn run(ctx: &mut Ctx) -> Result<()> {
    let p = ctx.params.clone();
    let op = Op::from_str(&p.get::<String>("op")?, true).map_err(Error::new)?;
    let bytes = Some(p.get::<u64>("bytes")?).filter(|b| *b > 0);
    let sizes =
        Sizes::new(p.get("min")?, p.get("max")?, p.get("factor")?, bytes).map_err(Error::new)?;
    let kind = Kind::parse(&p.get::<String>("memory")?)?;
    let (iters, warmup): (usize, usize) = (p.get("iters")?, p.get("warmup")?);
    let check = p.get::<u8>("check")? == 1;
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let bench = Bench {
        op,
        steps: p.get("steps")?,
        channels: p.get("channels")?,
        way: Way::from_str(&p.get::<String>("way")?, true).map_err(Error::new)?,
        buffers: p.get("buffers")?,
        ranks: ctx.nranks,
        cores,
    };

    let most = sizes.list().iter().copied().max().unwrap_or(ELEMENT) as usize;
    let (send_len, recv_len) = plan::buffers(op, most, ctx.nranks);
    let buffers =
        |len: usize| Buffer::new(kind, bench.buffers * len.max(ELEMENT as usize), ctx.gpu);
    let send = Arc::new(buffers(send_len)?);
    let recv = Arc::new(buffers(recv_len)?);
    send.set(1)?;
    recv.set(2)?;
    // One stream of memcpy, to set the results in host memory against.
    let memcpy = match (ctx.rank, kind.is_device()) {
        (0, false) => {
            let b = Buffer::new(kind, send.len(), 0)?;
            b.set(3)?;
            Some(b)
        }
        _ => None,
    };

    let pairs = plan::pairs(op, ctx.nranks, bench.channels, bench.way);
    let mut numbers = HashMap::new();
    let mut mine = Vec::new();
    for pair in &pairs {
        let n = numbers.entry(*pair).or_insert(0usize);
        if pair.0 == ctx.rank || pair.1 == ctx.rank {
            mine.push((*pair, *n));
        }
        *n += 1;
    }
    let links = ctx.connect(&pairs)?;
    let mut channels = Vec::new();
    for (link, (pair, number)) in links.iter().zip(mine) {
        let buffer = if link.sends() { &send } else { &recv };
        channels.push(Channel {
            link: *link,
            pair,
            number,
            memory: ctx.register(link, buffer)?,
        });
    }

    for (index, size) in sizes.list().iter().enumerate() {
        let size = *size as usize;
        ctx.state(format!("{size} bytes"));
        let mut out = Params::new();
        out.set("index", index).set("size", size);
        let mut copies = Vec::new();
        copies.extend(copy_rate(ctx, &send, memcpy.as_ref(), size, &bench)?);
        ctx.oob.barrier()?;
        let rank = (ctx.rank, ctx.nranks);
        ctx.progress(move |_| keep_to_own_cores(rank))?;
        let seconds = if bench.way == Way::PingPong {
            let (mean, median) =
                ctx.progress(|io| pingpong(io, &channels, size, warmup, iters, &bench))?;
            out.set("median", median);
            mean
        } else {
            let nranks = ctx.nranks;
            ctx.progress(|io| iterate(io, &channels, size, nranks, warmup, iters, &bench))?
        };
        copies.extend(copy_rate(ctx, &send, memcpy.as_ref(), size, &bench)?);
        out.set("seconds", seconds);
        if !copies.is_empty() {
            out.set("memcpy", copies.iter().sum::<f64>() / copies.len() as f64);
        }
        if check {
            out.set(
                "wrong",
                verify(ctx, &channels, (&send, &recv), size, index, &bench)?,
            );
        }
        if index == 0 {
            out.set("abi", ctx.plugin.abi())
                .set("network", ctx.plugin.name());
        }
        ctx.oob.up(out.encode())?;
    }

    ctx.oob.barrier()?;
    let (regs, links): (Vec<_>, Vec<_>) = channels.into_iter().map(|c| (c.memory, c.link)).unzip();
    ctx.deregister(regs)?;
    ctx.close(&links)
}

/// Keeps this thread to its rank's share of the cores, as launchers of ranks do: two that poll on one
/// core measure the scheduler. Where there are more ranks than cores they share all.
fn keep_to_own_cores((rank, nranks): (usize, usize)) -> Result<()> {
    use nix::sched::{sched_getaffinity, sched_setaffinity, CpuSet};
    use nix::unistd::Pid;
    static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();
    let this = Pid::from_raw(0);
    let allowed = ALLOWED.get_or_init(|| {
        let set = sched_getaffinity(this).unwrap_or_default();
        (0..CpuSet::count())
            .filter(|c| set.is_set(*c).unwrap_or(false))
            .collect()
    });
    let share = allowed.len() / nranks;
    if share > 0 {
        let mut set = CpuSet::new();
        for core in &allowed[rank * share..(rank + 1) * share] {
            let _ = set.set(*core);
        }
        // A wish: where it is refused, the scheduler decides.
        let _ = sched_setaffinity(this, &set);
    }
    Ok(())
}

/// GB/s of one thread's memcpy of `size` bytes, through the buffers in turn, on rank 0, while the others wait.
fn copy_rate(
    ctx: &Ctx,
    from: &Buffer,
    to: Option<&Buffer>,
    size: usize,
    bench: &Bench,
) -> Result<Option<f64>> {
    ctx.oob.barrier()?;
    let Some(to) = to else {
        ctx.oob.barrier()?;
        return Ok(None);
    };
    let stride = bench.stride(from);
    let size = size.min(stride).min(bench.stride(to));
    let copy = |i: usize| {
        let at = i % bench.buffers * stride;
        let source = (from.address() + at) as *const u8;
        let target = (to.address() + at) as *mut u8;
        // SAFETY: both are host memory of so many buffers of at least `size` bytes that this thread alone uses
        // now.
        unsafe { std::ptr::copy_nonoverlapping(source, std::hint::black_box(target), size) };
    };
    copy(0);
    let start = Instant::now();
    let mut rounds = 0;
    while rounds < 3 || start.elapsed().as_micros() < 1_000 {
        for _ in 0..if size < 65_536 { 64 } else { 1 } {
            copy(rounds);
            rounds += 1;
        }
    }
    let rate = size as f64 * rounds as f64 / start.elapsed().as_secs_f64() / 1e9;
    ctx.oob.barrier()?;
    Ok(Some(rate))
}

fn parts_of(c: &Channel, size: usize, nranks: usize, bench: &Bench) -> Vec<Part> {
    plan::messages(bench.op, size, nranks, c.pair, (c.number, bench.channels))
}

/// Runs iterations, `steps` at most in flight, and returns the seconds of one that was timed.
fn iterate(
    io: &Progress,
    channels: &[Channel],
    size: usize,
    nranks: usize,
    warmup: usize,
    iters: usize,
    bench: &Bench,
) -> Result<f64> {
    let mut flows: Vec<(Flow, usize)> = Vec::new();
    for c in channels {
        let parts = parts_of(c, size, nranks, bench);
        let per_iteration = parts.len();
        if per_iteration == 0 {
            continue;
        }
        let sends = c.link.sends();
        let stride = bench.stride(&c.memory.buffer);
        let buffers = bench.buffers;
        let flow = Flow::new(
            format!(
                "connection {} of rank {} to rank {}",
                c.link.id, c.pair.0, c.pair.1
            ),
            c.link.comm,
            0,
            (bench.steps * per_iteration).min(MAX_REQUESTS),
            move |i| {
                let part = parts[i % parts.len()];
                let buffer = i / parts.len() % buffers * stride;
                Message {
                    memory: &c.memory,
                    offset: buffer + if sends { part.from } else { part.to },
                    size: part.len,
                    tag: c.number as i32,
                }
            },
            |_, _| Ok(()),
        );
        let device = c.memory.buffer.kind().is_device();
        flows.push((flow.with_flush(!sends && device), per_iteration));
    }
    if flows.is_empty() {
        return Ok(0.0);
    }
    let total = warmup + iters;
    let mut granted = 0;
    let mut start = Instant::now();
    let mut timing = warmup == 0;
    let mut idle = Idle::eager(bench.yields(size));
    let limit = stall_limit(size);
    let mut quiet_since = None;
    loop {
        let done = flows
            .iter()
            .map(|(f, m)| f.done() / m)
            .min()
            .unwrap_or(total);
        if !timing && done >= warmup {
            start = Instant::now();
            timing = true;
        }
        if done >= total {
            return Ok(start.elapsed().as_secs_f64() / iters as f64);
        }
        // With one step, the warm-up ends before the first timed iteration begins.
        let mut target = (done + bench.steps).min(total);
        if !timing {
            target = target.min(warmup);
        }
        if target > granted {
            for (f, m) in &mut flows {
                f.extend((target - granted) * *m);
            }
            granted = target;
        }
        let mut moved = false;
        for (f, _) in flows.iter_mut().filter(|(f, _)| !f.finished()) {
            moved |= f.poll(io)?;
        }
        if moved {
            idle.reset();
            quiet_since = None;
        } else {
            idle.wait();
            let since = *quiet_since.get_or_insert_with(Instant::now);
            if since.elapsed() > limit {
                let open: Vec<Flow> = flows.into_iter().map(|(f, _)| f).collect();
                return Err(stalled(&open, limit));
            }
        }
    }
}

/// Sends a message to and fro and returns the seconds of one way: their mean and their median.
fn pingpong(
    io: &Progress,
    channels: &[Channel],
    size: usize,
    warmup: usize,
    iters: usize,
    bench: &Bench,
) -> Result<(f64, f64)> {
    let first = channels
        .first()
        .ok_or_else(|| Error::new("no connection"))?;
    // Only the first channel: latency is one message's.
    let one = |sends: bool| {
        channels
            .iter()
            .find(|c| c.link.sends() == sends && c.number == 0)
            .ok_or_else(|| Error::new("a direction has no connection"))
    };
    let (out, inn) = (one(true)?, one(false)?);
    let begins = first.pair.0 == 0 && out.pair.0 == 0;
    let flow = |c: &Channel| {
        let memory = c.memory.clone();
        (c.link.comm, memory, format!("connection {}", c.link.id))
    };
    let ((out_comm, out_memory, out_name), (in_comm, in_memory, in_name)) = (flow(out), flow(inn));
    let make = |name: &str, comm, window, memory| {
        Flow::new(
            name.to_string(),
            comm,
            0,
            window,
            move |i| Message {
                memory,
                offset: i % bench.buffers * bench.stride(&memory.buffer),
                size: size.min(plugin_tests::net::MAX_MESSAGE),
                tag: 0,
            },
            |_, _| Ok(()),
        )
    };
    let mut sends = make(&out_name, out_comm, 1, &out_memory);
    let device = in_memory.buffer.kind().is_device();
    // Receives are posted ahead, as NCCL's are: a message does not wait for its receive. All that a connection
    // takes: what it costs to post them is not in the time of one message, and comes many at once.
    let mut receives = make(&in_name, in_comm, MAX_REQUESTS, &in_memory).with_flush(device);
    let total = warmup + iters;
    receives.extend(total.min(MAX_REQUESTS));
    let limit = stall_limit(size);
    let mut rounds = Vec::with_capacity(total);
    let mut last = Instant::now();
    for round in 0..total {
        if begins {
            sends.extend(1);
        }
        let mut answered = begins;
        let mut idle = Idle::eager(bench.yields(size));
        let began = Instant::now();
        loop {
            let mut moved = false;
            if receives.done() > round && !answered {
                sends.extend(1);
                answered = true;
            }
            if !sends.finished() {
                moved |= sends.poll(io)?;
            }
            if !receives.finished() {
                moved |= receives.poll(io)?;
            }
            if answered && receives.done() > round && sends.finished() {
                let now = Instant::now();
                rounds.push((now - last).as_secs_f64());
                last = now;
                // Behind the answer: it would only be the later for it.
                receives.extend(usize::from(round + MAX_REQUESTS < total));
                break;
            }
            if moved {
                idle.reset();
            } else {
                idle.wait();
                if began.elapsed() > limit {
                    return Err(stalled(&[sends, receives], limit));
                }
            }
        }
    }
    let timed = &mut rounds[warmup..];
    let mean = timed.iter().sum::<f64>() / iters as f64 / 2.0;
    timed.sort_by(f64::total_cmp);
    Ok((mean, timed.get(iters / 2).map_or(mean, |m| m / 2.0)))
}

/// Bytes that are made and checked at a time.
const PIECE: usize = 8 << 20;

/// An iteration more for each buffer, with data that says where it belongs; returns how many elements are wrong.
fn verify(
    ctx: &Ctx,
    channels: &[Channel],
    (send, recv): (&Buffer, &Buffer),
    size: usize,
    index: usize,
    bench: &Bench,
) -> Result<usize> {
    let n = ctx.nranks;
    let chunk = plan::chunk(bench.op, size, n);
    // Who sends what to whom: in an allgather everybody gets the same.
    let key = |from: usize, to: usize, buffer: usize| Key {
        seed: 1 + index as u64,
        rank: from,
        connection: if bench.op == Op::Allgather { 0 } else { to },
        message: buffer,
    };
    let me = ctx.rank;
    let sources: Vec<(usize, usize)> = match bench.op {
        Op::Sendrecv if bench.way == Way::One && me > 0 => vec![],
        Op::Sendrecv => vec![(0, (me + 1) % n)],
        Op::Alltoall => (0..n)
            .filter(|r| *r != me)
            .map(|r| (r * chunk, r))
            .collect(),
        Op::Allgather => vec![(0, me)],
    };
    for buffer in 0..bench.buffers {
        let begin = buffer * bench.stride(send);
        for (at, to) in &sources {
            pieces(chunk, |from, len| {
                let mut bytes = vec![0u8; len];
                pattern::fill_from(key(me, *to, buffer), from, &mut bytes);
                send.write(begin + at + from, &bytes)
            })?;
        }
        // Whatever of the last size is still in the receive buffer must not pass for this one's.
        let begin = buffer * bench.stride(recv);
        pieces(plan::buffers(bench.op, size, n).1, |from, len| {
            recv.write(begin + from, &vec![0x5a; len])
        })?;
    }
    let iters = bench.buffers;
    // To make the bytes takes some ranks longer than others.
    ctx.oob.barrier()?;
    if bench.way == Way::PingPong {
        ctx.progress(|io| pingpong(io, channels, size, 0, iters, bench))?;
    } else {
        ctx.progress(|io| iterate(io, channels, size, n, 0, iters, bench))?;
    }
    let targets: Vec<(usize, usize)> = match bench.op {
        Op::Sendrecv if bench.way == Way::One && me != 1 => vec![],
        Op::Sendrecv => vec![(0, (me + n - 1) % n)],
        _ => (0..n)
            .filter(|r| *r != me)
            .map(|r| (r * chunk, r))
            .collect(),
    };
    let mut wrong = 0;
    let all = (0..bench.buffers).flat_map(|b| targets.iter().map(move |t| (b, *t)));
    for (buffer, (at, from_rank)) in all {
        let key = key(from_rank, me, buffer);
        let begin = buffer * bench.stride(recv);
        pieces(chunk, |from, len| {
            let mut bytes = vec![0u8; len];
            recv.read(begin + at + from, &mut bytes)?;
            if pattern::check_from(key, from, &bytes).is_some() {
                let mut want = vec![0u8; len];
                pattern::fill_from(key, from, &mut want);
                let e = ELEMENT as usize;
                wrong += bytes
                    .chunks(e)
                    .zip(want.chunks(e))
                    .filter(|(a, b)| a != b)
                    .count();
            }
            Ok(())
        })?;
    }
    Ok(wrong)
}

fn pieces(total: usize, mut f: impl FnMut(usize, usize) -> Result<()>) -> Result<()> {
    let mut at = 0;
    while at < total {
        let len = PIECE.min(total - at);
        f(at, len)?;
        at += len;
    }
    Ok(())
}
