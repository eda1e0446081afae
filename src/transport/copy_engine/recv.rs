//! The receiving end: registers memory with the peer, posts receives, and waits for their steps.

use std::collections::HashMap;
use std::sync::atomic::{fence, AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::engine::{Engine, Gpu};
use super::link::Link;
use super::memory::{classify, Exportable};
use super::regions::MAX_REGIONS;
use super::ring::{Drainer, Filled};
use super::shm::Shm;
use super::steps::{reached, side, slot, status, Posting, Shared, DEVICE_CHUNKS, RING};
use super::wire::{Message, Target};
use crate::config;
use crate::cuda::{AllocationHandle, DevicePtr, Driver};
use crate::error::{Error, Result};
use crate::gate::Gate;
use crate::sync::lock;
use crate::telemetry;
use crate::transport::close_deadline;
use crate::transport::{does_not_fit, outside, End, Memory, RecvEnd, Region};

/// Chunks that the CPU copies in one poll: other connections wait meanwhile.
const CPU_CHUNKS_A_POLL: usize = 4;

const NOBODY: u8 = u8::MAX;

#[derive(Clone, Copy, Debug)]
struct Request {
    seq: u32,
    live: bool,
    cancelled: bool,
    len: u64,
    addr: u64,
    memory: Memory,
    /// The registration that it receives into.
    region: u32,
    /// Bytes that came through a ring.
    drained: u64,
    /// Bytes of the message, once its first chunk has said so.
    total: u64,
    staged: bool,
    /// The last chunk's drain, in the GPU's stream.
    last: Option<(bool, u32)>,
}

const NO_REQUEST: Request = Request {
    seq: 0,
    live: false,
    cancelled: false,
    len: 0,
    addr: 0,
    memory: Memory::Host,
    region: 0,
    drained: 0,
    total: 0,
    staged: false,
    last: None,
};

#[derive(Debug)]
struct RecvState {
    next: u32,
    requests: [Request; RING],
    by_slot: [u8; RING],
    host: Drainer,
    device: Drainer,
}

/// A region as the peer was told of it.
#[derive(Debug)]
struct Record {
    memory: Memory,
    len: u64,
    target: Target,
    dropped: bool,
}

#[derive(Default, Debug)]
struct Book {
    regions: HashMap<u32, Record>,
    free: Vec<u32>,
    next: u32,
    close_acknowledged: bool,
    failure: Option<String>,
}

/// Chunks in this end's GPU that the sender maps and fills.
#[derive(Debug)]
struct DeviceRing {
    driver: &'static Driver,
    base: DevicePtr,
    size: u64,
    chunk: u64,
    export: u64,
    _share: Share,
}

/// Bytes of all device rings of the process.
static RINGS: AtomicU64 = AtomicU64::new(0);

/// A share of `VCCL_STAGING_MEMORY`.
#[derive(Debug)]
struct Share(u64);

impl Share {
    fn take(bytes: u64) -> Result<Share> {
        let most = config::current().staging_memory as u64;
        let share = Share(bytes);
        if RINGS.fetch_add(bytes, Ordering::Relaxed) + bytes > most {
            return Err(Error::system(
                format!("chunks of {bytes} bytes are over VCCL_STAGING_MEMORY ({most} bytes)"),
                nix::errno::Errno::ENOSPC,
            ));
        }
        Ok(share)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        RINGS.fetch_sub(self.0, Ordering::Relaxed);
    }
}

impl Drop for DeviceRing {
    fn drop(&mut self) {
        // SAFETY: the connection is closed: the sender has said that it writes no more, or is gone,
        // and our own copies out of the ring are over.
        unsafe {
            self.driver.unmap(self.base, self.size as usize);
            self.driver.free_reservation(self.base, self.size as usize);
        }
    }
}

/// What the link thread and NCCL's threads share of a receiving end.
#[derive(Debug)]
pub struct RecvControl {
    // Dropped before the shared memory that it has page-locked.
    engine: OnceLock<Engine>,
    ring: OnceLock<DeviceRing>,
    /// One thread at a time makes the two above.
    making: Mutex<()>,
    shm: Arc<Shm>,
    link: Arc<Link>,
    conn: u64,
    gate: Gate<RecvState>,
    book: Mutex<Book>,
    changed: Condvar,
    failed: AtomicBool,
    drain_wanted: AtomicBool,
}

/// A connection that waits for accept.
#[derive(Debug)]
pub struct Accepted {
    /// Its receiving end.
    pub control: Arc<RecvControl>,
}

impl RecvControl {
    /// The end of a connection that a peer asked for.
    pub fn new(link: Arc<Link>, conn: u64, shm: Arc<Shm>, first: u32) -> RecvControl {
        RecvControl {
            engine: OnceLock::new(),
            ring: OnceLock::new(),
            making: Mutex::new(()),
            shm,
            link,
            conn,
            gate: Gate::new(RecvState {
                next: first,
                requests: [NO_REQUEST; RING],
                by_slot: [NOBODY; RING],
                host: Drainer::default(),
                device: Drainer::default(),
            }),
            book: Mutex::default(),
            changed: Condvar::new(),
            failed: AtomicBool::new(false),
            drain_wanted: AtomicBool::new(false),
        }
    }

    fn shared(&self) -> &Shared {
        self.shm.shared()
    }

    fn describe(&self) -> String {
        format!("connection {} from {}", self.conn, self.link.peer)
    }

    /// Nobody accepted it.
    pub fn abandon(&self) {
        self.shared()
            .receiver
            .store(side::CLOSED, Ordering::Release);
        self.link.detach_recv(self.conn);
    }

    /// Something that a waiting thread waits for may have happened.
    pub fn wake(&self) {
        let _book = lock(&self.book);
        self.changed.notify_all();
    }

    /// The engine that drains rings into this end's GPU.
    fn ensure_engine(&self, gpu: impl FnOnce() -> Result<Gpu>) -> Result<&Engine> {
        let _making = lock(&self.making);
        if self.engine.get().is_none() {
            let _ = self.engine.set(Engine::new(gpu()?, self.shm.clone())?);
        }
        Ok(self.engine.get().expect("set above"))
    }

    /// The sender wants the host ring drained into the GPU of the registered memory. With no GPU memory
    /// yet, register answers when some comes.
    pub fn want_host_drain(&self) {
        self.drain_wanted.store(true, Ordering::SeqCst);
        let ordinal = lock(&self.book)
            .regions
            .values()
            .find_map(|r| match r.memory {
                Memory::Device(o) => Some(o),
                _ => None,
            });
        if let Some(o) = ordinal {
            self.prepare_host_drain(|| Gpu::of_device(o));
        }
    }

    fn prepare_host_drain(&self, gpu: impl FnOnce() -> Result<Gpu>) {
        let conn = self.conn;
        let answer = match self.ensure_engine(gpu).and_then(Engine::register_ring) {
            Ok(()) => Message::HostDrainReady { conn },
            Err(e) => Message::HostDrainFailed {
                conn,
                text: e.text().to_string(),
            },
        };
        self.link.send(&answer, Vec::new());
    }

    /// The ring in this end's GPU; offers it to the peer when it is made. The caller holds the
    /// exports' lock, and passes what it guards.
    fn ensure_ring(
        &self,
        exports: &mut super::export::Exports,
        ordinal: i32,
    ) -> Result<&DeviceRing> {
        let engine = self.ensure_engine(|| Gpu::of_device(ordinal))?;
        let _making = lock(&self.making);
        if self.ring.get().is_none() {
            let d = engine.gpu.driver;
            let chunk = config::current().staging_chunk as u64;
            let share = Share::take(chunk * DEVICE_CHUNKS as u64)?;
            let (handle, size) = d.create_exportable(ordinal, chunk as usize * DEVICE_CHUNKS)?;
            let base =
                map_own(d, handle, size, ordinal).inspect_err(|_| d.release_allocation(handle))?;
            // From here on dropping them undoes what has been done.
            let e = Exportable::of_handle(d, handle, base, size as u64);
            let mut made = DeviceRing {
                driver: d,
                base,
                size: size as u64,
                chunk,
                export: 0,
                _share: share,
            };
            made.export = exports.offer(&self.link, e, engine.gpu.uuid)?;
            let _ = self.ring.set(made);
        }
        Ok(self.ring.get().expect("set above"))
    }

    /// The peer cannot reach the region in the way that it was offered: offers the next one.
    pub fn region_failed(&self, region: u32, why: &str) {
        let mut exports = lock(&self.link.exports);
        let (memory, len, target) = {
            let book = lock(&self.book);
            match book.regions.get(&region) {
                Some(r) if !r.dropped => (r.memory, r.len, r.target),
                _ => return,
            }
        };
        // Whatever comes of it, that target is over.
        if let Some(r) = lock(&self.book).regions.get_mut(&region) {
            r.target = Target::HostRing;
        }
        if let Target::Mapped { export, .. } = target {
            exports.withdraw(&self.link, export);
        }
        let next = match (target, memory) {
            (Target::HostRing, _) => Err(Error::remote(why)),
            (_, Memory::Device(o)) => {
                telemetry::warn_once(&telemetry::GPU_THROUGH_HOST, || {
                    format!(
                        "{}: the sender cannot map this GPU's memory ({why}): it goes through the \
                         host, over PCIe",
                        self.describe()
                    )
                });
                self.ensure_engine(|| Gpu::of_device(o))
                    .and_then(Engine::register_ring)
            }
            _ => Ok(()),
        };
        let mut book = lock(&self.book);
        match next {
            Ok(()) => {
                if book.regions.contains_key(&region) {
                    let m = Message::Region {
                        conn: self.conn,
                        region,
                        len,
                        target: Target::HostRing,
                    };
                    self.link.send(&m, Vec::new());
                }
            }
            Err(e) => {
                let text = format!("{}: {memory} cannot be received into: {e}", self.describe());
                log::warn!("{text}");
                book.failure = Some(text);
                self.failed.store(true, Ordering::Release);
                self.shared()
                    .receiver
                    .store(side::FAILED, Ordering::Release);
            }
        }
    }

    /// The peer writes to the region no more.
    pub fn region_dropped(&self, region: u32) {
        let mut book = lock(&self.book);
        if book.regions.get(&region).is_some_and(|r| r.dropped) {
            book.regions.remove(&region);
            book.free.push(region);
        }
        self.changed.notify_all();
    }

    /// The peer writes to no region of the connection any more.
    pub fn close_acknowledged(&self) {
        lock(&self.book).close_acknowledged = true;
        self.changed.notify_all();
    }

    /// Whether the sender may still write. A link can die while the process behind it lives.
    fn sender_may_write(&self) -> bool {
        self.shared().sender.load(Ordering::Acquire) != side::CLOSED
            && !(self.link.is_dead() && self.link.process_is_over())
    }

    /// Waits until `over`, or the sender can write no more: `false` when that takes too long.
    /// Not past `latest`: what the caller waited for before counts too.
    fn wait(&self, latest: Instant, over: impl Fn(&Book) -> bool) -> bool {
        let deadline = self.link.peer_deadline().min(latest);
        let mut book = lock(&self.book);
        loop {
            if over(&book) || !self.sender_may_write() {
                return true;
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return false;
            };
            // The sender's close is a word in memory as well as a message: look now and then.
            let nap = left.min(Duration::from_millis(20));
            book = self
                .changed
                .wait_timeout(book, nap)
                .unwrap_or_else(|e| e.into_inner())
                .0;
        }
    }

    #[inline]
    fn trouble(&self) -> Result<()> {
        if self.link.is_dead()
            || self.failed.load(Ordering::Acquire)
            || self.shared().sender.load(Ordering::Acquire) != side::OPEN
        {
            return Err(self.trouble_error());
        }
        Ok(())
    }

    #[cold]
    fn trouble_error(&self) -> Error {
        if let Some(text) = &lock(&self.book).failure {
            return Error::internal(text.clone());
        }
        if self.link.is_dead() {
            return self.link.dead_error().context(self.describe());
        }
        Error::remote(match self.shared().sender.load(Ordering::Acquire) {
            side::FAILED => format!(
                "{}: the sending end failed; see its own messages",
                self.describe()
            ),
            _ => format!(
                "{}: the sending end has closed the connection",
                self.describe()
            ),
        })
    }

    #[cold]
    fn fail(&self, e: Error) -> Error {
        let e = e.context(self.describe());
        lock(&self.book)
            .failure
            .get_or_insert_with(|| e.text().to_string());
        self.failed.store(true, Ordering::Release);
        self.shared()
            .receiver
            .store(side::FAILED, Ordering::Release);
        e
    }

    /// The live request that a filled chunk is for; checks everything that the sender says.
    #[inline]
    fn request_of<'a>(
        &self,
        requests: &'a mut [Request; RING],
        by_slot: &[u8; RING],
        f: &Filled,
        chunk: u64,
    ) -> Result<&'a mut Request> {
        let bad = |what: &str| {
            self.fail(Error::remote(format!(
                "the sender filled a chunk that {what}"
            )))
        };
        let r = match by_slot[slot(f.seq)] {
            NOBODY => return Err(bad("is for no posted receive")),
            i => &mut requests[i as usize],
        };
        if r.seq != f.seq {
            return Err(bad("is for no posted receive"));
        }
        if f.len == 0
            || f.total > r.len
            || f.offset != r.drained
            || f.len as u64 > chunk
            || f.len as u64 > f.total - f.offset
            || (r.staged && r.total != f.total)
        {
            return Err(bad("does not fit its receive"));
        }
        Ok(r)
    }

    /// Takes filled chunks out of the rings; whether there was one.
    #[inline]
    fn progress(&self, st: &mut RecvState) -> Result<bool> {
        let RecvState {
            requests,
            by_slot,
            host,
            device,
            ..
        } = st;
        let shared = self.shared();
        let mut some = false;
        let mut budget = CPU_CHUNKS_A_POLL;
        while let Some(f) = host.filled(&shared.host) {
            if budget == 0 {
                break;
            }
            budget -= 1;
            let r = self.request_of(requests, by_slot, &f, self.shm.host_chunk() as u64)?;
            let chunk = &shared.host[f.chunk];
            let dst = r.addr + f.offset;
            if r.cancelled {
                chunk.drained.store(f.fill, Ordering::Release);
            } else if r.memory.is_host() {
                let src = self
                    .shm
                    .base()
                    .wrapping_add(self.shm.host_chunk_offset(f.chunk));
                // SAFETY: the chunk holds `len` bytes, at most its size, which the sender leaves alone
                // until they are drained; `dst..dst+len` was checked to lie in the receive buffer.
                unsafe { std::ptr::copy_nonoverlapping(src, dst as *mut u8, f.len as usize) };
                chunk.drained.store(f.fill, Ordering::Release);
            } else {
                let (engine, src) = self
                    .engine
                    .get()
                    .and_then(|e| Some((e, e.ring_chunk(f.chunk)?)))
                    .ok_or_else(|| {
                        self.fail(Error::internal("a chunk for GPU memory without a GPU"))
                    })?;
                // SAFETY: as above; the word is in the shared memory.
                unsafe { engine.copy_then_write(dst, src, f.len as usize, &chunk.drained, f.fill) }
                    .map_err(|e| self.fail(e))?;
                r.last = Some((false, f.fill));
            }
            r.drained += f.len as u64;
            r.total = f.total;
            r.staged = true;
            host.advance();
            some = true;
        }
        while let Some(f) = device.filled(&shared.device) {
            let (Some(engine), Some(ring)) = (self.engine.get(), self.ring.get()) else {
                return Err(self.fail(Error::remote(
                    "the sender filled a ring that does not exist",
                )));
            };
            let r = self.request_of(requests, by_slot, &f, ring.chunk)?;
            let chunk = &shared.device[f.chunk];
            if r.cancelled {
                chunk.drained.store(f.fill, Ordering::Release);
            } else if r.memory.is_host() {
                return Err(self.fail(Error::remote(
                    "the sender filled a GPU chunk for host memory",
                )));
            } else {
                fence(Ordering::Acquire);
                let src = ring.base + f.chunk as u64 * ring.chunk;
                // SAFETY: the ring is ours and mapped; the rest as above.
                unsafe {
                    engine.copy_then_write(
                        r.addr + f.offset,
                        src,
                        f.len as usize,
                        &chunk.drained,
                        f.fill,
                    )
                }
                .map_err(|e| self.fail(e))?;
                r.last = Some((true, f.fill));
            }
            r.drained += f.len as u64;
            r.total = f.total;
            r.staged = true;
            device.advance();
            some = true;
        }
        Ok(some)
    }
}

fn map_own(
    d: &'static Driver,
    handle: AllocationHandle,
    size: usize,
    ordinal: i32,
) -> Result<DevicePtr> {
    let base = d.reserve(size)?;
    let r = d
        .map(base, size, handle)
        .and_then(|()| d.allow_access(base, size, ordinal));
    if let Err(e) = r {
        // SAFETY: nothing uses the range; unmapping what is not mapped only fails.
        unsafe {
            d.unmap(base, size);
            d.free_reservation(base, size);
        }
        return Err(e);
    }
    Ok(base)
}

/// The receiving end of a connection over the copy engines.
#[derive(Debug)]
pub struct RecvConnection {
    control: Arc<RecvControl>,
    closed: bool,
}

impl RecvConnection {
    /// The end of a connection that was accepted.
    pub fn new(accepted: Accepted) -> RecvConnection {
        RecvConnection {
            control: accepted.control,
            closed: false,
        }
    }

    fn register_device(&self, addr: u64, len: u64, ordinal: i32, region: u32) -> Result<()> {
        let control = &*self.control;
        let gpu = Gpu::of_device(ordinal)?;
        // The driver answers only for memory that the current context can reach.
        let _entered = gpu.driver.enter(gpu.home)?;
        let found = Exportable::find(addr, len)?;
        // Held until the region is announced: see `Exports::withdraw`.
        let mut exports = lock(&control.link.exports);
        let offered = match found {
            Ok(e) => {
                let offset = addr - e.base;
                exports
                    .offer(&control.link, e, gpu.uuid)
                    .map(|export| Target::Mapped { export, offset })
                    .map_err(|e| e.text().to_string())
            }
            Err(why) => Err(why),
        };
        let target = match offered {
            Ok(target) => target,
            Err(why) => match control.ensure_ring(&mut exports, ordinal) {
                Ok(ring) => {
                    telemetry::warn_once(&telemetry::DEVICE_RING, || {
                        format!(
                            "{}: memory at {addr:#x} cannot be exported ({why}): it is received \
                             through chunks in GPU {ordinal}, and the copy out of them takes SMs. \
                             Allocate it with ncclMemAlloc, cudaMalloc, or cuMemCreate with POSIX \
                             descriptors",
                            control.describe()
                        )
                    });
                    Target::DeviceRing {
                        export: ring.export,
                        chunk: ring.chunk,
                    }
                }
                Err(e) => {
                    telemetry::warn_once(&telemetry::GPU_THROUGH_HOST, || {
                        format!(
                            "{}: memory at {addr:#x} cannot be exported ({why}), nor chunks be made \
                             in GPU {ordinal} ({e}): it is received through the host, over PCIe",
                            control.describe()
                        )
                    });
                    control.ensure_engine(|| Ok(gpu))?.register_ring()?;
                    Target::HostRing
                }
            },
        };
        self.announce(region, len, Memory::Device(ordinal), target);
        drop(exports);
        // After the region is in the book: `want_host_drain` looks there after it has set this.
        if control.drain_wanted.load(Ordering::SeqCst) {
            control.prepare_host_drain(|| Ok(gpu));
        }
        Ok(())
    }

    fn announce(&self, region: u32, len: u64, memory: Memory, target: Target) {
        let control = &*self.control;
        let mut book = lock(&control.book);
        book.regions.insert(
            region,
            Record {
                memory,
                len,
                target,
                dropped: false,
            },
        );
        control.link.send(
            &Message::Region {
                conn: control.conn,
                region,
                len,
                target,
            },
            Vec::new(),
        );
    }
}

impl End for RecvConnection {
    fn register(&self, addr: u64, len: u64, cuda: bool) -> Result<Region> {
        let control = &*self.control;
        let memory = classify(addr, len, cuda)?;
        let id = {
            let mut book = lock(&control.book);
            match book.free.pop() {
                Some(id) => id,
                None if (book.next as usize) < MAX_REGIONS => {
                    book.next += 1;
                    book.next - 1
                }
                None => {
                    return Err(Error::invalid_usage(format!(
                        "{}: {MAX_REGIONS} regions are registered; deregister some",
                        control.describe()
                    )))
                }
            }
        };
        let r = match memory {
            Memory::Device(ordinal) => self.register_device(addr, len, ordinal, id),
            _ => {
                self.announce(id, len, memory, Target::HostRing);
                Ok(())
            }
        };
        match r {
            Ok(()) => Ok(Region {
                addr,
                len,
                memory,
                id,
                keys: None,
            }),
            Err(e) => {
                lock(&control.book).free.push(id);
                Err(e.context(control.describe()))
            }
        }
    }

    fn deregister(&self, region: Region) -> Result<()> {
        let control = &*self.control;
        let deadline = close_deadline();
        if let Some(mut st) = control.gate.enter_by(deadline) {
            let mut cancelled = 0;
            for r in st
                .requests
                .iter_mut()
                .filter(|r| r.live && r.region == region.id)
            {
                r.cancelled = true;
                cancelled += 1;
            }
            if cancelled > 0 {
                control.fail(Error::invalid_usage(format!(
                    "memory was deregistered while {cancelled} receives into it were posted"
                )));
            }
        }
        if let (Some(engine), Memory::Device(_)) = (control.engine.get(), region.memory) {
            if !engine.drain(deadline).unwrap_or(true) {
                log::warn!(
                    "{}: copies into {} are still in flight after {} ms, as its registration ends",
                    control.describe(),
                    region.memory,
                    config::current().close_timeout_ms
                );
            }
        }
        {
            let mut exports = lock(&control.link.exports);
            let mut book = lock(&control.book);
            let Some(record) = book.regions.get_mut(&region.id) else {
                return Ok(());
            };
            record.dropped = true;
            if let Target::Mapped { export, .. } = record.target {
                exports.withdraw(&control.link, export);
            }
            let m = Message::Drop {
                conn: control.conn,
                region: region.id,
            };
            control.link.send(&m, Vec::new());
        }
        if !control.wait(deadline, |book| !book.regions.contains_key(&region.id)) {
            control.link.waited_in_vain();
            log::warn!(
                "{}: the sender has not let go of a region of {} bytes in time (VCCL_CLOSE_TIMEOUT); is it \
                 stopped, or does a copy hang?",
                control.describe(),
                region.len
            );
        }
        Ok(())
    }

    #[inline]
    fn poll(&self, index: usize) -> Result<Option<usize>> {
        let control = &*self.control;
        let Some(mut st) = control.gate.enter()? else {
            return Ok(None);
        };
        let st = &mut *st;
        control.progress(st)?;
        match self.outcome(st, index) {
            Ok(None) => match control.trouble() {
                Ok(()) => Ok(None),
                Err(e) => self.last_words(st, index, e),
            },
            r => self.end(st, index, r),
        }
    }

    fn check(&self) -> Result<()> {
        match self.control.engine.get() {
            Some(e) => e.check().map_err(|e| self.control.fail(e)),
            None => Ok(()),
        }
    }

    fn close(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        let control = &self.control;
        let deadline = close_deadline();
        control
            .shared()
            .receiver
            .store(side::CLOSED, Ordering::Release);
        {
            // Under one lock: what is offered from here on is a new export.
            let mut exports = lock(&control.link.exports);
            let mut book = lock(&control.book);
            control
                .link
                .send(&Message::Close { conn: control.conn }, Vec::new());
            for (_, r) in book.regions.drain() {
                if let (Target::Mapped { export, .. }, false) = (r.target, r.dropped) {
                    exports.withdraw(&control.link, export);
                }
            }
            if let Some(ring) = control.ring.get() {
                exports.withdraw(&control.link, ring.export);
            }
        }
        let mut quiet = control.wait(deadline, |book| book.close_acknowledged);
        if !quiet {
            control.link.waited_in_vain();
            log::warn!(
                "{}: the sender has not let go of the connection in time (VCCL_CLOSE_TIMEOUT); is it \
                 stopped, or does a copy hang?",
                control.describe()
            );
        }
        quiet &= control
            .engine
            .get()
            .is_none_or(|e| e.drain(deadline).unwrap_or(true));
        control.link.detach_recv(control.conn);
        if !quiet {
            // A copy may yet write to our ring, or our stream to the shared memory.
            std::mem::forget(control.clone());
        }
        Ok(())
    }

    fn describe(&self) -> String {
        self.control.describe()
    }
}

impl RecvConnection {
    /// Whether request `index` is over, and how.
    #[inline]
    fn outcome(&self, st: &RecvState, index: usize) -> Result<Option<usize>> {
        let shared = self.control.shared();
        let r = &st.requests[index];
        if r.cancelled {
            return Err(Error::invalid_usage(
                "the memory of a receive was deregistered before it ended",
            ));
        }
        if r.staged {
            let copied = match r.last {
                None => true,
                Some((device, fill)) => {
                    let i = fill.wrapping_sub(1) as usize;
                    let chunk = match device {
                        true => &shared.device[i % shared.device.len()],
                        false => &shared.host[i % shared.host.len()],
                    };
                    reached(chunk.drained.load(Ordering::Acquire), fill)
                }
            };
            return Ok((r.drained == r.total && copied).then_some(r.total as usize));
        }
        if !shared.is_done(r.seq) {
            return Ok(None);
        }
        match shared.outcome(r.seq) {
            (size, status::OK) if size <= r.len => Ok(Some(size as usize)),
            (size, status::TOO_LARGE) => Err(does_not_fit(self.control.describe(), r.len, size)),
            (_, status::NO_WAY) => Err(Error::remote(format!(
                "{}: the sender has no way from its memory to {}; see the warnings on both sides",
                self.control.describe(),
                r.memory
            ))),
            _ => Err(Error::remote(format!(
                "{}: the sender could not use a posted receive",
                self.control.describe()
            ))),
        }
    }

    /// The sender is closed or gone: what it completed before counts, also what waits in a ring.
    #[cold]
    fn last_words(&self, st: &mut RecvState, index: usize, e: Error) -> Result<Option<usize>> {
        let control = &*self.control;
        while control.progress(st)? {}
        let r = &st.requests[index];
        let copying = r.staged && r.drained == r.total && !control.failed.load(Ordering::Acquire);
        match self.outcome(st, index) {
            Ok(None) if copying => Ok(None),
            Ok(None) => self.end(st, index, Err(e)),
            r => self.end(st, index, r),
        }
    }

    #[inline]
    fn end(
        &self,
        st: &mut RecvState,
        index: usize,
        r: Result<Option<usize>>,
    ) -> Result<Option<usize>> {
        if !matches!(r, Ok(None)) {
            let request = &mut st.requests[index];
            request.live = false;
            st.by_slot[slot(request.seq)] = NOBODY;
        }
        r
    }
}

impl RecvEnd for RecvConnection {
    #[inline]
    fn recv(&self, index: usize, addr: u64, len: u64, tag: u32, region: &Region) -> Result<bool> {
        let control = &*self.control;
        if !region.holds(addr, len) {
            return Err(outside(addr, len, region).context(control.describe()));
        }
        let Some(mut st) = control.gate.enter()? else {
            return Ok(false);
        };
        let st = &mut *st;
        control.trouble()?;
        let seq = st.next;
        if st.by_slot[slot(seq)] != NOBODY {
            // The receive that had this slot is not over yet.
            return Ok(false);
        }
        st.by_slot[slot(seq)] = index as u8;
        st.requests[index] = Request {
            seq,
            live: true,
            len,
            addr,
            memory: region.memory,
            region: region.id,
            ..NO_REQUEST
        };
        st.next = seq.wrapping_add(1);
        control.shared().post(
            seq,
            Posting {
                offset: addr - region.addr,
                capacity: len,
                region: region.id,
                tag,
            },
        );
        Ok(true)
    }
}

impl Drop for RecvConnection {
    fn drop(&mut self) {
        let _ = self.close();
    }
}
