//! One connection's use of a GPU: a context, a stream, and the driver's view of the shared memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::shm::{Shm, CONTROL_LEN};
use crate::config::{self, ContextKind};
use crate::cuda::{driver, Context, DevicePtr, Driver, Event, Relaxed, Stream};
use crate::error::{Error, Result, ResultCode};
use crate::telemetry::{self, Stage, Timing};

/// A context of one GPU.
#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    /// The driver.
    pub driver: &'static Driver,
    /// The context in which the copies are issued.
    pub context: Context,
    /// The application's context, for questions about its memory.
    pub home: Context,
    /// The device's ordinal in this process.
    pub ordinal: i32,
    /// The device, whatever the process.
    pub uuid: [u8; 16],
}

fn poisoned<T>(e: std::sync::PoisonError<T>) -> T {
    e.into_inner()
}

/// Contexts by device, each made once and kept for the life of the process: to destroy one while the
/// application exits is not worth its risks.
type Contexts = Mutex<Option<HashMap<i32, Context>>>;

fn kept(all: &Contexts, ordinal: i32, make: impl FnOnce() -> Result<Context>) -> Result<Context> {
    let mut all = all.lock().unwrap_or_else(poisoned);
    let all = all.get_or_insert_with(HashMap::new);
    if let Some(c) = all.get(&ordinal) {
        return Ok(*c);
    }
    let c = make()?;
    all.insert(ordinal, c);
    Ok(c)
}

/// The context of `VCCL_CUDA_CONTEXT=private`.
fn private_context(driver: &Driver, ordinal: i32) -> Result<Context> {
    static CONTEXTS: Contexts = Mutex::new(None);
    kept(&CONTEXTS, ordinal, || driver.create_context(ordinal))
}

/// The application's, for threads in which none is current.
fn primary_context(driver: &Driver, ordinal: i32) -> Result<Context> {
    static CONTEXTS: Contexts = Mutex::new(None);
    kept(&CONTEXTS, ordinal, || driver.primary_context(ordinal))
}

impl Gpu {
    /// The GPU whose context is current in this thread; `None` where there is no driver, or no
    /// context is current.
    pub fn current() -> Result<Option<Gpu>> {
        let Ok(driver) = driver() else {
            return Ok(None);
        };
        match driver.current_context()? {
            None => Ok(None),
            Some((context, ordinal)) => Gpu::with(driver, context, ordinal).map(Some),
        }
    }

    /// The GPU with that ordinal: by the context that is current, if it is that GPU's, else by its
    /// primary context.
    pub fn of_device(ordinal: i32) -> Result<Gpu> {
        let driver = driver().map_err(|e| Error::new(ResultCode::UNHANDLED_CUDA, e))?;
        match driver.current_context()? {
            Some((context, o)) if o == ordinal => Gpu::with(driver, context, ordinal),
            _ => Gpu::with(driver, primary_context(driver, ordinal)?, ordinal),
        }
    }

    /// Whether a copy out of the GPU memory at `addr` is free of the application's context: VMM memory
    /// belongs to the device, cudaMalloc memory to the context. With no context of our own there is
    /// nothing to be free of.
    pub fn reaches_alone(&self, addr: DevicePtr) -> bool {
        self.context == self.home || self.driver.is_vmm(addr)
    }

    fn with(driver: &'static Driver, home: Context, ordinal: i32) -> Result<Gpu> {
        let context = match config::current().cuda_context {
            ContextKind::Primary => home,
            ContextKind::Private => private_context(driver, ordinal).unwrap_or_else(|e| {
                telemetry::warn_once(&telemetry::NO_CONTEXT, || {
                    format!(
                        "no context of our own on GPU {ordinal} ({e}): copies are issued in the \
                         application's, where calls of its that wait for kernels (cudaFree, loading a \
                         module) hold them up, and can hang the job"
                    )
                });
                home
            }),
        };
        Ok(Gpu {
            driver,
            context,
            home,
            ordinal,
            uuid: driver.device_uuid(ordinal)?,
        })
    }
}

/// A stream that connections share once there are `VCCL_STREAMS` of them in its context.
#[derive(Debug)]
struct PooledStream {
    gpu: Gpu,
    stream: Stream,
}

impl Drop for PooledStream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.driver.enter(self.gpu.context) {
            self.gpu.driver.destroy_stream(self.stream);
        }
    }
}

type Pools = HashMap<Context, Vec<std::sync::Weak<PooledStream>>>;

fn take_stream(gpu: &Gpu, most: usize) -> Result<Arc<PooledStream>> {
    static POOLS: Mutex<Option<Pools>> = Mutex::new(None);
    let mut pools = POOLS.lock().unwrap_or_else(poisoned);
    let pool = pools
        .get_or_insert_with(HashMap::new)
        .entry(gpu.context)
        .or_default();
    pool.retain(|w| w.strong_count() > 0);
    if pool.len() >= most {
        let least = pool
            .iter()
            .min_by_key(|w| w.strong_count())
            .and_then(|w| w.upgrade());
        if let Some(s) = least {
            return Ok(s);
        }
    }
    let _entered = gpu.driver.enter(gpu.context)?;
    let stream = Arc::new(PooledStream {
        gpu: *gpu,
        stream: gpu.driver.create_stream()?,
    });
    pool.push(Arc::downgrade(&stream));
    Ok(stream)
}

/// A range of the shared memory that the driver knows.
#[derive(Debug)]
struct Registered {
    gpu: Gpu,
    host: *mut u8,
    device: DevicePtr,
    /// Keeps the mapping until the driver has forgotten it.
    shm: Arc<Shm>,
    /// Set when copies may use the memory for ever.
    abandoned: AtomicBool,
}

// SAFETY: an address that this value owns the registration of; it is not read through.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    fn new(gpu: &Gpu, shm: &Arc<Shm>, offset: usize, len: usize) -> Result<Registered> {
        let _entered = gpu.driver.enter(gpu.context)?;
        debug_assert!(offset + len <= shm.bytes());
        let host = shm.base().wrapping_add(offset);
        // SAFETY: the range lies in the mapping, which `shm` keeps until after `drop`.
        let device = unsafe { gpu.driver.register_host(host, len) }
            .map_err(|e| e.context("page-locking a connection's shared memory"))?;
        Ok(Registered {
            gpu: *gpu,
            host,
            device,
            shm: shm.clone(),
            abandoned: AtomicBool::new(false),
        })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if *self.abandoned.get_mut() {
            std::mem::forget(self.shm.clone());
        } else if let Ok(_entered) = self.gpu.driver.enter(self.gpu.context) {
            // SAFETY: registered by `new`; an engine drops it only when its copies are over.
            unsafe { self.gpu.driver.unregister_host(self.host) };
        }
    }
}

/// One end's engine.
#[derive(Debug)]
pub struct Engine {
    /// Whose copies these are.
    pub gpu: Gpu,
    stream: Arc<PooledStream>,
    control: Registered,
    ring: OnceLock<Registered>,
    ring_lock: Mutex<()>,
    shm: Arc<Shm>,
    fence_event: FenceEvent,
}

/// The event behind the latest fence.
#[derive(Debug)]
struct FenceEvent {
    gpu: Gpu,
    event: Event,
}

impl Drop for FenceEvent {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.driver.enter(self.gpu.context) {
            self.gpu.driver.destroy_event(self.event);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Mostly a look: who closes a connection has waited.
        let deadline = Instant::now() + Duration::from_millis(200);
        if !self.drain(deadline).unwrap_or(true) {
            for r in [Some(&self.control), self.ring.get()].into_iter().flatten() {
                r.abandoned.store(true, Ordering::Relaxed);
            }
        }
    }
}

impl Engine {
    /// Makes everything that the data path needs: stream, and the driver's view of the control part.
    pub fn new(gpu: Gpu, shm: Arc<Shm>) -> Result<Engine> {
        let stream = take_stream(&gpu, config::current().streams)?;
        let control = Registered::new(&gpu, &shm, 0, CONTROL_LEN)?;
        let event = {
            let _entered = gpu.driver.enter(gpu.context)?;
            gpu.driver.create_event()?
        };
        let engine = Engine {
            fence_event: FenceEvent { gpu, event },
            gpu,
            stream,
            control,
            ring: OnceLock::new(),
            ring_lock: Mutex::new(()),
            shm,
        };
        // No attribute says whether streams can write values; a write does.
        let probe = engine.word(&engine.shm.shared().probe);
        let _entered = gpu.driver.enter(gpu.context)?;
        // SAFETY: the word lies in the registered control part, and nobody reads it.
        unsafe { gpu.driver.write_value(probe, 1, engine.stream.stream) }.map_err(|e| {
            e.context(format!(
                "GPU {}: the step counters need streams that write values to memory",
                gpu.ordinal
            ))
        })?;
        Ok(engine)
    }

    /// Lets copies reach the host ring. Not for the data path.
    pub fn register_ring(&self) -> Result<()> {
        let _one_at_a_time = self.ring_lock.lock().unwrap_or_else(poisoned);
        if self.ring.get().is_none() {
            let r = Registered::new(
                &self.gpu,
                &self.shm,
                CONTROL_LEN,
                self.shm.bytes() - CONTROL_LEN,
            )?;
            let _ = self.ring.set(r);
        }
        Ok(())
    }

    /// The GPUs' address of chunk `i` of the host ring, once it is registered.
    #[inline]
    pub fn ring_chunk(&self, i: usize) -> Option<DevicePtr> {
        let r = self.ring.get()?;
        Some(r.device + (self.shm.host_chunk_offset(i) - CONTROL_LEN) as u64)
    }

    /// The GPUs' address of a word of the control part.
    #[inline]
    fn word(&self, w: &AtomicU32) -> DevicePtr {
        let offset = (&raw const *w as usize).wrapping_sub(self.shm.base() as usize);
        debug_assert!(offset + 4 <= CONTROL_LEN);
        self.control.device + offset as u64
    }

    /// Enqueues one copy, and behind it the write of `value` to `word`.
    ///
    /// # Safety
    /// Both ranges are valid for the copy until `word` has the value; `word` is in the connection's
    /// shared memory.
    #[inline]
    pub unsafe fn copy_then_write(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        len: usize,
        word: &AtomicU32,
        value: u32,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.push(dst, src, len, word, value, None) }.map(|_| ())
    }

    /// The same; with `timing`, measures the calls and says when they were over.
    ///
    /// # Safety
    /// As for [`Engine::copy_then_write`].
    #[inline]
    pub unsafe fn push(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        len: usize,
        word: &AtomicU32,
        value: u32,
        timing: Option<&Timing>,
    ) -> Result<Option<Instant>> {
        let lap = |since: Option<Instant>, stage: fn(&Timing) -> &Stage| {
            timing.zip(since).map(|(t, since)| {
                stage(t).since(since);
                Instant::now()
            })
        };
        let d = self.gpu.driver;
        let begun = timing.map(|_| Instant::now());
        let entered = d.enter(self.gpu.context)?;
        let begun = lap(begun, |t| &t.context);
        // SAFETY: the caller's promise.
        unsafe { d.copy_async(dst, src, len, self.stream.stream)? };
        let begun = lap(begun, |t| &t.copy);
        // SAFETY: the word lies in the registered control part, which the engine keeps.
        unsafe { d.write_value(self.word(word), value, self.stream.stream)? };
        drop(entered);
        Ok(lap(begun, |t| &t.step))
    }

    /// Puts a fence behind all copies so far, for [`Engine::passed`]. A later fence takes its place, which
    /// only makes the wait longer.
    pub fn fence(&self) -> Result<()> {
        let d = self.gpu.driver;
        let _entered = d.enter(self.gpu.context)?;
        // An event and not a word in shared memory: the word is seen a moment before the stream is done
        // with writing it, and the peer can write it too.
        d.record_event(self.fence_event.event, self.stream.stream)
    }

    /// Whether the stream has passed the latest fence; an error says that a copy failed.
    pub fn passed(&self) -> Result<bool> {
        let _entered = self.gpu.driver.enter(self.gpu.context)?;
        self.gpu.driver.event_passed(self.fence_event.event)
    }

    /// Waits until all copies so far are over: `false` when they are not by `deadline`.
    pub fn drain(&self, deadline: Instant) -> Result<bool> {
        self.fence()?;
        loop {
            if self.passed()? {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Whether a copy failed.
    pub fn check(&self) -> Result<()> {
        let _relaxed = Relaxed::begin();
        let _entered = self.gpu.driver.enter(self.gpu.context)?;
        self.gpu.driver.stream_idle(self.stream.stream).map(|_| ())
    }
}
