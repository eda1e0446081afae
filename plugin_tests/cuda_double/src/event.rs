//! Events: marks in a stream.

use crate::abi::*;
use crate::context::CtxCore;
use crate::driver::{driver, entry, lock, Driver, Kind};
use crate::stream::{self, Op};
use std::sync::{Arc, Condvar, Mutex};

#[derive(Default)]
struct Turns {
    recorded: u64,
    done: u64,
}

/// An event; each record is a new turn of it.
pub struct Event {
    pub ctx: u64,
    core: Arc<CtxCore>,
    turns: Mutex<Turns>,
    finished: Condvar,
}

impl Event {
    /// The turn that was recorded last.
    pub fn recorded(&self) -> u64 {
        lock(&self.turns).recorded
    }

    /// A stream came to the mark.
    pub fn finish(&self, turn: u64) {
        let mut turns = lock(&self.turns);
        turns.done = turns.done.max(turn);
        drop(turns);
        self.finished.notify_all();
    }

    /// Has a stream come to that turn's mark?
    pub fn is_done(&self, turn: u64) -> bool {
        lock(&self.turns).done >= turn
    }

    fn wait(&self) {
        let mut turns = lock(&self.turns);
        let until = turns.recorded;
        while turns.done < until {
            turns = self.finished.wait(turns).unwrap_or_else(|p| p.into_inner());
        }
    }
}

fn find(drv: &'static Driver, event: u64) -> Res<Arc<Event>> {
    let found = drv.state()?.events.get(&event).cloned();
    found.ok_or_else(|| {
        driver().violation(format!(
            "use of an event that is gone or never was: {event:#x}"
        ));
        ERROR_INVALID_HANDLE
    })
}

entry!(Kind::Slow("creates an event"), fn cuEventCreate(out: Out<u64>, flags: u32) |drv| {
    if flags & !7 != 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let mut state = drv.state()?;
    let core = state.working()?;
    let handle = state.new_handle();
    let event = Event {
        ctx: core.handle,
        core,
        turns: Mutex::default(),
        finished: Condvar::new(),
    };
    state.events.insert(handle, Arc::new(event));
    out.set(handle)
});

entry!(Kind::Plain, fn cuEventRecord(event: u64, stream: u64) |drv| {
    let event = find(drv, event)?;
    let stream = stream::find(drv, &mut drv.state()?, stream)?;
    if stream.ctx.handle != event.ctx {
        return Err(ERROR_INVALID_HANDLE);
    }
    let turn = {
        let mut turns = lock(&event.turns);
        turns.recorded += 1;
        turns.recorded
    };
    stream.push(Op::Record { event, turn });
    Ok(())
});

entry!(Kind::Plain, fn cuEventQuery(event: u64) |drv| {
    let event = find(drv, event)?;
    event.core.check()?;
    if event.is_done(event.recorded()) {
        Ok(())
    } else {
        Err(ERROR_NOT_READY)
    }
});

entry!(Kind::Slow("synchronizes"), fn cuEventSynchronize(event: u64) |drv| {
    let event = find(drv, event)?;
    event.wait();
    event.core.check()
});

entry!(Kind::Slow("destroys an event"), fn cuEventDestroy_v2(event: u64) |drv| {
    let gone = drv.state()?.events.remove(&event);
    gone.map(drop).ok_or(ERROR_INVALID_HANDLE)
});
