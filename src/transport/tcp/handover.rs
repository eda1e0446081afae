//! How ranges of memory go from the polling thread to a helper and back: one slot for each socket.
//!
//! A slot is the polling thread's while it is `IDLE` or `DONE`, and the helper's else. `REVOKED` is the polling
//! thread's wish, which the helper grants at its next look. A helper that is about to sleep says so by a swap,
//! and looks at all slots behind it; whoever has written a slot swaps that word too. So one of the
//! two sees the other.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Bytes of a frame's head. (Of [`super::wire`], which loom's build has not.)
pub const HEAD_LEN: usize = 32;

const IDLE: u32 = 0;
const GIVEN: u32 = 1;
const REVOKED: u32 = 2;
const DONE: u32 = 3;

#[derive(Debug)]
struct Slot {
    state: AtomicU32,
    /// A frame's head, of which the last `before` bytes are moved before the range.
    head: [AtomicU64; HEAD_LEN / 8],
    before: AtomicU64,
    addr: AtomicU64,
    len: AtomicU64,
    /// Bytes that have moved, with those of the head.
    moved: AtomicU64,
    /// Why no more will; 0: all have.
    end: AtomicI32,
}

/// What is left of a frame's head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    bytes: [u8; HEAD_LEN],
    left: usize,
}

impl Head {
    /// Its bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[HEAD_LEN - self.left..]
    }
}

/// What a helper finds to do in a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// Nothing.
    None,
    /// Move what is left of the range.
    Move {
        /// What is moved before it.
        head: Head,
        /// Where it begins.
        addr: u64,
        /// Its bytes.
        len: u64,
    },
    /// End.
    Stop,
}

/// The slots of one helper.
#[derive(Debug)]
pub struct Handover {
    slots: Vec<Slot>,
    asleep: AtomicBool,
    stop: AtomicBool,
}

impl Handover {
    /// Empty slots.
    pub fn new(n: usize) -> Handover {
        Handover {
            slots: (0..n)
                .map(|_| Slot {
                    state: AtomicU32::new(IDLE),
                    head: std::array::from_fn(|_| AtomicU64::new(0)),
                    before: AtomicU64::new(0),
                    addr: AtomicU64::new(0),
                    len: AtomicU64::new(0),
                    moved: AtomicU64::new(0),
                    end: AtomicI32::new(0),
                })
                .collect(),
            asleep: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        }
    }

    /// The polling thread gives a range to an idle slot, and what is left of the head of its frame; says whether
    /// the helper must be woken.
    pub fn give(&self, i: usize, head: &[u8], addr: u64, len: u64) -> bool {
        let s = &self.slots[i];
        debug_assert!(len > 0);
        let mut whole = [0; HEAD_LEN];
        whole[HEAD_LEN - head.len()..].copy_from_slice(head);
        for (to, from) in s.head.iter().zip(whole.chunks_exact(8)) {
            let word = u64::from_ne_bytes(from.try_into().expect("8 bytes"));
            to.store(word, Ordering::Relaxed);
        }
        s.before.store(head.len() as u64, Ordering::Relaxed);
        s.addr.store(addr, Ordering::Relaxed);
        s.len.store(len, Ordering::Relaxed);
        s.moved.store(0, Ordering::Relaxed);
        s.end.store(0, Ordering::Relaxed);
        s.state.store(GIVEN, Ordering::Release);
        self.asleep.swap(false, Ordering::AcqRel)
    }

    /// The polling thread takes back what the helper has done: bytes, and why no more.
    pub fn take(&self, i: usize) -> Option<(u64, i32)> {
        let s = &self.slots[i];
        if s.state.load(Ordering::Acquire) != DONE {
            return None;
        }
        let r = (
            s.moved.load(Ordering::Relaxed),
            s.end.load(Ordering::Relaxed),
        );
        s.state.store(IDLE, Ordering::Relaxed);
        Some(r)
    }

    /// The polling thread wants a range back; says whether the helper must be woken.
    pub fn revoke(&self, i: usize) -> bool {
        let given = self.slots[i].state.compare_exchange(
            GIVEN,
            REVOKED,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        given.is_ok() && self.asleep.swap(false, Ordering::AcqRel)
    }

    /// Whether the helper has no range.
    pub fn is_quiet(&self) -> bool {
        self.slots
            .iter()
            .all(|s| matches!(s.state.load(Ordering::Acquire), IDLE | DONE))
    }

    /// The helper is to end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.asleep.swap(false, Ordering::AcqRel);
    }

    /// What the helper has to do in a slot. A range that was revoked is done.
    pub fn work(&self, i: usize) -> Work {
        if self.stop.load(Ordering::Acquire) {
            return Work::Stop;
        }
        let s = &self.slots[i];
        match s.state.load(Ordering::Acquire) {
            GIVEN => {
                let moved = s.moved.load(Ordering::Relaxed);
                let before = s.before.load(Ordering::Relaxed);
                let of_range = moved.saturating_sub(before);
                let mut bytes = [0; HEAD_LEN];
                for (to, from) in bytes.chunks_exact_mut(8).zip(&s.head) {
                    to.copy_from_slice(&from.load(Ordering::Relaxed).to_ne_bytes());
                }
                Work::Move {
                    head: Head {
                        bytes,
                        left: before.saturating_sub(moved) as usize,
                    },
                    addr: s.addr.load(Ordering::Relaxed) + of_range,
                    len: s.len.load(Ordering::Relaxed) - of_range,
                }
            }
            REVOKED => {
                s.state.store(DONE, Ordering::Release);
                Work::None
            }
            _ => Work::None,
        }
    }

    /// The helper has moved so many bytes more.
    pub fn advance(&self, i: usize, n: u64) {
        let s = &self.slots[i];
        let moved = s.moved.load(Ordering::Relaxed) + n;
        s.moved.store(moved, Ordering::Relaxed);
        if moved == s.before.load(Ordering::Relaxed) + s.len.load(Ordering::Relaxed) {
            s.state.store(DONE, Ordering::Release);
        }
    }

    /// The helper can move no more.
    pub fn fail(&self, i: usize, why: i32) {
        let s = &self.slots[i];
        s.end.store(why, Ordering::Relaxed);
        s.state.store(DONE, Ordering::Release);
    }

    /// The helper is about to sleep: it looks at all slots once more, and is woken for what comes behind that.
    pub fn announce_sleep(&self) {
        self.asleep.swap(true, Ordering::AcqRel);
    }

    /// It no longer is.
    pub fn awake(&self) {
        self.asleep.swap(false, Ordering::AcqRel);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_head_that_is_cut_anywhere_goes_before_its_range() {
        let head: [u8; HEAD_LEN] = std::array::from_fn(|i| i as u8);
        for from in [0, 1, 31, 32] {
            for (first, more) in [(1, 40), (10, 22), (31, 1), (40, 2)] {
                let h = Handover::new(1);
                h.give(0, &head[from..], 1000, 100);
                let mut moved = 0;
                for n in [0, first, more] {
                    h.advance(0, n as u64);
                    moved += n;
                    let of_head = moved.min(HEAD_LEN - from);
                    let of_range = (moved - of_head) as u64;
                    let Work::Move {
                        head: left,
                        addr,
                        len,
                    } = h.work(0)
                    else {
                        panic!("there is more to move");
                    };
                    assert_eq!(left.bytes(), &head[from + of_head..]);
                    assert_eq!((addr, len), (1000 + of_range, 100 - of_range));
                }
                assert_eq!(h.take(0), None);
                h.advance(0, (HEAD_LEN - from + 100 - moved) as u64);
                assert_eq!(h.work(0), Work::None);
                assert_eq!(h.take(0), Some(((HEAD_LEN - from + 100) as u64, 0)));
            }
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::{Arc, Notify};
    use loom::thread;

    struct Model {
        h: Handover,
        // Stands for the eventfd: a wake that is missing is a deadlock.
        wake: Notify,
        // Stands for the memory: loom sees who uses it at the same time.
        memory: UnsafeCell<u64>,
    }

    // SAFETY: the cell is what the model checks.
    unsafe impl Sync for Model {}

    fn helper(m: &Model) {
        loop {
            let mut moved = false;
            match m.h.work(0) {
                Work::Stop => return,
                Work::None => {}
                Work::Move { head, len, .. } => {
                    // A byte at a time: that of the head, which says where it is in the order, and one more.
                    // SAFETY: loom fails if the other thread is here too.
                    let n = m.memory.with_mut(|p| unsafe {
                        *p += 1;
                        *p
                    });
                    match n % 2 {
                        1 => assert_eq!((head.bytes(), len), (&[n as u8][..], 1)),
                        _ => assert_eq!((head.bytes(), len), (&[][..], 1)),
                    }
                    m.h.advance(0, 1);
                    moved = true;
                }
            }
            if !moved {
                m.h.announce_sleep();
                match m.h.work(0) {
                    Work::Stop => return,
                    Work::Move { .. } => {}
                    Work::None => m.wake.wait(),
                }
                m.h.awake();
            }
        }
    }

    fn model(f: fn(&Model)) {
        let mut b = loom::model::Builder::new();
        b.preemption_bound = Some(3);
        b.check(move || {
            let m = Arc::new(Model {
                h: Handover::new(1),
                wake: Notify::new(),
                memory: UnsafeCell::new(0),
            });
            let theirs = m.clone();
            let t = thread::spawn(move || helper(&theirs));
            f(&m);
            m.h.stop();
            m.wake.notify();
            t.join().unwrap();
        });
    }

    fn give(m: &Model, head: &[u8], len: u64) {
        if m.h.give(0, head, 0, len) {
            m.wake.notify();
        }
    }

    /// Two ranges, one behind the other: each is moved whole, its head first, and then the memory is the polling
    /// thread's.
    #[test]
    fn loom_ranges_are_moved_and_come_back() {
        model(|m| {
            for n in 1..=2u8 {
                give(m, &[2 * n - 1], 1);
                let r = loop {
                    match m.h.take(0) {
                        Some(r) => break r,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(r, (2, 0));
                // SAFETY: loom fails if the other thread is here too.
                m.memory
                    .with(|p| assert_eq!(unsafe { *p }, 2 * u64::from(n)));
            }
        });
    }

    /// A range that is revoked is nobody's once all is quiet.
    #[test]
    fn loom_revoked_ranges_are_let_go() {
        model(|m| {
            give(m, &[1], 1);
            if m.h.revoke(0) {
                m.wake.notify();
            }
            while !m.h.is_quiet() {
                thread::yield_now();
            }
            // SAFETY: loom fails if the other thread is here too.
            m.memory.with_mut(|p| unsafe { *p = 9 });
        });
    }
}
