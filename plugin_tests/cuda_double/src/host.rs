//! Host memory that the driver knows: registered by the caller, or allocated here.

use crate::abi::*;
use crate::driver::{entry, Driver, Kind, State};
use crate::phys::Pending;
use crate::space::Region;
use std::sync::Arc;

const PAGE: usize = 4096;

/// A range of registered host memory.
pub struct HostReg {
    pub host: usize,
    pub size: usize,
    /// Where devices see it: elsewhere, unless the setting `HOST_ALIAS` is off.
    pub alias: u64,
    pub ctx: u64,
    pub device: u32,
    pub buffer_id: u64,
    /// Allocated by `cuMemHostAlloc`.
    pub owned: bool,
    pub pending: Arc<Pending>,
}

impl HostReg {
    fn pages(&self) -> (usize, usize) {
        pages(self.host, self.size)
    }
}

fn pages(host: usize, size: usize) -> (usize, usize) {
    (host & !(PAGE - 1), (host + size).next_multiple_of(PAGE))
}

/// Is every page of the range mapped in this process?
pub fn is_mapped(host: usize, size: usize) -> bool {
    let (start, end) = pages(host, size);
    let mut resident = vec![0u8; (end - start) / PAGE];
    // SAFETY: the call reads no memory of the range; the vector has a byte for each page.
    unsafe {
        libc::mincore(
            start as *mut libc::c_void,
            end - start,
            resident.as_mut_ptr(),
        ) == 0
    }
}

impl State {
    /// The registration that holds a host address.
    pub fn registered(&self, host: u64) -> Option<&Arc<HostReg>> {
        let (&base, reg) = self.host.range(..=host).next_back()?;
        (host - base < reg.size as u64).then_some(reg)
    }
}

fn register(drv: &Driver, state: &mut State, host: usize, size: usize, owned: bool) -> Res {
    let core = state.working()?;
    if host == 0 || size == 0 || host.checked_add(size).is_none() {
        return Err(ERROR_INVALID_VALUE);
    }
    if state.va.contains(host as u64) {
        drv.violation(format!(
            "device address {host:#x} registered as host memory"
        ));
        return Err(ERROR_INVALID_VALUE);
    }
    if !is_mapped(host, size) {
        return Err(ERROR_INVALID_VALUE);
    }
    let (start, end) = pages(host, size);
    if state
        .host
        .values()
        .any(|r| r.pages().0 < end && start < r.pages().1)
    {
        return Err(ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    let aliased = drv.settings().host_alias;
    let alias = if aliased {
        state.va.take((end - start) as u64, 0)? + (host - start) as u64
    } else {
        host as u64
    };
    let reg = Arc::new(HostReg {
        host,
        size,
        alias,
        ctx: core.handle,
        device: core.device,
        buffer_id: state.new_buffer_id(),
        owned,
        pending: Arc::default(),
    });
    if aliased {
        state.regions.insert(alias, Region::Host(reg.clone()));
    }
    state.host.insert(host as u64, reg);
    Ok(())
}

fn unregister(drv: &Driver, state: &mut State, host: usize, owned: bool) -> Res<Arc<HostReg>> {
    let Some(reg) = state
        .host
        .get(&(host as u64))
        .filter(|r| r.owned == owned)
        .cloned()
    else {
        // Within a registration, but not where it begins.
        return Err(match state.registered(host as u64) {
            Some(_) => ERROR_INVALID_VALUE,
            None if owned => ERROR_INVALID_VALUE,
            None => ERROR_HOST_MEMORY_NOT_REGISTERED,
        });
    };
    if reg.pending.count() > 0 {
        drv.violation(format!(
            "unregistered under a copy: host memory {host:#x}, {} operations under way",
            reg.pending.count()
        ));
    }
    // The caller may unmap it at once.
    reg.pending.kill();
    state.host.remove(&(host as u64));
    if reg.alias != reg.host as u64 {
        state.regions.remove(reg.alias);
        let (start, end) = reg.pages();
        state
            .va
            .give(reg.alias & !(PAGE as u64 - 1), (end - start) as u64);
    }
    Ok(reg)
}

entry!(Kind::Slow("registers memory"), fn cuMemHostRegister_v2(host: usize, size: usize, flags: u32) |drv| {
    if flags & !0xf != 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    register(drv, &mut *drv.state()?, host, size, false)
});

entry!(Kind::Slow("unregisters memory"), fn cuMemHostUnregister(host: usize) |drv| {
    let mut state = drv.state()?;
    state.current()?;
    unregister(drv, &mut state, host, false).map(drop)
});

entry!(Kind::Slow("allocates"), fn cuMemHostAlloc(host: Out<usize>, size: usize, flags: u32) |drv| {
    if size == 0 || flags & !0x7 != 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let mut state = drv.state()?;
    state.working()?;
    // SAFETY: a new private mapping at an address that the kernel chooses.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size.next_multiple_of(PAGE),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(ERROR_OUT_OF_MEMORY);
    }
    register(drv, &mut state, at as usize, size, true)?;
    host.set(at as usize)
});

entry!(Kind::Slow("frees"), fn cuMemFreeHost(host: usize) |drv| {
    let mut state = drv.state()?;
    state.current()?;
    let reg = unregister(drv, &mut state, host, true)?;
    drop(state);
    // An operation that began may still be in the memory; later ones see that it is dead.
    for _ in 0..1000 {
        if reg.pending.count() == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    if reg.pending.count() == 0 {
        // SAFETY: the mapping was made by `cuMemHostAlloc` with this length, and the caller gives up
        // the right to it.
        unsafe { libc::munmap(reg.host as *mut libc::c_void, reg.size.next_multiple_of(PAGE)) };
    }
    Ok(())
});

entry!(Kind::Plain, fn cuMemHostGetDevicePointer_v2(device: Out<u64>, host: usize, flags: u32) |drv| {
    if flags != 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let state = drv.state()?;
    state.current()?;
    let reg = state.registered(host as u64).ok_or(ERROR_INVALID_VALUE)?;
    device.set(reg.alias + (host - reg.host) as u64)
});
