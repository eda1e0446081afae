//! Virtual memory management: physical memory, addresses, mappings, access, and export as descriptors.

use crate::abi::*;
use crate::driver::{entry, Driver, Kind, State};
use crate::memory::check_idle;
use crate::phys::{expose, hide, Phys};
use crate::space::{Mapping, Region};
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::Arc;

/// Physical memory that `cuMemCreate` made or a descriptor brought.
pub struct VmmHandle {
    pub phys: Arc<Phys>,
    /// References that the caller holds.
    refs: u64,
    /// Mappings of it.
    maps: u64,
    pub imported: bool,
    exportable: bool,
    prop: MemAllocationProp,
}

impl VmmHandle {
    /// What it can be exported as. As with the driver, imported memory cannot be exported again.
    pub fn types(&self) -> i32 {
        if self.exportable && !self.imported {
            HANDLE_TYPE_POSIX_FD
        } else {
            0
        }
    }
}

impl State {
    fn handle(&mut self, value: u64) -> Res<&mut VmmHandle> {
        self.handles
            .get_mut(&value)
            .filter(|h| h.refs > 0)
            .ok_or(ERROR_INVALID_VALUE)
    }

    /// Forgets physical memory that nobody holds.
    fn drop_handle(&mut self, value: u64) {
        let Some(handle) = self.handles.get(&value) else {
            return;
        };
        if handle.refs == 0 && handle.maps == 0 {
            let (device, size, imported) = (
                handle.phys.device,
                handle.phys.size() as u64,
                handle.imported,
            );
            self.handles.remove(&value);
            if !imported {
                self.uncharge(device, size);
            }
        }
    }
}

fn supported(drv: &Driver) -> Res {
    if drv.settings().vmm {
        Ok(())
    } else {
        Err(ERROR_NOT_SUPPORTED)
    }
}

fn place(drv: &Driver, prop: &MemAllocationProp) -> Res<u32> {
    if prop.kind != MEM_ALLOCATION_PINNED {
        return Err(ERROR_INVALID_VALUE);
    }
    if prop.location.kind != MEM_LOCATION_DEVICE {
        return Err(ERROR_NOT_SUPPORTED);
    }
    drv.physical(prop.location.id)
}

entry!(
    Kind::Plain,
    fn cuMemGetAllocationGranularity(size: Out<usize>, prop: In<MemAllocationProp>, _option: i32)
    |drv| {
        supported(drv)?;
        place(drv, &prop.get()?)?;
        size.set(GRANULARITY)
    }
);

entry!(
    Kind::Slow("allocates"),
    fn cuMemCreate(handle: Out<u64>, size: usize, prop: In<MemAllocationProp>, flags: u64)
    |drv| {
        supported(drv)?;
        let prop = prop.get()?;
        let device = place(drv, &prop)?;
        if size == 0 || !size.is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        let settings = drv.settings().clone();
        let exportable = prop.handle_types == HANDLE_TYPE_POSIX_FD;
        if exportable && !settings.vmm_export {
            return Err(ERROR_NOT_SUPPORTED);
        }
        if !exportable && prop.handle_types != 0 {
            return Err(ERROR_NOT_PERMITTED);
        }
        let mut state = drv.state()?;
        state.charge(device, size as u64, settings.device_mem_mib)?;
        let phys = Phys::create(device, size, true)
            .inspect_err(|_| state.uncharge(device, size as u64))?;
        let value = state.new_handle();
        let made = VmmHandle {
            phys,
            refs: 1,
            maps: 0,
            imported: false,
            exportable,
            prop,
        };
        state.handles.insert(value, made);
        handle.set(value)
    }
);

entry!(Kind::Slow("frees"), fn cuMemRelease(handle: u64) |drv| {
    let mut state = drv.state()?;
    state.handle(handle)?.refs -= 1;
    state.drop_handle(handle);
    Ok(())
});

entry!(
    Kind::Slow("reserves addresses"),
    fn cuMemAddressReserve(at: Out<u64>, size: usize, align: usize, _wish: u64, flags: u64)
    |drv| {
        supported(drv)?;
        let bad = size == 0 || !size.is_multiple_of(GRANULARITY) || flags != 0;
        if bad || (align != 0 && !align.is_power_of_two()) {
            return Err(ERROR_INVALID_VALUE);
        }
        let mut state = drv.state()?;
        let found = state.va.take(size as u64, align as u64)?;
        state.reservations.insert(found, size as u64);
        at.set(found)
    }
);

entry!(Kind::Slow("frees addresses"), fn cuMemAddressFree(at: u64, size: usize) |drv| {
    let mut state = drv.state()?;
    let known = state.reservations.get(&at) == Some(&(size as u64));
    if !known || !state.regions.within(at, size as u64).is_empty() {
        return Err(ERROR_INVALID_VALUE);
    }
    state.reservations.remove(&at);
    state.va.give(at, size as u64);
    Ok(())
});

fn reservation(state: &State, at: u64, size: u64) -> Res<u64> {
    let (&base, &len) = state
        .reservations
        .range(..=at)
        .next_back()
        .ok_or(ERROR_INVALID_VALUE)?;
    if at.checked_add(size).is_some_and(|end| end <= base + len) {
        Ok(base)
    } else {
        Err(ERROR_INVALID_VALUE)
    }
}

entry!(
    Kind::Slow("maps"),
    fn cuMemMap(at: u64, size: usize, offset: usize, handle: u64, flags: u64)
    |drv| {
        supported(drv)?;
        let mut state = drv.state()?;
        let phys = state.handle(handle)?.phys.clone();
        if offset != 0 || size != phys.size() {
            return Err(ERROR_NOT_SUPPORTED);
        }
        let size = size as u64;
        let reservation = reservation(&state, at, size)?;
        let taken = !state.regions.within(at, size).is_empty();
        if taken || !at.is_multiple_of(GRANULARITY as u64) || flags != 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        if drv.settings().peer_memory {
            expose(&phys, at, size)?;
        }
        state.handle(handle)?.maps += 1;
        let mapping = Mapping {
            size,
            handle,
            phys,
            reservation,
            buffer_id: state.new_buffer_id(),
            pending: Arc::default(),
            access: HashMap::new(),
        };
        state.regions.insert(at, Region::Mapping(mapping));
        Ok(())
    }
);

/// The mappings that a range holds whole.
fn whole(state: &State, at: u64, size: u64) -> Res<Vec<u64>> {
    reservation(state, at, size)?;
    let found = state.regions.within(at, size);
    for base in &found {
        let len = state.regions.get(*base).map_or(0, Region::size);
        if *base < at || base + len > at + size {
            return Err(ERROR_INVALID_VALUE);
        }
    }
    Ok(found)
}

entry!(Kind::Slow("unmaps"), fn cuMemUnmap(at: u64, size: usize) |drv| {
    let mut state = drv.state()?;
    if size == 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    // A range without mappings is no error, as on a driver.
    for base in whole(&state, at, size as u64)? {
        if let Some(Region::Mapping(m)) = state.regions.remove(base) {
            check_idle(drv, "unmapped", base, &m.pending);
            if drv.settings().peer_memory {
                hide(base, m.size);
            }
            if let Some(handle) = state.handles.get_mut(&m.handle) {
                handle.maps -= 1;
            }
            state.drop_handle(m.handle);
        }
    }
    Ok(())
});

entry!(
    Kind::Slow("sets access"),
    fn cuMemSetAccess(at: u64, size: usize, descs: In<MemAccessDesc>, count: usize)
    |drv| {
        supported(drv)?;
        let mut state = drv.state()?;
        let found = whole(&state, at, size as u64)?;
        let covered: u64 =
            found.iter().filter_map(|b| state.regions.get(*b)).map(Region::size).sum();
        if covered != size as u64 || size == 0 || count == 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        let mut grants = Vec::new();
        for i in 0..count {
            let desc = descs.get_at(i)?;
            if desc.location.kind != MEM_LOCATION_DEVICE {
                return Err(ERROR_NOT_SUPPORTED);
            }
            if !matches!(desc.flags, 0 | ACCESS_READ | ACCESS_READ_WRITE) {
                return Err(ERROR_INVALID_VALUE);
            }
            grants.push((drv.physical(desc.location.id)?, desc.flags));
        }
        let settings = drv.settings().clone();
        for base in &found {
            let Some(Region::Mapping(m)) = state.regions.get(*base) else {
                return Err(ERROR_INVALID_VALUE);
            };
            if grants.iter().any(|(d, f)| *f != 0 && !settings.can_access(*d, m.phys.device)) {
                return Err(ERROR_INVALID_DEVICE);
            }
        }
        for base in found {
            if let Some(Region::Mapping(m)) = state.regions.get_mut(base) {
                m.access.extend(grants.iter().copied());
            }
        }
        Ok(())
    }
);

entry!(
    Kind::Plain,
    fn cuMemGetAccess(flags: Out<u64>, location: In<MemLocation>, at: u64)
    |drv| {
        let location = location.get()?;
        if location.kind != MEM_LOCATION_DEVICE {
            return Err(ERROR_NOT_SUPPORTED);
        }
        let device = drv.physical(location.id)?;
        let state = drv.state()?;
        let Some((_, Region::Mapping(m))) = state.regions.find(at) else {
            return Err(ERROR_INVALID_VALUE);
        };
        flags.set(m.access.get(&device).copied().unwrap_or(0) as u64)
    }
);

entry!(
    Kind::Plain,
    fn cuMemGetAllocationPropertiesFromHandle(prop: Out<MemAllocationProp>, handle: u64)
    |drv| prop.set(drv.state()?.handle(handle)?.prop)
);

entry!(Kind::Plain, fn cuMemRetainAllocationHandle(handle: Out<u64>, at: u64) |drv| {
    supported(drv)?;
    let mut state = drv.state()?;
    let Some((_, Region::Mapping(m))) = state.regions.find(at) else {
        return Err(ERROR_INVALID_VALUE);
    };
    let value = m.handle;
    state.handles.get_mut(&value).ok_or(ERROR_INVALID_VALUE)?.refs += 1;
    handle.set(value)
});

entry!(
    Kind::Slow("exports memory"),
    fn cuMemExportToShareableHandle(to: Out<i32>, handle: u64, kind: i32, flags: u64)
    |drv| {
        supported(drv)?;
        let mut state = drv.state()?;
        let handle = state.handle(handle)?;
        if kind != HANDLE_TYPE_POSIX_FD || flags != 0 || handle.types() & kind == 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        if !drv.settings().vmm_export {
            return Err(ERROR_NOT_SUPPORTED);
        }
        to.set(handle.phys.dup()?.into_raw_fd())
    }
);

entry!(
    Kind::Slow("imports memory"),
    fn cuMemImportFromShareableHandle(handle: Out<u64>, os_handle: usize, kind: i32)
    |drv| {
        supported(drv)?;
        if kind != HANDLE_TYPE_POSIX_FD {
            return Err(ERROR_INVALID_VALUE);
        }
        if !drv.settings().vmm_export {
            return Err(ERROR_NOT_SUPPORTED);
        }
        // The descriptor is passed by value in the pointer's place, and stays the caller's.
        let fd = i32::try_from(os_handle).map_err(|_| ERROR_UNKNOWN)?;
        // SAFETY: the call only takes integers; a descriptor that is not open is told.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(ERROR_UNKNOWN);
        }
        // SAFETY: the descriptor is open, and the caller keeps it so for the length of the call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let own = borrowed.try_clone_to_owned().map_err(|_| ERROR_UNKNOWN)?;
        let phys = Phys::adopt(own).filter(|p| p.vmm).ok_or(ERROR_UNKNOWN)?;
        let mut state = drv.state()?;
        let value = state.new_handle();
        let prop = MemAllocationProp {
            kind: MEM_ALLOCATION_PINNED,
            handle_types: 0,
            location: MemLocation {
                kind: MEM_LOCATION_DEVICE,
                id: drv.ordinal(phys.device),
            },
            win32_meta: 0,
            compression: 0,
            gpu_direct_rdma_capable: 0,
            usage: 0,
            reserved: [0; 4],
        };
        let made = VmmHandle {
            phys,
            refs: 1,
            maps: 0,
            imported: true,
            exportable: false,
            prop,
        };
        state.handles.insert(value, made);
        handle.set(value)
    }
);
