//! Device addresses: one range of the process that the CPU may not touch, handed out from the bottom
//! so that a freed address comes back.

use crate::abi::*;
use crate::host::HostReg;
use crate::phys::{Pending, Phys};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The reserved range and what of it is free.
pub struct VaSpace {
    base: u64,
    size: u64,
    free: BTreeMap<u64, u64>,
}

impl VaSpace {
    /// Reserves the range; nothing in it can be read or written.
    pub fn reserve(gib: u64) -> Res<VaSpace> {
        let size = gib << 30;
        let granule = GRANULARITY as u64;
        // SAFETY: a new mapping without access at an address that the kernel chooses.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                (size + granule) as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        let base = (at as u64).next_multiple_of(granule);
        Ok(VaSpace {
            base,
            size,
            free: BTreeMap::from([(base, size)]),
        })
    }

    /// Is this a device address, in use or not?
    pub fn contains(&self, addr: u64) -> bool {
        addr >= self.base && addr < self.base + self.size
    }

    /// Takes the lowest free range of that size.
    pub fn take(&mut self, size: u64, align: u64) -> Res<u64> {
        let size = size.next_multiple_of(GRANULARITY as u64);
        let align = align.max(GRANULARITY as u64);
        let found = self.free.iter().find_map(|(&start, &len)| {
            let at = start.next_multiple_of(align);
            (at - start + size <= len).then_some((start, len, at))
        });
        let (start, len, at) = found.ok_or(ERROR_OUT_OF_MEMORY)?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        if at + size < start + len {
            self.free.insert(at + size, start + len - at - size);
        }
        Ok(at)
    }

    /// Gives a range back.
    pub fn give(&mut self, mut start: u64, size: u64) {
        let mut len = size.next_multiple_of(GRANULARITY as u64);
        if let Some(next) = self.free.remove(&(start + len)) {
            len += next;
        }
        if let Some((&before, &blen)) = self.free.range(..start).next_back() {
            if before + blen == start {
                self.free.remove(&before);
                start = before;
                len += blen;
            }
        }
        self.free.insert(start, len);
    }
}

/// Memory of `cuMemAlloc`, or of another process's `cuMemAlloc` opened over IPC.
pub struct Alloc {
    pub size: u64,
    pub ctx: u64,
    pub phys: Arc<Phys>,
    /// Where in the physical memory it begins.
    pub offset: u64,
    /// The block of addresses that it is part of.
    pub block: u64,
    pub buffer_id: u64,
    pub pending: Arc<Pending>,
    /// How often it was opened, if it is another process's.
    pub opens: Option<u32>,
}

/// A mapping of `cuMemMap`.
pub struct Mapping {
    pub size: u64,
    pub handle: u64,
    pub phys: Arc<Phys>,
    pub reservation: u64,
    pub buffer_id: u64,
    pub pending: Arc<Pending>,
    /// What each device, as numbered by the machine, may do.
    pub access: HashMap<u32, i32>,
}

/// What lies at a device address.
pub enum Region {
    Alloc(Alloc),
    Mapping(Mapping),
    Host(Arc<HostReg>),
}

impl Region {
    pub fn size(&self) -> u64 {
        match self {
            Region::Alloc(a) => a.size,
            Region::Mapping(m) => m.size,
            Region::Host(h) => h.size as u64,
        }
    }

    pub fn buffer_id(&self) -> u64 {
        match self {
            Region::Alloc(a) => a.buffer_id,
            Region::Mapping(m) => m.buffer_id,
            Region::Host(h) => h.buffer_id,
        }
    }
}

/// What is at each device address.
#[derive(Default)]
pub struct Regions(BTreeMap<u64, Region>);

impl Regions {
    /// The region that holds an address, and where it begins.
    pub fn find(&self, addr: u64) -> Option<(u64, &Region)> {
        let (&base, region) = self.0.range(..=addr).next_back()?;
        (addr - base < region.size()).then_some((base, region))
    }

    pub fn insert(&mut self, base: u64, region: Region) {
        self.0.insert(base, region);
    }

    pub fn get(&self, base: u64) -> Option<&Region> {
        self.0.get(&base)
    }

    pub fn get_mut(&mut self, base: u64) -> Option<&mut Region> {
        self.0.get_mut(&base)
    }

    pub fn remove(&mut self, base: u64) -> Option<Region> {
        self.0.remove(&base)
    }

    /// The regions that touch a range, lowest first.
    pub fn within(&self, start: u64, size: u64) -> Vec<u64> {
        let first = self.find(start).map_or(start, |(base, _)| base);
        self.0
            .range(first..start.saturating_add(size))
            .map(|(&base, _)| base)
            .collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &Region)> {
        self.0.iter().map(|(&base, region)| (base, region))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_and_free_ranges_join() {
        let mut va = VaSpace::reserve(1).unwrap();
        let g = GRANULARITY as u64;
        let a = va.take(1, 0).unwrap();
        let b = va.take(3 * g, 0).unwrap();
        let c = va.take(g, 0).unwrap();
        assert_eq!((b - a, c - b), (g, 3 * g));
        va.give(b, 3 * g);
        assert_eq!(va.take(g, 0).unwrap(), b);
        va.give(b, g);
        va.give(a, 1);
        va.give(c, g);
        assert_eq!(va.free.len(), 1);
        assert!(va.take(2 << 30, 0).is_err());
        assert_eq!(va.take(g, 64 * g).unwrap() % (64 * g), 0);
    }
}
