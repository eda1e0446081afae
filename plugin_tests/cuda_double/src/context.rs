//! Contexts: one primary per device, any number of others, and the stack of each thread.

use crate::abi::*;
use crate::driver::{bump, entry, Driver, Kind, State, StateGuard};
use crate::space::Region;
use crate::stream::Stream;
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::Arc;

/// What of a context its streams need too.
pub struct CtxCore {
    pub handle: u64,
    /// The device, as numbered by the machine.
    pub device: u32,
    /// The error that an operation left; every later call returns it.
    pub sticky: AtomicI32,
}

impl CtxCore {
    /// The error that the context carries.
    pub fn check(&self) -> Res {
        match self.sticky.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}

/// A context.
pub struct Ctx {
    pub core: Arc<CtxCore>,
    /// How often it was retained, if it is a primary one.
    retained: Option<u32>,
    /// Contexts whose memory it may reach.
    pub peers: HashSet<u64>,
    /// The stream that calls without one use.
    pub default_stream: Option<Arc<Stream>>,
}

thread_local! {
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The handle of the thread's context.
pub fn current_handle() -> Option<u64> {
    STACK
        .with(|s| s.borrow().last().copied())
        .filter(|h| *h != 0)
}

impl State {
    /// The thread's context.
    pub fn current(&self) -> Res<&Ctx> {
        let handle = current_handle().ok_or(ERROR_INVALID_CONTEXT)?;
        self.contexts.get(&handle).ok_or(ERROR_CONTEXT_IS_DESTROYED)
    }

    /// The thread's context, if nothing went wrong in it.
    pub fn working(&self) -> Res<Arc<CtxCore>> {
        let core = self.current()?.core.clone();
        core.check()?;
        Ok(core)
    }

    /// The stream that calls without one use in a context.
    pub fn default_stream(&mut self, ctx: u64) -> Res<Arc<Stream>> {
        let entry = self.contexts.get_mut(&ctx).ok_or(ERROR_INVALID_CONTEXT)?;
        if let Some(stream) = &entry.default_stream {
            return Ok(stream.clone());
        }
        let stream = Stream::spawn(entry.core.clone())?;
        entry.default_stream = Some(stream.clone());
        Ok(stream)
    }
}

/// Ends a context and what was made in it.
fn destroy(drv: &'static Driver, state: &mut State, handle: u64) {
    let Some(ctx) = state.contexts.remove(&handle) else {
        return;
    };
    let mut streams: Vec<Arc<Stream>> = Vec::new();
    state.streams.retain(|_, s| {
        let stays = s.ctx.handle != handle;
        if !stays {
            streams.push(s.clone());
        }
        stays
    });
    for _ in &streams {
        bump(&drv.stats.left_in_context);
    }
    streams.extend(ctx.default_stream);
    for stream in streams {
        stream.abandon();
        stream.close();
    }
    state.events.retain(|_, e| e.ctx != handle);
    let left: Vec<(u64, bool)> = state
        .regions
        .iter()
        .filter_map(|(base, r)| match r {
            Region::Alloc(a) if a.ctx == handle => Some((base, a.opens.is_some())),
            _ => None,
        })
        .collect();
    for (base, imported) in left {
        bump(&drv.stats.left_in_context);
        if imported {
            crate::ipc::close(drv, state, base, true);
        } else {
            crate::memory::free(drv, state, base);
        }
    }
}

entry!(Kind::Slow("retains a context"), fn cuDevicePrimaryCtxRetain(ctx: Out<u64>, device: i32) |drv| {
    let physical = drv.physical(device)?;
    let mut state = drv.state()?;
    // The handle stays the same over releases and retains, as a driver's does.
    let handle = 0x7cc0_0000_0000_0000 | (u64::from(physical) << 8);
    let entry = state.contexts.entry(handle).or_insert_with(|| Ctx::new(handle, physical, Some(0)));
    entry.retained = entry.retained.map(|n| n + 1);
    ctx.set(handle)
});

entry!(Kind::Slow("releases a context"), fn cuDevicePrimaryCtxRelease_v2(device: i32) |drv| {
    let physical = drv.physical(device)?;
    let mut state = drv.state()?;
    let handle = 0x7cc0_0000_0000_0000 | (u64::from(physical) << 8);
    let entry = state.contexts.get_mut(&handle).ok_or(ERROR_INVALID_CONTEXT)?;
    entry.retained = entry.retained.map(|n| n.saturating_sub(1));
    if entry.retained == Some(0) {
        destroy(drv, &mut state, handle);
    }
    Ok(())
});

impl Ctx {
    fn new(handle: u64, device: u32, retained: Option<u32>) -> Ctx {
        Ctx {
            core: Arc::new(CtxCore {
                handle,
                device,
                sticky: AtomicI32::new(0),
            }),
            retained,
            peers: HashSet::new(),
            default_stream: None,
        }
    }
}

entry!(Kind::Slow("creates a context"), fn cuCtxCreate_v2(ctx: Out<u64>, _flags: u32, device: i32) |drv| {
    let physical = drv.physical(device)?;
    let mut state = drv.state()?;
    let handle = state.new_handle();
    ctx.set(handle)?;
    state.contexts.insert(handle, Ctx::new(handle, physical, None));
    STACK.with(|s| s.borrow_mut().push(handle));
    Ok(())
});

entry!(Kind::Slow("destroys a context"), fn cuCtxDestroy_v2(ctx: u64) |drv| {
    let mut state = drv.state()?;
    let entry = state.contexts.get(&ctx).ok_or(ERROR_INVALID_CONTEXT)?;
    if entry.retained.is_some() {
        return Err(ERROR_INVALID_CONTEXT);
    }
    destroy(drv, &mut state, ctx);
    STACK.with(|s| {
        let mut stack = s.borrow_mut();
        if stack.last() == Some(&ctx) {
            stack.pop();
        }
    });
    Ok(())
});

entry!(Kind::Plain, fn cuCtxGetCurrent(ctx: Out<u64>) |_drv| ctx.set(current_handle().unwrap_or(0)));

fn known(state: &StateGuard, ctx: u64) -> Res {
    if state.contexts.contains_key(&ctx) {
        Ok(())
    } else {
        Err(ERROR_INVALID_CONTEXT)
    }
}

entry!(Kind::Plain, fn cuCtxSetCurrent(ctx: u64) |drv| {
    if ctx != 0 {
        known(&drv.state()?, ctx)?;
    }
    STACK.with(|s| {
        let mut stack = s.borrow_mut();
        stack.pop();
        if ctx != 0 {
            stack.push(ctx);
        }
    });
    Ok(())
});

entry!(Kind::Plain, fn cuCtxPushCurrent_v2(ctx: u64) |drv| {
    known(&drv.state()?, ctx)?;
    STACK.with(|s| s.borrow_mut().push(ctx));
    Ok(())
});

entry!(Kind::Plain, fn cuCtxPopCurrent_v2(ctx: Out<u64>) |_drv| {
    let top = STACK.with(|s| s.borrow_mut().pop()).ok_or(ERROR_INVALID_CONTEXT)?;
    ctx.set_opt(top);
    Ok(())
});

entry!(Kind::Plain, fn cuCtxGetDevice(device: Out<i32>) |drv| {
    let physical = drv.state()?.current()?.core.device;
    device.set(drv.ordinal(physical))
});

entry!(Kind::Slow("synchronizes"), fn cuCtxSynchronize() |drv| {
    let (core, streams) = {
        let state = drv.state()?;
        let ctx = state.current()?;
        let core = ctx.core.clone();
        let of_ctx = state.streams.values().filter(|s| s.ctx.handle == core.handle).cloned();
        let streams: Vec<_> = of_ctx.chain(ctx.default_stream.clone()).collect();
        (core, streams)
    };
    for stream in streams {
        stream.wait();
    }
    core.check()
});

entry!(Kind::Slow("enables peer access"), fn cuCtxEnablePeerAccess(peer: u64, flags: u32) |drv| {
    let mut state = drv.state()?;
    let core = state.working()?;
    if flags != 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let to = state.contexts.get(&peer).ok_or(ERROR_INVALID_CONTEXT)?.core.device;
    if to == core.device || !drv.settings().can_access(core.device, to) {
        return Err(ERROR_PEER_ACCESS_UNSUPPORTED);
    }
    let ctx = state.contexts.get_mut(&core.handle).ok_or(ERROR_INVALID_CONTEXT)?;
    if ctx.peers.insert(peer) {
        Ok(())
    } else {
        Err(ERROR_PEER_ACCESS_ALREADY_ENABLED)
    }
});

entry!(Kind::Slow("disables peer access"), fn cuCtxDisablePeerAccess(peer: u64) |drv| {
    let mut state = drv.state()?;
    let core = state.working()?;
    let ctx = state.contexts.get_mut(&core.handle).ok_or(ERROR_INVALID_CONTEXT)?;
    if ctx.peers.remove(&peer) {
        Ok(())
    } else {
        Err(ERROR_PEER_ACCESS_NOT_ENABLED)
    }
});

entry!(Kind::Plain, fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) |drv| {
    drv.state()?.current()?;
    least.set_opt(0);
    greatest.set_opt(-5);
    Ok(())
});
