//! The sender's table of the receiver's regions: written by the link thread, read on the data path.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;

const SEGMENT: usize = 256;
const SEGMENTS: usize = 256;

/// The most regions that one connection can have registered at a time.
pub const MAX_REGIONS: usize = SEGMENT * SEGMENTS;

const EMPTY: u32 = 0;
const MAPPED: u32 = 1;
const HOST_RING: u32 = 2;
const DEVICE_RING: u32 = 3;

/// How the sender reaches a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// Mapped here: its first address, and its bytes.
    Mapped(u64, u64),
    /// Through the host ring: its bytes.
    HostRing(u64),
    /// Through the ring in the receiver's GPU: its bytes.
    DeviceRing(u64),
}

#[derive(Default, Debug)]
struct Slot {
    state: AtomicU32,
    base: AtomicU64,
    len: AtomicU64,
}

/// Regions by the receiver's numbers.
#[derive(Debug)]
pub struct Regions {
    segments: Box<[OnceLock<Box<[Slot]>>]>,
}

impl Default for Regions {
    fn default() -> Self {
        Regions {
            segments: (0..SEGMENTS).map(|_| OnceLock::new()).collect(),
        }
    }
}

impl Regions {
    #[inline]
    fn slot(&self, region: u32) -> Option<&Slot> {
        self.segments
            .get(region as usize / SEGMENT)?
            .get()?
            .get(region as usize % SEGMENT)
    }

    /// How to reach `region`; `None` while it is not there, or there no more.
    #[inline]
    pub fn get(&self, region: u32) -> Option<Reach> {
        let s = self.slot(region)?;
        // SeqCst: see `remove`.
        let state = s.state.load(Ordering::SeqCst);
        let len = s.len.load(Ordering::Relaxed);
        match state {
            MAPPED => Some(Reach::Mapped(s.base.load(Ordering::Relaxed), len)),
            HOST_RING => Some(Reach::HostRing(len)),
            DEVICE_RING => Some(Reach::DeviceRing(len)),
            _ => None,
        }
    }

    /// Enters a region. `false`: the number is out of range or taken.
    pub fn insert(&self, region: u32, reach: Reach) -> bool {
        let Some(segment) = self.segments.get(region as usize / SEGMENT) else {
            return false;
        };
        let slots = segment.get_or_init(|| (0..SEGMENT).map(|_| Slot::default()).collect());
        let s = &slots[region as usize % SEGMENT];
        if s.state.load(Ordering::Acquire) != EMPTY {
            return false;
        }
        let (state, base, len) = match reach {
            Reach::Mapped(base, len) => (MAPPED, base, len),
            Reach::HostRing(len) => (HOST_RING, 0, len),
            Reach::DeviceRing(len) => (DEVICE_RING, 0, len),
        };
        s.base.store(base, Ordering::Relaxed);
        s.len.store(len, Ordering::Relaxed);
        s.state.store(state, Ordering::SeqCst);
        true
    }

    /// Removes a region. Who enters the connection's gate from now on does not see it; who is inside
    /// may have seen it: so wait until the gate is free once, and then for the copies.
    pub fn remove(&self, region: u32) {
        if let Some(s) = self.slot(region) {
            s.state.store(EMPTY, Ordering::SeqCst);
        }
    }

    /// Removes all.
    pub fn clear(&self) {
        for segment in self.segments.iter().filter_map(OnceLock::get) {
            for s in segment.iter() {
                s.state.store(EMPTY, Ordering::SeqCst);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn insert_get_remove() {
        let r = Regions::default();
        assert_eq!(r.get(0), None);
        assert_eq!(r.get(u32::MAX), None);
        assert!(!r.insert(MAX_REGIONS as u32, Reach::HostRing(1)));
        for i in [0, 255, 256, MAX_REGIONS as u32 - 1] {
            assert!(r.insert(i, Reach::Mapped(100 + i as u64, 7)));
            assert!(!r.insert(i, Reach::HostRing(1)), "taken");
            assert_eq!(r.get(i), Some(Reach::Mapped(100 + i as u64, 7)));
        }
        r.remove(255);
        assert_eq!(r.get(255), None);
        assert!(r.insert(255, Reach::DeviceRing(3)));
        assert_eq!(r.get(255), Some(Reach::DeviceRing(3)));
        r.clear();
        assert!([0, 255, 256].iter().all(|i| r.get(*i).is_none()));
    }
}
