//! `cuMemAlloc` and what asks about its memory.
//!
//! As with the driver, requests of up to 1 MiB share 2 MiB blocks (at multiples of 512 bytes), and
//! larger ones get blocks of their own. An IPC handle of a small buffer therefore exposes the others
//! in its block.

use crate::abi::*;
use crate::driver::{bump, entry, Driver, Kind, State};
use crate::phys::{expose, hide, Pending, Phys};
use crate::space::{Alloc, Region};
use std::collections::BTreeMap;
use std::sync::Arc;

const SMALL: u64 = 1 << 20;
const STEP: u64 = 512;

/// Addresses with physical memory behind them, of which allocations are parts.
pub struct Block {
    pub size: u64,
    ctx: u64,
    pub phys: Arc<Phys>,
    /// Unique in the process's life.
    pub id: u64,
    shared: bool,
    used: BTreeMap<u64, u64>,
}

impl Block {
    /// The lowest free place of that size.
    fn place(&self, size: u64) -> Option<u64> {
        let mut at = 0;
        for (&start, &len) in &self.used {
            if at + size <= start {
                return Some(at);
            }
            at = start + len;
        }
        (at + size <= self.size).then_some(at)
    }
}

fn allocate(drv: &Driver, state: &mut State, size: u64) -> Res<u64> {
    let core = state.working()?;
    if size == 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let limit = drv.settings().device_mem_mib;
    if size > limit << 20 {
        return Err(ERROR_OUT_OF_MEMORY);
    }
    let shared = size <= SMALL;
    let span = size.next_multiple_of(STEP);
    let in_use = state
        .blocks
        .iter()
        .filter(|(_, b)| shared && b.shared && b.ctx == core.handle)
        .find_map(|(&at, b)| Some((at, b.place(span)?)));
    let (at, offset) = match in_use {
        Some(found) => found,
        None => {
            let room = size.next_multiple_of(GRANULARITY as u64);
            state.charge(core.device, room, limit)?;
            let made = Phys::create(core.device, room as usize, false)
                .and_then(|phys| Ok((phys, state.va.take(room, 0)?)));
            let (phys, at) = match made {
                Ok(made) => made,
                Err(code) => {
                    state.uncharge(core.device, room);
                    return Err(code);
                }
            };
            if drv.settings().peer_memory {
                expose(&phys, at, room)?;
            }
            let id = state.new_buffer_id();
            let block = Block {
                size: room,
                ctx: core.handle,
                phys,
                id,
                shared,
                used: BTreeMap::new(),
            };
            state.blocks.insert(at, block);
            (at, 0)
        }
    };
    let buffer_id = state.new_buffer_id();
    let block = state.blocks.get_mut(&at).ok_or(ERROR_UNKNOWN)?;
    block.used.insert(offset, span);
    let alloc = Alloc {
        size,
        ctx: core.handle,
        phys: block.phys.clone(),
        offset,
        block: at,
        buffer_id,
        pending: Arc::default(),
        opens: None,
    };
    state.regions.insert(at + offset, Region::Alloc(alloc));
    Ok(at + offset)
}

/// Records memory that goes while operations use it.
pub fn check_idle(drv: &Driver, what: &str, at: u64, pending: &Pending) {
    if pending.count() > 0 {
        let n = pending.count();
        drv.violation(format!(
            "{what} under a copy: device memory {at:#x}, {n} operations under way"
        ));
    }
}

/// Frees an allocation of this process.
pub fn free(drv: &Driver, state: &mut State, at: u64) {
    let Some(Region::Alloc(alloc)) = state.regions.remove(at) else {
        return;
    };
    check_idle(drv, "freed", at, &alloc.pending);
    if let Some(pid) = alloc.phys.busy_elsewhere() {
        drv.violation(format!(
            "freed under a copy: device memory {at:#x}, process {pid} uses it"
        ));
    } else if let Some(pid) = alloc.phys.open_elsewhere() {
        bump(&drv.stats.freed_while_open);
        if drv.settings().ipc_free_strict {
            drv.violation(format!(
                "freed while process {pid} has it open: device memory {at:#x}"
            ));
        }
    }
    let Some(block) = state.blocks.get_mut(&alloc.block) else {
        return;
    };
    block.used.remove(&alloc.offset);
    if block.used.is_empty() {
        let (size, device) = (block.size, block.phys.device);
        state.blocks.remove(&alloc.block);
        if drv.settings().peer_memory {
            hide(alloc.block, size);
        }
        state.va.give(alloc.block, size);
        state.uncharge(device, size);
    }
}

entry!(Kind::Slow("allocates"), fn cuMemAlloc_v2(at: Out<u64>, size: usize) |drv| {
    let found = allocate(drv, &mut *drv.state()?, size as u64)?;
    at.set(found)
});

entry!(Kind::Slow("frees"), fn cuMemFree_v2(at: u64) |drv| {
    let mut state = drv.state()?;
    if at == 0 {
        return Ok(());
    }
    state.working()?;
    match state.regions.get(at) {
        Some(Region::Alloc(a)) if a.opens.is_none() => {}
        _ => return Err(ERROR_INVALID_VALUE),
    }
    free(drv, &mut state, at);
    Ok(())
});

entry!(Kind::Plain, fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) |drv| {
    let state = drv.state()?;
    let device = state.current()?.core.device;
    let all = drv.settings().device_mem_mib << 20;
    let used = state.used.get(&device).copied().unwrap_or(0);
    free.set_opt(all.saturating_sub(used) as usize);
    total.set_opt(all as usize);
    Ok(())
});

entry!(Kind::Plain, fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, at: u64) |drv| {
    let state = drv.state()?;
    let ctx = state.current()?;
    let found = if let Some((start, region)) = state.regions.find(at) {
        // What the context cannot reach is not found, as on a driver.
        state.reaches(ctx, region, ACCESS_READ).then_some((start, region.size()))
    } else {
        state.registered(at).map(|r| (r.host as u64, r.size as u64))
    };
    let (start, len) = found.ok_or(ERROR_NOT_FOUND)?;
    base.set_opt(start);
    size.set_opt(len as usize);
    Ok(())
});

entry!(Kind::Plain, fn cuFlushGPUDirectRDMAWrites(target: i32, scope: i32) |drv| {
    let _ = drv;
    match (target, scope) {
        (0, 100 | 200) => Ok(()),
        _ => Err(ERROR_INVALID_VALUE),
    }
});

entry!(
    Kind::Plain,
    fn cuMemGetHandleForAddressRange(_handle: usize, _at: u64, _size: usize, _kind: i32, _flags: u64)
    |_drv| Err(ERROR_NOT_SUPPORTED)
);
