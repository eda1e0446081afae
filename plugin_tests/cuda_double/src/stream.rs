//! Streams: a queue of operations and the thread that works through it, in order.

use crate::abi::*;
use crate::context::CtxCore;
use crate::copy::{self, Side};
use crate::driver::{bump, driver, entry, lock, Driver, Kind, StateGuard};
use crate::event::Event;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a waiting operation looks again.
const POLL: Duration = Duration::from_micros(20);

/// What a stream does, one after the other.
pub enum Op {
    Copy {
        dst: Side,
        src: Side,
        len: usize,
    },
    Fill {
        dst: Side,
        byte: u8,
        len: usize,
    },
    Write {
        to: Side,
        value: u64,
        wide: bool,
    },
    Wait {
        on: Side,
        value: u64,
        wide: bool,
        flags: u32,
    },
    Record {
        event: Arc<Event>,
        turn: u64,
    },
    WaitEvent {
        event: Arc<Event>,
        turn: u64,
    },
}

#[derive(Default)]
struct Queue {
    ops: VecDeque<Op>,
    enqueued: u64,
    done: u64,
    closing: bool,
}

/// A stream.
pub struct Stream {
    pub ctx: Arc<CtxCore>,
    queue: Mutex<Queue>,
    work: Condvar,
    finished: Condvar,
    enqueued: AtomicU64,
    done: AtomicU64,
    abandoned: AtomicBool,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Stream {
    /// A new stream and its thread.
    pub fn spawn(ctx: Arc<CtxCore>) -> Res<Arc<Stream>> {
        let stream = Arc::new(Stream {
            ctx,
            queue: Mutex::default(),
            work: Condvar::new(),
            finished: Condvar::new(),
            enqueued: AtomicU64::new(0),
            done: AtomicU64::new(0),
            abandoned: AtomicBool::new(false),
            worker: Mutex::new(None),
        });
        let of_thread = stream.clone();
        let thread = std::thread::Builder::new()
            .name("cuda-double".into())
            .stack_size(256 << 10)
            .spawn(move || of_thread.run())
            .map_err(|_| ERROR_OUT_OF_MEMORY)?;
        *lock(&stream.worker) = Some(thread);
        Ok(stream)
    }

    /// Puts an operation at the end.
    pub fn push(&self, op: Op) {
        bump(&driver().stats.pending_ops);
        let mut queue = lock(&self.queue);
        queue.ops.push_back(op);
        queue.enqueued += 1;
        self.enqueued.store(queue.enqueued, Ordering::Release);
        drop(queue);
        self.work.notify_one();
    }

    /// Is everything done that was put in?
    pub fn idle(&self) -> bool {
        self.done.load(Ordering::Acquire) >= self.enqueued.load(Ordering::Acquire)
    }

    /// Waits until everything is done that was put in before the call.
    pub fn wait(&self) {
        let mut queue = lock(&self.queue);
        let until = queue.enqueued;
        while queue.done < until {
            queue = self.finished.wait(queue).unwrap_or_else(|p| p.into_inner());
        }
    }

    /// Ends the thread once everything is done. Does not wait for work under way.
    pub fn close(&self) {
        let idle = {
            let mut queue = lock(&self.queue);
            queue.closing = true;
            queue.done == queue.enqueued
        };
        self.work.notify_one();
        let worker = lock(&self.worker).take();
        if let Some(worker) = worker.filter(|_| idle) {
            let _ = worker.join();
        }
    }

    /// What the stream still waits for will not come: its context is gone.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
        driver().changed.notify_all();
    }

    fn gave_up(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    fn run(&self) {
        let drv = driver();
        bump(&drv.stats.live_workers);
        // SAFETY: asks for finer sleeps of this thread; only takes integers.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000, 0, 0, 0) };
        loop {
            let op = {
                let mut queue = lock(&self.queue);
                loop {
                    if let Some(op) = queue.ops.pop_front() {
                        break op;
                    }
                    if queue.closing {
                        drv.stats.live_workers.fetch_sub(1, Ordering::AcqRel);
                        return;
                    }
                    queue = self.work.wait(queue).unwrap_or_else(|p| p.into_inner());
                }
            };
            let result = catch_unwind(AssertUnwindSafe(|| self.execute(drv, op)));
            if let Err(code) = result.unwrap_or(Err(ERROR_UNKNOWN)) {
                let sticky = &self.ctx.sticky;
                let _ = sticky.compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire);
            }
            drv.stats.pending_ops.fetch_sub(1, Ordering::AcqRel);
            let mut queue = lock(&self.queue);
            queue.done += 1;
            self.done.store(queue.done, Ordering::Release);
            drop(queue);
            self.finished.notify_all();
        }
    }

    fn execute(&self, drv: &'static Driver, op: Op) -> Res {
        match op {
            // An event is done however the work before it ended; its query tells of the error.
            Op::Record { event, turn } => {
                event.finish(turn);
                return Ok(());
            }
            // In a context that failed nothing more happens.
            _ if self.ctx.check().is_err() => return Ok(()),
            Op::Copy {
                mut dst,
                mut src,
                len,
            } => {
                self.take_time(drv, len)?;
                copy::run(&mut dst, &mut src, len)?;
                bump(&drv.stats.copies_done);
                drv.stats
                    .bytes_copied
                    .fetch_add(len as u64, Ordering::AcqRel);
            }
            Op::Fill { mut dst, byte, len } => {
                self.take_time(drv, len)?;
                copy::fill(&mut dst, byte, len)?;
            }
            Op::Write {
                mut to,
                value,
                wide,
            } => {
                self.pause(drv.settings().op_delay_us);
                copy::store(drv, &mut to, value, wide)?;
                bump(&drv.stats.value_writes);
            }
            Op::Wait {
                on,
                value,
                wide,
                flags,
            } => {
                while !holds(copy::load(drv, &on, wide)?, value, wide, flags) {
                    if self.gave_up() {
                        break;
                    }
                    std::thread::sleep(POLL);
                }
            }
            Op::WaitEvent { event, turn } => {
                while !event.is_done(turn) && !self.gave_up() {
                    std::thread::sleep(POLL);
                }
            }
        }
        Ok(())
    }

    fn pause(&self, us: u64) {
        if us > 0 {
            std::thread::sleep(Duration::from_micros(us));
        }
    }

    /// Spends the time that a copy takes, hangs where copies hang, and fails where they fail.
    fn take_time(&self, drv: &'static Driver, len: usize) -> Res {
        let began = Instant::now();
        let (time, failure) = {
            let mut s = drv.settings();
            let mut time = Duration::from_micros(s.copy_delay_us);
            if s.copy_gbps > 0.0 {
                time += Duration::from_secs_f64(len as f64 / (s.copy_gbps * 1e9));
            }
            (time, s.async_failure())
        };
        if let Some(left) = time.checked_sub(began.elapsed()).filter(|t| !t.is_zero()) {
            std::thread::sleep(left);
        }
        let mut s = drv.settings();
        while s.hangs(self.ctx.device) && !self.gave_up() {
            let tick = Duration::from_millis(20);
            s = drv
                .changed
                .wait_timeout(s, tick)
                .unwrap_or_else(|p| p.into_inner())
                .0;
        }
        failure.map_or(Ok(()), Err)
    }
}

const WAIT_EQ: u32 = 1;
const WAIT_AND: u32 = 2;
const WAIT_NOR: u32 = 3;
const WAIT_FLUSH: u32 = 1 << 30;

fn holds(found: u64, value: u64, wide: bool, flags: u32) -> bool {
    match flags & 3 {
        WAIT_EQ => found == value,
        WAIT_AND => found & value != 0,
        WAIT_NOR if wide => !(found | value) != 0,
        WAIT_NOR => !(found as u32 | value as u32) != 0,
        // A cyclic comparison.
        _ if wide => found.wrapping_sub(value) as i64 >= 0,
        _ => (found as u32).wrapping_sub(value as u32) as i32 >= 0,
    }
}

/// The stream of a handle: 0, 1 and 2 are the current context's default one.
pub fn find(drv: &'static Driver, state: &mut StateGuard, handle: u64) -> Res<Arc<Stream>> {
    let stream = if handle <= 2 {
        let ctx = state.current()?.core.handle;
        state.default_stream(ctx)?
    } else if let Some(stream) = state.streams.get(&handle) {
        stream.clone()
    } else {
        drv.violation(format!(
            "use of a stream that is gone or never was: {handle:#x}"
        ));
        return Err(ERROR_INVALID_HANDLE);
    };
    stream.ctx.check()?;
    Ok(stream)
}

fn create(drv: &'static Driver, out: Out<u64>, flags: u32) -> Res {
    if flags > 1 {
        return Err(ERROR_INVALID_VALUE);
    }
    let mut state = drv.state()?;
    let core = state.working()?;
    let handle = state.new_handle();
    let stream = Stream::spawn(core)?;
    state.streams.insert(handle, stream);
    out.set(handle)
}

entry!(Kind::Slow("creates a stream"), fn cuStreamCreate(out: Out<u64>, flags: u32) |drv| create(drv, out, flags));

entry!(
    Kind::Slow("creates a stream"),
    fn cuStreamCreateWithPriority(out: Out<u64>, flags: u32, _priority: i32)
    |drv| create(drv, out, flags)
);

entry!(Kind::Slow("destroys a stream"), fn cuStreamDestroy_v2(stream: u64) |drv| {
    let found = drv.state()?.streams.remove(&stream);
    let Some(found) = found else {
        drv.violation(format!("a stream destroyed that is gone or never was: {stream:#x}"));
        return Err(ERROR_INVALID_HANDLE);
    };
    found.close();
    Ok(())
});

entry!(Kind::Plain, fn cuStreamQuery(stream: u64) |drv| {
    let stream = find(drv, &mut drv.state()?, stream)?;
    if stream.idle() {
        stream.ctx.check()
    } else {
        Err(ERROR_NOT_READY)
    }
});

entry!(Kind::Slow("synchronizes"), fn cuStreamSynchronize(stream: u64) |drv| {
    let stream = find(drv, &mut drv.state()?, stream)?;
    stream.wait();
    stream.ctx.check()
});

entry!(Kind::Plain, fn cuStreamGetCtx(stream: u64, ctx: Out<u64>) |drv| {
    ctx.set(find(drv, &mut drv.state()?, stream)?.ctx.handle)
});

thread_local! {
    /// `CU_STREAM_CAPTURE_MODE_*` of this thread.
    static CAPTURE_MODE: Cell<i32> = const { Cell::new(0) };
}

/// Whether this thread may do what a capture elsewhere does not allow.
pub fn is_relaxed() -> bool {
    CAPTURE_MODE.get() == 2
}

entry!(Kind::Plain, fn cuThreadExchangeStreamCaptureMode(mode: usize) |_drv| {
    let new = In::<i32>::at(mode).get()?;
    if !(0..=2).contains(&new) {
        return Err(ERROR_INVALID_VALUE);
    }
    Out::<i32>::at(mode).set(CAPTURE_MODE.with(|m| m.replace(new)))
});

entry!(Kind::Plain, fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) |drv| {
    let mut state = drv.state()?;
    let stream = find(drv, &mut state, stream)?;
    let event = state.events.get(&event).cloned().ok_or(ERROR_INVALID_HANDLE)?;
    if flags > 1 {
        return Err(ERROR_INVALID_VALUE);
    }
    let turn = event.recorded();
    stream.push(Op::WaitEvent { event, turn });
    Ok(())
});

/// Where a value is written or awaited: aligned, in one piece, and reachable.
fn value_side(
    drv: &'static Driver,
    stream: u64,
    at: u64,
    wide: bool,
    write: bool,
) -> Res<(Arc<Stream>, Side)> {
    if !drv.settings().memops {
        return Err(ERROR_NOT_SUPPORTED);
    }
    let mut state = drv.state()?;
    let stream = find(drv, &mut state, stream)?;
    let len = if wide { 8 } else { 4 };
    if !at.is_multiple_of(len) {
        return Err(ERROR_INVALID_VALUE);
    }
    let side = copy::resolve_device(&state, at, len, &stream, write)?;
    // Unlike a copy, this is never staged.
    if side.unreachable {
        return Err(ERROR_INVALID_VALUE);
    }
    Ok((stream, side))
}

fn write_value(
    drv: &'static Driver,
    stream: u64,
    at: u64,
    value: u64,
    wide: bool,
    flags: u32,
) -> Res {
    if flags > 1 {
        return Err(ERROR_INVALID_VALUE);
    }
    let (stream, to) = value_side(drv, stream, at, wide, true)?;
    stream.push(Op::Write { to, value, wide });
    Ok(())
}

fn wait_value(
    drv: &'static Driver,
    stream: u64,
    at: u64,
    value: u64,
    wide: bool,
    flags: u32,
) -> Res {
    if flags & !(3 | WAIT_FLUSH) != 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let (stream, on) = value_side(drv, stream, at, wide, false)?;
    stream.push(Op::Wait {
        on,
        value,
        wide,
        flags,
    });
    Ok(())
}

entry!(Kind::Plain, fn cuStreamWriteValue32_v2(stream: u64, at: u64, value: u32, flags: u32) |drv| {
    write_value(drv, stream, at, u64::from(value), false, flags)
});

entry!(Kind::Plain, fn cuStreamWriteValue64_v2(stream: u64, at: u64, value: u64, flags: u32) |drv| {
    write_value(drv, stream, at, value, true, flags)
});

entry!(Kind::Plain, fn cuStreamWaitValue32_v2(stream: u64, at: u64, value: u32, flags: u32) |drv| {
    wait_value(drv, stream, at, u64::from(value), false, flags)
});

entry!(Kind::Plain, fn cuStreamWaitValue64_v2(stream: u64, at: u64, value: u64, flags: u32) |drv| {
    wait_value(drv, stream, at, value, true, flags)
});

#[cfg(test)]
mod tests {
    use super::holds;

    #[test]
    fn waits_compare_as_the_driver_does() {
        assert!(holds(5, 5, false, 0) && holds(6, 5, false, 0) && !holds(4, 5, false, 0));
        assert!(holds(2, u64::from(u32::MAX), false, 0), "32 bits wrap");
        assert!(!holds(2, u64::from(u32::MAX), true, 0));
        assert!(holds(5, 5, false, 1) && !holds(6, 5, false, 1));
        assert!(holds(6, 2, false, 2) && !holds(4, 2, false, 2));
        assert!(!holds(u64::from(u32::MAX), 0, false, 3) && holds(u64::from(u32::MAX), 0, true, 3));
    }
}
