//! Staging: a message goes through a ring of chunks, where the receive memory cannot be mapped by the
//! sender. The sender fills chunks, in the order of its messages, and the receiver drains them.
//!
//! Fills are numbered from 1 and wrap; fill `f` uses chunk `(f - 1) % chunks`, once its fill
//! `f - chunks` has been drained.

use std::sync::atomic::Ordering;

use super::steps::{reached, Chunk};

/// What a filled chunk holds, as the sender says: not to be believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Filled {
    /// Number of the fill.
    pub fill: u32,
    /// The chunk.
    pub chunk: usize,
    /// Sequence number of the receive.
    pub seq: u32,
    /// Bytes in the chunk.
    pub len: u32,
    /// Their offset in the message.
    pub offset: u64,
    /// Bytes of the message.
    pub total: u64,
}

/// The sender's side of a ring.
#[derive(Debug)]
pub struct Filler {
    next: u32,
}

impl Default for Filler {
    fn default() -> Self {
        Filler { next: 1 }
    }
}

impl Filler {
    /// The number of the next fill and its chunk, if that is free.
    #[inline]
    pub fn free(&self, chunks: &[Chunk]) -> Option<(u32, usize)> {
        let i = self.next.wrapping_sub(1) as usize % chunks.len();
        let before = self.next.wrapping_sub(chunks.len() as u32);
        reached(chunks[i].drained.load(Ordering::Acquire), before).then_some((self.next, i))
    }

    /// Notes what the next fill holds; its bytes, and then `filled`, are written behind this.
    #[inline]
    pub fn fill(&mut self, chunk: &Chunk, seq: u32, len: u32, offset: u64, total: u64) {
        let m = &chunk.meta;
        m.seq.store(seq, Ordering::Relaxed);
        m.len.store(len, Ordering::Relaxed);
        m.offset.store(offset, Ordering::Relaxed);
        m.total.store(total, Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
    }
}

/// The receiver's side of a ring.
#[derive(Debug)]
pub struct Drainer {
    next: u32,
}

impl Default for Drainer {
    fn default() -> Self {
        Drainer { next: 1 }
    }
}

impl Drainer {
    /// The next fill, if it is there.
    #[inline]
    pub fn filled(&self, chunks: &[Chunk]) -> Option<Filled> {
        let i = self.next.wrapping_sub(1) as usize % chunks.len();
        if !reached(chunks[i].filled.load(Ordering::Acquire), self.next) {
            return None;
        }
        let m = &chunks[i].meta;
        Some(Filled {
            fill: self.next,
            chunk: i,
            seq: m.seq.load(Ordering::Relaxed),
            len: m.len.load(Ordering::Relaxed),
            offset: m.offset.load(Ordering::Relaxed),
            total: m.total.load(Ordering::Relaxed),
        })
    }

    /// Goes on to the fill after the one that [`Drainer::filled`] gave.
    #[inline]
    pub fn advance(&mut self) {
        self.next = self.next.wrapping_add(1);
    }
}
