//! Staging: a message goes through a ring of chunks, where the receive memory cannot be mapped by the
//! sender. The sender fills chunks, in the order of its messages, and the receiver drains them.
//!
//! Fills are numbered from 1 and wrap; fill `f` uses chunk `(f - 1) % chunks`, once its fill
//! `f - chunks` has been drained.

use super::steps::{reached, Chunk};

#[cfg(loom)]
use loom::sync::atomic::Ordering;
#[cfg(not(loom))]
use std::sync::atomic::Ordering;

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

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::steps::loom_tests::shared;
    use loom::sync::Arc;
    use loom::thread;

    /// Four fills through two chunks: each arrives whole and in order, and no chunk is filled again
    /// before it was drained. The bytes are stood in for by the meta words, written before `filled`.
    #[test]
    fn loom_chunks() {
        loom::model(|| {
            let s = Arc::new(shared());
            let t = s.clone();
            let sender = thread::spawn(move || {
                let mut filler = Filler::default();
                for n in 1..=4u32 {
                    let (fill, i) = loop {
                        match filler.free(&t.host) {
                            Some(x) => break x,
                            None => thread::yield_now(),
                        }
                    };
                    assert_eq!(fill, n);
                    filler.fill(&t.host[i], 7, n, n as u64, 100);
                    t.host[i].filled.store(fill, Ordering::Release);
                }
            });
            let mut drainer = Drainer::default();
            for n in 1..=4u32 {
                let f = loop {
                    match drainer.filled(&s.host) {
                        Some(f) => break f,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(
                    (f.fill, f.seq, f.len, f.offset, f.total),
                    (n, 7, n, n as u64, 100)
                );
                s.host[f.chunk].drained.store(f.fill, Ordering::Release);
                drainer.advance();
            }
            sender.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::transport::copy_engine::steps::{Shared, HOST_CHUNKS};

    #[test]
    fn fills_and_drains_across_the_wrap() {
        // SAFETY: all fields are integers, for which all zero is a value.
        let s: Box<Shared> = unsafe { Box::new(std::mem::zeroed()) };
        let start = u32::MAX - 3;
        let mut filler = Filler { next: start };
        let mut drainer = Drainer { next: start };
        for (i, c) in s.host.iter().enumerate() {
            // As if the ring had been in use all the time.
            let last = (0..HOST_CHUNKS as u32)
                .map(|back| start.wrapping_sub(1 + back))
                .find(|f| f.wrapping_sub(1) as usize % HOST_CHUNKS == i)
                .unwrap();
            c.filled.store(last, Ordering::Relaxed);
            c.drained.store(last, Ordering::Relaxed);
        }
        assert!(drainer.filled(&s.host).is_none());
        for round in 0..3 * HOST_CHUNKS as u32 {
            let mut filled = 0;
            while let Some((fill, i)) = filler.free(&s.host) {
                filler.fill(&s.host[i], round, fill, 1, 2);
                s.host[i].filled.store(fill, Ordering::Release);
                filled += 1;
                assert!(filled <= HOST_CHUNKS, "more chunks than there are");
            }
            assert_eq!(filled, HOST_CHUNKS);
            for _ in 0..HOST_CHUNKS {
                let f = drainer.filled(&s.host).unwrap();
                assert_eq!((f.seq, f.len), (round, f.fill));
                s.host[f.chunk].drained.store(f.fill, Ordering::Release);
                drainer.advance();
            }
            assert!(drainer.filled(&s.host).is_none());
        }
    }
}
