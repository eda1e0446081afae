//! The shared memory of one connection: the ring of receive descriptors that the receiver posts, and
//! the step counters by which each side learns of the other's progress.
//!
//! Each counter has one writer and its own cache line. Sequence numbers are `u32` and wrap: `s` comes
//! at or after `t` when `s - t`, taken modulo 2^32, is below 2^31. Sequence number `s` lives in slot
//! `s % RING`; at most `RING` are live at a time, so a slot has one owner.
//!
//! The peer is another process, so everything read from here is checked before it is used, and
//! nothing in here is a Rust reference to plain data: all fields are atomics.

use crossbeam_utils::CachePadded;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Receives that may be posted and not yet taken back: NCCL asks for 32 for each comm.
pub const RING: usize = if cfg!(loom) { 2 } else { 64 };
/// Chunks of the staging ring in shared host memory.
pub const HOST_CHUNKS: usize = if cfg!(loom) { 2 } else { 8 };
/// Chunks of the staging ring in the receiver's GPU.
pub const DEVICE_CHUNKS: usize = if cfg!(loom) { 2 } else { 4 };

/// `true` when sequence number `s` is `t` or later.
#[inline]
pub fn reached(s: u32, t: u32) -> bool {
    s.wrapping_sub(t) as i32 >= 0
}

/// The slot of sequence number `s`.
#[inline]
pub fn slot(s: u32) -> usize {
    s as usize % RING
}

/// What one side says of itself; see [`Shared::sender`] and [`Shared::receiver`].
pub mod side {
    /// The connection is in use.
    pub const OPEN: u32 = 0;
    /// Closed in order: everything that was promised has been done.
    pub const CLOSED: u32 = 1;
    /// Gave up after an error.
    pub const FAILED: u32 = 2;
}

/// How a send ended, in [`Outcome::status`].
pub mod status {
    /// The message is in the receive buffer.
    pub const OK: u32 = 0;
    /// The send was larger than the receive: nothing was written.
    pub const TOO_LARGE: u32 = 1;
    /// The descriptor did not fit the region that it names.
    pub const BAD_DESCRIPTOR: u32 = 2;
    /// There is no way from the sender's memory to the receiver's.
    pub const NO_WAY: u32 = 3;
}

/// A posted receive. Written by the receiver before it advances `posted`.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Descriptor {
    /// Offset in bytes from the start of the region.
    pub offset: AtomicU64,
    /// Bytes that fit.
    pub capacity: AtomicU64,
    /// The receiver's number for the registered region.
    pub region: AtomicU32,
    /// NCCL's tag.
    pub tag: AtomicU32,
}

/// What became of the send that took a slot. Written by the sender before `done` gets there.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Outcome {
    /// Bytes of the message.
    pub size: AtomicU64,
    /// One of [`status`].
    pub status: AtomicU32,
}

/// One chunk of a staging ring.
#[derive(Debug)]
#[repr(C)]
pub struct Chunk {
    /// Number of the fill that is in the chunk; written by the sender's stream or CPU.
    pub filled: CachePadded<AtomicU32>,
    /// Number of the fill that has been taken out; written by the receiver's stream or CPU.
    pub drained: CachePadded<AtomicU32>,
    /// What the chunk holds; written by the sender before `filled`.
    pub meta: ChunkMeta,
}

/// What a chunk holds.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct ChunkMeta {
    /// Sequence number of the receive that the bytes belong to.
    pub seq: AtomicU32,
    /// Bytes in the chunk.
    pub len: AtomicU32,
    /// Offset of these bytes in the message.
    pub offset: AtomicU64,
    /// Bytes of the whole message.
    pub total: AtomicU64,
}

/// The control part of a connection's shared memory. All zero, but for what [`Shared::start`] sets.
#[derive(Debug)]
#[repr(C)]
pub struct Shared {
    /// Sequence number of the last posted receive. Written by the receiver.
    pub posted: CachePadded<AtomicU32>,
    /// The sending end's state, one of [`side`]. Written by the sender.
    pub sender: CachePadded<AtomicU32>,
    /// The receiving end's state, one of [`side`]. Written by the receiver.
    pub receiver: CachePadded<AtomicU32>,
    /// Written once by each end's stream, to see that it can; read by nobody.
    pub probe: CachePadded<AtomicU32>,
    /// For each slot the sequence number of the last message that is complete in it. Written by the
    /// sender's stream behind the copy, or by its CPU.
    pub done: [CachePadded<AtomicU32>; RING],
    /// Descriptors, by slot.
    pub descriptors: [Descriptor; RING],
    /// Outcomes, by slot.
    pub outcomes: [Outcome; RING],
    /// The ring in host memory; its bytes follow this struct in the mapping.
    pub host: [Chunk; HOST_CHUNKS],
    /// The ring in the receiver's GPU.
    pub device: [Chunk; DEVICE_CHUNKS],
}

/// What the receiver posts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Posting {
    /// Offset in bytes from the start of the region.
    pub offset: u64,
    /// Bytes that fit.
    pub capacity: u64,
    /// The receiver's number for the registered region.
    pub region: u32,
    /// NCCL's tag.
    pub tag: u32,
}

/// Sequence number of a connection's first receive: near the wrap, so that every connection that
/// lives goes through it.
pub const FIRST: u32 = u32::MAX - 255;

impl Shared {
    /// Sets up for `first` as the first sequence number, before the peer gets the memory.
    pub fn start(&self, first: u32) {
        let before = first.wrapping_sub(1);
        self.posted.store(before, Ordering::Relaxed);
        for d in &self.done {
            d.store(before, Ordering::Relaxed);
        }
    }

    /// The receiver posts `p` as sequence number `seq`, the one after the last. The caller has made
    /// sure that the slot is free: its last request is over.
    #[inline]
    pub fn post(&self, seq: u32, p: Posting) {
        let d = &self.descriptors[slot(seq)];
        d.offset.store(p.offset, Ordering::Relaxed);
        d.capacity.store(p.capacity, Ordering::Relaxed);
        d.region.store(p.region, Ordering::Relaxed);
        d.tag.store(p.tag, Ordering::Relaxed);
        self.posted.store(seq, Ordering::Release);
    }

    /// What was posted as `seq`, which must not be past [`Shared::last_posted`].
    #[inline]
    pub fn posting(&self, seq: u32) -> Posting {
        let d = &self.descriptors[slot(seq)];
        Posting {
            offset: d.offset.load(Ordering::Relaxed),
            capacity: d.capacity.load(Ordering::Relaxed),
            region: d.region.load(Ordering::Relaxed),
            tag: d.tag.load(Ordering::Relaxed),
        }
    }

    /// The sequence number of the last posted receive.
    #[inline]
    pub fn last_posted(&self) -> u32 {
        self.posted.load(Ordering::Acquire)
    }

    /// The sender notes how `seq` ends. Visible to the receiver once `done` gets to `seq`.
    #[inline]
    pub fn set_outcome(&self, seq: u32, size: u64, status: u32) {
        let o = &self.outcomes[slot(seq)];
        o.size.store(size, Ordering::Relaxed);
        o.status.store(status, Ordering::Relaxed);
    }

    /// The sender's CPU says that `seq` is over; the stream does the same with a value write.
    #[inline]
    pub fn set_done(&self, seq: u32) {
        self.done[slot(seq)].store(seq, Ordering::Release);
    }

    /// The sender says that `seq` ends otherwise than by `done`. Else the word of an older message would
    /// pass for it once it is 2^31 messages old.
    #[inline]
    pub fn set_not_done(&self, seq: u32) {
        self.done[slot(seq)].store(seq.wrapping_sub(1), Ordering::Relaxed);
    }

    /// Whether `seq` is over.
    #[inline]
    pub fn is_done(&self, seq: u32) -> bool {
        reached(self.done[slot(seq)].load(Ordering::Acquire), seq)
    }

    /// Size and status of `seq`, once [`Shared::is_done`].
    #[inline]
    pub fn outcome(&self, seq: u32) -> (u64, u32) {
        let o = &self.outcomes[slot(seq)];
        (
            o.size.load(Ordering::Relaxed),
            o.status.load(Ordering::Relaxed),
        )
    }
}

/// The sender's view of the ring: which posted receives it has not taken yet.
#[derive(Debug)]
pub struct Claims {
    /// The lowest sequence number that has not been taken.
    head: u32,
    /// Bit `i`: `head + i` has been taken.
    taken: u64,
}

impl Claims {
    /// `first` is the sequence number of the first receive.
    pub fn new(first: u32) -> Claims {
        Claims {
            head: first,
            taken: 0,
        }
    }

    /// Finds the oldest posted receive with `tag` that is not taken, without taking it.
    /// A peer that posts more than the ring holds is caught here.
    #[inline]
    pub fn find(&self, shared: &Shared, tag: u32) -> Option<(u32, Posting)> {
        let n = shared.last_posted().wrapping_sub(self.head).wrapping_add(1);
        if n as i32 <= 0 {
            return None;
        }
        for i in 0..n.min(RING as u32) {
            if self.taken & (1 << i) == 0 {
                let seq = self.head.wrapping_add(i);
                let p = shared.posting(seq);
                if p.tag == tag {
                    return Some((seq, p));
                }
            }
        }
        None
    }

    /// Takes `seq`, which [`Claims::find`] gave.
    #[inline]
    pub fn take(&mut self, seq: u32) {
        self.taken |= 1 << seq.wrapping_sub(self.head);
        let n = self.taken.trailing_ones();
        self.taken = self.taken.checked_shr(n).unwrap_or(0);
        self.head = self.head.wrapping_add(n);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn shared() -> Box<Shared> {
        // SAFETY: all fields are integers, for which all zero is a value.
        unsafe { Box::new(std::mem::zeroed()) }
    }

    fn posting(tag: u32, n: u64) -> Posting {
        Posting {
            offset: n,
            capacity: n + 1,
            region: 7,
            tag,
        }
    }

    #[test]
    fn order_wraps() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(3, u32::MAX) && !reached(u32::MAX, 3));
    }

    #[test]
    fn fifo_per_tag_across_the_wrap() {
        let s = shared();
        let first = u32::MAX - 20;
        s.posted.store(first.wrapping_sub(1), Ordering::Relaxed);
        let mut c = Claims::new(first);
        assert_eq!(c.find(&s, 0), None);
        let mut seq = first;
        for round in 0..40u64 {
            // Tags 0, 1, 0 posted; taken as 1, 0, 0.
            let base = seq;
            for (i, tag) in [0, 1, 0].into_iter().enumerate() {
                s.post(seq, posting(tag, round * 3 + i as u64));
                seq = seq.wrapping_add(1);
            }
            for (tag, want) in [(1, 1), (0, 0), (0, 2)] {
                let (got, p) = c.find(&s, tag).unwrap();
                assert_eq!(got, base.wrapping_add(want));
                assert_eq!(p, posting(tag, round * 3 + want as u64));
                c.take(got);
            }
            assert_eq!(c.find(&s, 0), None);
            assert_eq!(c.find(&s, 1), None);
        }
    }

    #[test]
    fn a_slot_that_only_staged_messages_use_never_looks_done() {
        let s = shared();
        s.start(1);
        // Every 64th message is in slot 1; go round the numbers in large steps.
        let mut seq = 1u32;
        for _ in 0..300 {
            assert!(!s.is_done(seq), "{seq}");
            s.set_not_done(seq);
            assert!(!s.is_done(seq), "{seq}");
            seq = seq.wrapping_add(1 << 24);
        }
    }

    #[test]
    fn a_full_ring_is_found_whole_and_no_more() {
        let s = shared();
        let mut c = Claims::new(1);
        for i in 0..RING as u32 {
            s.post(1 + i, posting(9, i as u64));
        }
        for i in 0..RING as u32 {
            let (seq, _) = c.find(&s, 9).unwrap();
            assert_eq!(seq, 1 + i);
            c.take(seq);
        }
        assert_eq!(c.find(&s, 9), None);
        // A hostile peer: a counter far ahead must not make us read past the ring.
        s.posted.store(1_000_000, Ordering::Relaxed);
        assert!(c.find(&s, 1234).is_none());
    }

    #[test]
    fn taking_all_64_out_of_order() {
        let s = shared();
        let mut c = Claims::new(1);
        for i in 0..RING as u32 {
            s.post(1 + i, posting(i, 0));
        }
        for i in (0..RING as u32).rev() {
            let (seq, _) = c.find(&s, i).unwrap();
            c.take(seq);
        }
        assert_eq!((c.head, c.taken), (1 + RING as u32, 0));
    }

    #[test]
    fn layout_is_fixed_for_the_wire() {
        // Both ends map the same memory: a change here needs a new protocol version.
        assert_eq!(std::mem::size_of::<Descriptor>(), 64);
        assert_eq!(std::mem::size_of::<Outcome>(), 64);
        assert_eq!(std::mem::size_of::<Chunk>(), 384);
        assert_eq!(
            std::mem::size_of::<Shared>(),
            4 * 128 + RING * (128 + 64 + 64) + (HOST_CHUNKS + DEVICE_CHUNKS) * 384
        );
    }
}

#[cfg(all(test, loom))]
pub(crate) mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    pub(crate) fn shared() -> Shared {
        let line = || CachePadded::new(AtomicU32::new(0));
        let chunk = || Chunk {
            filled: line(),
            drained: line(),
            meta: ChunkMeta {
                seq: AtomicU32::new(0),
                len: AtomicU32::new(0),
                offset: AtomicU64::new(0),
                total: AtomicU64::new(0),
            },
        };
        Shared {
            posted: line(),
            sender: line(),
            receiver: line(),
            probe: line(),
            done: std::array::from_fn(|_| line()),
            descriptors: std::array::from_fn(|_| Descriptor {
                offset: AtomicU64::new(0),
                capacity: AtomicU64::new(0),
                region: AtomicU32::new(0),
                tag: AtomicU32::new(0),
            }),
            outcomes: std::array::from_fn(|_| Outcome {
                size: AtomicU64::new(0),
                status: AtomicU32::new(0),
            }),
            host: std::array::from_fn(|_| chunk()),
            device: std::array::from_fn(|_| chunk()),
        }
    }

    /// The receiver posts three receives through a ring of two, reusing a slot once its message is
    /// done; the sender takes each and says its size. Every posting and outcome must arrive whole.
    #[test]
    fn loom_ring() {
        loom::model(|| {
            let s = Arc::new(shared());
            let t = s.clone();
            let sender = thread::spawn(move || {
                let mut c = Claims::new(1);
                for want in 1..=3u32 {
                    let (seq, p) = loop {
                        match c.find(&t, 5) {
                            Some(x) => break x,
                            None => thread::yield_now(),
                        }
                    };
                    assert_eq!(seq, want);
                    assert_eq!(
                        (p.offset, p.capacity, p.region),
                        (want as u64, 100 + want as u64, want)
                    );
                    c.take(seq);
                    t.set_outcome(seq, 10 + seq as u64, status::OK);
                    t.set_done(seq);
                }
            });
            let mut over = 0;
            for seq in 1..=3u32 {
                if seq > RING as u32 {
                    over += 1;
                    while !s.is_done(over) {
                        thread::yield_now();
                    }
                    assert_eq!(s.outcome(over), (10 + over as u64, status::OK));
                }
                s.post(
                    seq,
                    Posting {
                        offset: seq as u64,
                        capacity: 100 + seq as u64,
                        region: seq,
                        tag: 5,
                    },
                );
            }
            while over < 3 {
                over += 1;
                while !s.is_done(over) {
                    thread::yield_now();
                }
                assert_eq!(s.outcome(over), (10 + over as u64, status::OK));
            }
            sender.join().unwrap();
        });
    }
}
