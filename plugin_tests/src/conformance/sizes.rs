//! Messages of every size, at every alignment.

use super::util::{memory, put, recv, send, verify, wait};
use super::Case;
use crate::ensure;
use crate::error::{Error, Result};
use crate::exchange::{exchange, Shape, Stream};
use crate::pattern::Key;
use crate::rank::Ctx;

pub const CASES: &[Case] = &[
    Case::new("sizes", "data", 2, sizes,
        "messages of 0 bytes to 32 MiB at unaligned addresses arrive unchanged and touch nothing else"),
    Case::new("send_smaller", "data", 2, send_smaller,
        "a send smaller than its receive reports its own size at both ends and leaves the rest alone"),
    Case { large: true, ..Case::new("sizes_1g", "data", 2, sizes_1g,
        "a message of 1 GiB, the largest that NCCL sends, arrives unchanged") },
];

const K: usize = 1 << 10;
const M: usize = 1 << 20;

static SMALL: [usize; 12] = [0, 1, 7, 8, 9, 63, 64, 65, 255, 4095, 4096, 4097];
static MIDDLE: [usize; 4] = [64 * K - 1, 64 * K, 64 * K + 1, M + 3];
static BIG: [usize; 2] = [8 * M, 32 * M];
const OFFSETS: [usize; 6] = [0, 1, 3, 8, 13, 63];

fn sizes(ctx: &mut Ctx) -> Result<()> {
    let links = ctx.connect(&[(0, 1)])?;
    let link = &links[0];
    let all = |sizes: &'static [usize]| {
        move |i: usize| {
            let size = sizes[i % sizes.len()];
            Shape {
                size,
                capacity: size,
                offset: OFFSETS[(i / sizes.len()) % OFFSETS.len()],
            }
        }
    };
    let shape = all(&SMALL);
    exchange(
        ctx,
        &[Stream::new(link, SMALL.len() * OFFSETS.len(), &shape)],
    )?;
    let shape = all(&MIDDLE);
    exchange(
        ctx,
        &[Stream {
            slots: 8,
            ..Stream::new(link, 4 * OFFSETS.len(), &shape)
        }],
    )?;
    let shape = all(&BIG);
    exchange(
        ctx,
        &[Stream {
            slots: 2,
            window: 2,
            ..Stream::new(link, 4, &shape)
        }],
    )?;
    ctx.close(&links)
}

fn send_smaller(ctx: &mut Ctx) -> Result<()> {
    let links = ctx.connect(&[(0, 1)])?;
    let shape = |i: usize| {
        let (size, capacity) = [
            (0, 1),
            (0, 4096),
            (1, 4096),
            (4095, 4096),
            (100, M),
            (M - 1, M),
            (3, 8),
        ][i % 7];
        Shape {
            size,
            capacity,
            offset: i % 5,
        }
    };
    exchange(
        ctx,
        &[Stream {
            slots: 7,
            ..Stream::new(&links[0], 28, &shape)
        }],
    )?;
    ctx.close(&links)
}

fn sizes_1g(ctx: &mut Ctx) -> Result<()> {
    const G: usize = 1 << 30;
    let free = free_memory();
    if free < 5 * G {
        return Err(Error::skip(format!(
            "5 GiB of free memory are needed, {} MiB are there",
            free >> 20
        )));
    }
    let links = ctx.connect(&[(0, 1)])?;
    let link = &links[0];
    let (buffer, reg) = memory(ctx, link, G + 64)?;
    let key = |part: usize| Key {
        seed: 9,
        rank: 0,
        connection: link.id,
        message: part,
    };
    // In parts, to need little memory beside the message.
    const PART: usize = 64 * M;
    if link.sends() {
        for p in 0..G / PART {
            put(&buffer, 5 + p * PART, PART, key(p))?;
        }
        let r = send(ctx, link, &reg, 5, G, 0)?;
        let size = wait(ctx, "the send of 1 GiB", r)?;
        ensure!(size == G, "test of the send gave {size} bytes");
    } else {
        buffer.set(0x77)?;
        let r = recv(ctx, link, &reg, 5, G, 0)?;
        let size = wait(ctx, "the receive of 1 GiB", r)?;
        ensure!(size == G, "test of the receive gave {size} bytes");
        for p in 0..G / PART {
            verify(&buffer, 5 + p * PART, PART, key(p))?;
        }
        let mut edge = [0u8; 5];
        buffer.read(0, &mut edge)?;
        ensure!(
            edge == [0x77; 5],
            "bytes before the message were overwritten"
        );
        let mut edge = [0u8; 59];
        buffer.read(5 + G, &mut edge)?;
        ensure!(
            edge == [0x77; 59],
            "bytes after the message were overwritten"
        );
    }
    ctx.deregister(vec![reg])?;
    ctx.close(&links)
}

fn free_memory() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|l| l.strip_prefix("MemAvailable:"))
        .and_then(|l| l.split_whitespace().next())
        .and_then(|n| n.parse::<usize>().ok())
        .map_or(0, |k| k << 10)
}
