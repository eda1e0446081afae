//! The sending end: takes posted receives, and pushes straight into the receiver's memory.

use std::collections::HashMap;
use std::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use super::engine::{Engine, Gpu};
use super::link::{Link, Step};
use super::memory::classify;
use super::regions::{Reach, Regions};
use super::ring::Filler;
use super::shm::Shm;
use super::steps::{reached, side, slot, status, Chunk, Claims, Shared, DEVICE_CHUNKS, RING};
use super::wire::{Message, Target};
use crate::config;
use crate::error::{Error, Result};
use crate::gate::Gate;
use crate::sync::lock;
use crate::telemetry::{self, Path};
use crate::transport::close_deadline;
use crate::transport::{outside, End, Memory, Region, SendEnd};

/// Chunks that the CPU copies in one poll: other connections wait meanwhile.
const CPU_CHUNKS_A_POLL: usize = 4;

/// Where a connection stands before it can be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Phase {
    /// The receiving process has not answered.
    Asked,
    /// It waits in the listener's queue, or was accepted.
    Connected,
    /// There will be no connection; why.
    Refused(String),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Nothing to wait for.
    Over,
    /// A push is in the stream; its step is written behind it.
    Pushed,
    /// In the queue of a ring, or all in it: until the last chunk is filled.
    Staged { device: bool },
    /// Its memory was deregistered.
    Cancelled,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    state: State,
    seq: u32,
    len: u64,
    addr: u64,
    memory: Memory,
    /// Number of the registration that it sends out of.
    region: u32,
    filled: u64,
    last_fill: u32,
    /// When the copy had been enqueued, if stages are measured.
    enqueued: Option<Instant>,
}

const NO_REQUEST: Request = Request {
    state: State::Over,
    seq: 0,
    len: 0,
    addr: 0,
    memory: Memory::Host,
    region: 0,
    filled: 0,
    last_fill: 0,
    enqueued: None,
};

/// Requests in the order in which they go through a ring.
#[derive(Debug)]
struct Queue {
    items: [u8; RING],
    head: usize,
    len: usize,
}

impl Queue {
    const EMPTY: Queue = Queue {
        items: [0; RING],
        head: 0,
        len: 0,
    };

    fn push(&mut self, index: usize) {
        debug_assert!(self.len < RING);
        self.items[(self.head + self.len) % RING] = index as u8;
        self.len += 1;
    }

    fn front(&self) -> Option<usize> {
        (self.len > 0).then(|| self.items[self.head] as usize)
    }

    fn pop(&mut self) {
        self.head = (self.head + 1) % RING;
        self.len -= 1;
    }
}

#[derive(Debug)]
struct SendState {
    claims: Claims,
    requests: [Request; RING],
    host: Filler,
    host_queue: Queue,
    device: Filler,
    device_queue: Queue,
    /// When isend first found no receive, if stages are measured.
    waiting: Option<Instant>,
}

/// Whether the receiver drains the host ring into its GPU.
mod host_drain {
    pub const NOT_ASKED: u32 = 0;
    pub const ASKED: u32 = 1;
    pub const READY: u32 = 2;
    pub const FAILED: u32 = 3;
}

/// What the link thread and NCCL's threads share of a sending end.
#[derive(Debug)]
pub struct SendControl {
    // Dropped before the shared memory that it has page-locked.
    engine: OnceLock<Engine>,
    shm: Arc<Shm>,
    link: Arc<Link>,
    conn: u64,
    gate: Gate<SendState>,
    regions: Regions,
    /// The exports behind mapped regions. Who takes an entry out leaves the export.
    exports: Mutex<HashMap<u32, u64>>,
    /// The ring in the receiver's GPU: its export, and for the data path where it is.
    ring_export: Mutex<Option<u64>>,
    ring_base: AtomicU64,
    ring_chunk: AtomicU64,
    host_ring_used: AtomicBool,
    host_drain: AtomicU32,
    failed: AtomicBool,
    /// One thread at a time makes the engine.
    making: Mutex<()>,
    phase: Mutex<Phase>,
}

impl SendControl {
    /// A connection that has yet to be asked for.
    pub fn new(shm: Arc<Shm>, link: Arc<Link>, conn: u64, first: u32) -> Result<Arc<SendControl>> {
        shm.shared().start(first);
        let control = Arc::new(SendControl {
            engine: OnceLock::new(),
            shm,
            link,
            conn,
            gate: Gate::new(SendState {
                claims: Claims::new(first),
                requests: [NO_REQUEST; RING],
                host: Filler::default(),
                host_queue: Queue::EMPTY,
                device: Filler::default(),
                device_queue: Queue::EMPTY,
                waiting: None,
            }),
            regions: Regions::default(),
            exports: Mutex::default(),
            ring_export: Mutex::new(None),
            ring_base: AtomicU64::new(0),
            ring_chunk: AtomicU64::new(0),
            host_ring_used: AtomicBool::new(false),
            host_drain: AtomicU32::new(host_drain::NOT_ASKED),
            failed: AtomicBool::new(false),
            making: Mutex::new(()),
            phase: Mutex::new(Phase::Asked),
        });
        if let Some(gpu) = Gpu::current()? {
            control.ensure_engine(gpu)?;
        }
        Ok(control)
    }

    fn shared(&self) -> &Shared {
        self.shm.shared()
    }

    fn ensure_engine(&self, gpu: Gpu) -> Result<&Engine> {
        let _one_at_a_time = lock(&self.making);
        if self.engine.get().is_none() {
            let _ = self.engine.set(Engine::new(gpu, self.shm.clone())?);
        }
        let engine = self.engine.get().expect("set above");
        if self.host_ring_used.load(Ordering::SeqCst) {
            engine.register_ring()?;
        }
        Ok(engine)
    }

    /// The receiving process took the connection.
    pub fn connected(&self) {
        *lock(&self.phase) = Phase::Connected;
    }

    /// The receiving process refused it.
    pub fn refused(&self, why: String) {
        *lock(&self.phase) = Phase::Refused(why);
    }

    /// Where the connection stands.
    pub fn phase(&self) -> Phase {
        let phase = lock(&self.phase).clone();
        if phase == Phase::Asked && self.link.is_dead() {
            return Phase::Refused(self.link.dead_error().text().to_string());
        }
        phase
    }

    /// The receiver drains the host ring into its GPU, or says why it cannot.
    pub fn host_drain(&self, r: std::result::Result<(), String>) {
        let state = match r {
            Ok(()) => host_drain::READY,
            Err(why) => {
                log::warn!(
                    "{}: host memory that CUDA has not page-locked cannot be sent to the peer's \
                     GPU: {why}",
                    self.describe()
                );
                host_drain::FAILED
            }
        };
        self.host_drain.store(state, Ordering::Release);
    }

    /// The receiver registered memory: maps it where that is the way, and answers. An error is a
    /// breach of the protocol.
    pub fn region_offered(&self, region: u32, len: u64, target: Target) -> Result<Message> {
        let conn = self.conn;
        let failed = |text: &str| Message::RegionFailed {
            conn,
            region,
            text: text.to_string(),
        };
        let no_engine = "the sending process has no CUDA context on this connection";
        let reach = match target {
            Target::Mapped { export, offset } => {
                let Some(engine) = self.engine.get() else {
                    return Ok(failed(no_engine));
                };
                let mut imports = lock(&self.link.imports);
                let r = match imports.reach(export, &engine.gpu, self.link.same_process) {
                    Ok(r) => r,
                    Err(e) => {
                        return Ok(failed(e.text()));
                    }
                };
                if offset.checked_add(len).is_none_or(|end| end > r.len) {
                    imports.leave(export);
                    return Err(Error::remote(
                        "the peer's region does not lie in its allocation",
                    ));
                }
                if r.same_gpu {
                    telemetry::warn_once(&telemetry::SAME_GPU, || {
                        format!(
                            "{}: both ranks use GPU {}: copies within one GPU wait for its SMs",
                            self.describe(),
                            engine.gpu.ordinal
                        )
                    });
                }
                lock(&self.exports).insert(region, export);
                Reach::Mapped(r.addr + offset, len)
            }
            Target::HostRing => {
                self.host_ring_used.store(true, Ordering::SeqCst);
                if let Some(engine) = self.engine.get() {
                    if let Err(e) = engine.register_ring() {
                        return Ok(failed(e.text()));
                    }
                }
                Reach::HostRing(len)
            }
            Target::DeviceRing { export, chunk } => {
                let Some(engine) = self.engine.get() else {
                    return Ok(failed(no_engine));
                };
                let mut imports = lock(&self.link.imports);
                let mut ring = lock(&self.ring_export);
                if ring.is_none() {
                    let r = match imports.reach(export, &engine.gpu, self.link.same_process) {
                        Ok(r) => r,
                        Err(e) => {
                            return Ok(failed(e.text()));
                        }
                    };
                    if chunk == 0
                        || chunk
                            .checked_mul(DEVICE_CHUNKS as u64)
                            .is_none_or(|n| n > r.len)
                        || chunk > u32::MAX as u64
                    {
                        imports.leave(export);
                        return Err(Error::remote(
                            "the peer's staging ring has an impossible size",
                        ));
                    }
                    self.ring_chunk.store(chunk, Ordering::Relaxed);
                    self.ring_base.store(r.addr, Ordering::SeqCst);
                    *ring = Some(export);
                }
                Reach::DeviceRing(len)
            }
        };
        if !self.regions.insert(region, reach) {
            return Err(Error::remote("the peer registered one region twice"));
        }
        telemetry::region(reach_path(reach));
        log::info!(
            "{}: region {region}, {len} bytes: {}",
            self.describe(),
            reach_path(reach)
        );
        Ok(Message::RegionReady { conn, region })
    }

    /// Takes a region out of use, or everything: whoever enters the gate from now on finds none of it.
    /// The exports behind it are the caller's to leave.
    fn retire(&self, region: Option<u32>) -> Vec<u64> {
        let mut exports = lock(&self.exports);
        match region {
            Some(r) => {
                self.regions.remove(r);
                exports.remove(&r).into_iter().collect()
            }
            None => {
                self.regions.clear();
                self.ring_base.store(0, Ordering::SeqCst);
                let ring = lock(&self.ring_export).take();
                exports
                    .drain()
                    .map(|(_, export)| export)
                    .chain(ring)
                    .collect()
            }
        }
    }

    /// The link is dead: nothing is to be written to the peer any more.
    pub fn stop(&self) {
        self.regions.clear();
    }

    /// Nobody wants the connection that was asked for.
    pub fn give_up(&self) {
        self.shared().sender.store(side::FAILED, Ordering::Release);
        self.link
            .send(&Message::Close { conn: self.conn }, Vec::new());
        self.link.detach_send(self.conn);
    }

    fn leave(&self, exports: &[u64], quiet: bool) {
        let mut imports = lock(&self.link.imports);
        for export in exports {
            if quiet {
                imports.leave(*export);
            } else {
                imports.abandon(*export);
            }
        }
    }

    /// Takes a region, or all, out of use: a step for the link thread, which is over when no copy
    /// of ours touches it any more and it is unmapped.
    pub fn quiesce(self: &Arc<Self>, region: Option<u32>) -> Step {
        let exports = self.retire(region);
        let control = self.clone();
        let mut fenced = false;
        // A copy that never ends keeps what it uses mapped.
        let give_up = Instant::now() + std::time::Duration::from_secs(30);
        Box::new(move || {
            let late = Instant::now() >= give_up;
            let over = match control.engine.get() {
                None => !control.gate.is_busy(),
                Some(engine) if fenced => engine.passed().unwrap_or(true),
                Some(_) if control.gate.is_busy() => false,
                Some(engine) => {
                    fenced = true;
                    // Without a context there are no copies either.
                    engine.fence().is_err()
                }
            };
            if over || late {
                control.leave(&exports, over);
            }
            over || late
        })
    }

    /// Asks the receiver to drain the host ring into its GPU, if that has not been done.
    #[cold]
    fn ask_host_drain(&self) {
        let (old, new) = (host_drain::NOT_ASKED, host_drain::ASKED);
        let asked = self
            .host_drain
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        if asked.is_ok() {
            self.link
                .send(&Message::WantHostDrain { conn: self.conn }, Vec::new());
        }
    }

    /// The error for what cannot go on, if that is so.
    #[inline]
    fn trouble(&self) -> Result<()> {
        if self.link.is_dead()
            || self.failed.load(Ordering::Relaxed)
            || self.shared().receiver.load(Ordering::Acquire) != side::OPEN
        {
            return Err(self.trouble_error());
        }
        Ok(())
    }

    #[cold]
    fn trouble_error(&self) -> Error {
        if self.link.is_dead() {
            return self.link.dead_error().context(self.describe());
        }
        if self.failed.load(Ordering::Relaxed) {
            return Error::internal(format!(
                "{}: a copy failed before on this connection",
                self.describe()
            ));
        }
        Error::remote(match self.shared().receiver.load(Ordering::Acquire) {
            side::FAILED => format!(
                "{}: the receiving end failed; see its own messages",
                self.describe()
            ),
            _ => format!(
                "{}: the receiving end has closed the connection",
                self.describe()
            ),
        })
    }

    #[cold]
    fn fail(&self, e: Error) -> Error {
        self.failed.store(true, Ordering::Relaxed);
        self.shared().sender.store(side::FAILED, Ordering::Release);
        e.context(self.describe())
    }

    fn describe(&self) -> String {
        format!("connection {} to {}", self.conn, self.link.peer)
    }

    /// Moves what is in the rings' queues forward.
    #[inline]
    fn progress(&self, st: &mut SendState) -> Result<()> {
        let SendState {
            requests,
            host,
            host_queue,
            device,
            device_queue,
            ..
        } = st;
        let shared = self.shared();
        let mut budget = CPU_CHUNKS_A_POLL;
        while let Some(index) = host_queue.front() {
            let r = &mut requests[index];
            if r.state == State::Cancelled {
                host_queue.pop();
                continue;
            }
            let by_cpu = r.memory.is_host();
            if by_cpu && budget == 0 {
                break;
            }
            let Some((fill, i)) = host.free(&shared.host) else {
                break;
            };
            let n = (r.len - r.filled).min(self.shm.host_chunk() as u64);
            let chunk = &shared.host[i];
            host.fill(chunk, r.seq, n as u32, r.filled, r.len);
            let src = r.addr + r.filled;
            if by_cpu {
                budget -= 1;
                let dst = self.shm.base().wrapping_add(self.shm.host_chunk_offset(i));
                // SAFETY: `src` lies in a region that NCCL keeps while the request lives; the chunk
                // has `host_chunk` bytes, at least `n`, and is ours until `filled` says otherwise.
                unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst, n as usize) };
                chunk.filled.store(fill, Ordering::Release);
            } else {
                let (engine, dst) = self
                    .engine
                    .get()
                    .and_then(|e| Some((e, e.ring_chunk(i)?)))
                    .ok_or_else(|| {
                        self.fail(Error::internal("GPU memory is sent without a GPU"))
                    })?;
                fence(Ordering::Release);
                // SAFETY: the source as above; the chunk is ours until `filled`, which lies in the
                // shared memory, says otherwise.
                unsafe { engine.copy_then_write(dst, src, n as usize, &chunk.filled, fill) }
                    .map_err(|e| self.fail(e))?;
            }
            r.filled += n;
            r.last_fill = fill;
            if r.filled == r.len {
                host_queue.pop();
            }
        }
        while let Some(index) = device_queue.front() {
            let r = &mut requests[index];
            if r.state == State::Cancelled {
                device_queue.pop();
                continue;
            }
            let Some((fill, i)) = device.free(&shared.device) else {
                break;
            };
            // SeqCst: see `retire`, which makes it 0 before the ring is unmapped.
            let ring = self.ring_base.load(Ordering::SeqCst);
            if ring == 0 {
                return Err(self.trouble_error());
            }
            let size = self.ring_chunk.load(Ordering::Relaxed);
            let n = (r.len - r.filled).min(size);
            let chunk = &shared.device[i];
            device.fill(chunk, r.seq, n as u32, r.filled, r.len);
            let engine = self
                .engine
                .get()
                .ok_or_else(|| self.fail(Error::internal("GPU memory is sent without a GPU")))?;
            let dst = ring + i as u64 * size;
            fence(Ordering::Release);
            // SAFETY: the source lies in a region that NCCL keeps while the request lives; the chunk is
            // mapped and ours until `filled`, which lies in the shared memory, says otherwise.
            unsafe {
                engine.copy_then_write(dst, r.addr + r.filled, n as usize, &chunk.filled, fill)
            }
            .map_err(|e| self.fail(e))?;
            r.filled += n;
            r.last_fill = fill;
            if r.filled == r.len {
                device_queue.pop();
            }
        }
        Ok(())
    }
}

impl SendControl {
    /// The request, if it is over.
    #[inline]
    fn ended<'a>(&self, st: &'a SendState, index: usize) -> Result<Option<&'a Request>> {
        let shared = self.shared();
        let r = &st.requests[index];
        let over = match r.state {
            State::Over => true,
            State::Pushed => shared.is_done(r.seq),
            State::Staged { device } => {
                r.filled == r.len && {
                    let chunks: &[Chunk] = if device { &shared.device } else { &shared.host };
                    let filled = &last_chunk(chunks, r.last_fill).filled;
                    reached(filled.load(Ordering::Acquire), r.last_fill)
                }
            }
            State::Cancelled => {
                return Err(Error::invalid_usage(
                    "the memory of a send was deregistered before it ended",
                ))
            }
        };
        Ok(over.then_some(r))
    }
}

impl Drop for SendControl {
    fn drop(&mut self) {
        // For a connection that came about only half: `close` leaves nothing here.
        let exports = self.retire(None);
        self.leave(&exports, true);
    }
}

fn reach_path(r: Reach) -> Path {
    match r {
        Reach::Mapped(..) => Path::Push,
        Reach::HostRing(_) => Path::HostRing,
        Reach::DeviceRing(_) => Path::DeviceRing,
    }
}

/// The sending end of a connection over the copy engines.
#[derive(Debug)]
pub struct SendConnection {
    control: Arc<SendControl>,
    counters: telemetry::Connection,
    next_region: AtomicU32,
    closed: bool,
}

impl SendConnection {
    /// The end of a connection that the peer has taken.
    pub fn new(control: Arc<SendControl>) -> SendConnection {
        SendConnection {
            control,
            counters: telemetry::Connection::new(config::current().timing),
            next_region: AtomicU32::new(1),
            closed: false,
        }
    }

    /// Stages a message through a ring.
    #[inline]
    fn stage(
        &self,
        st: &mut SendState,
        index: usize,
        device: bool,
        seq: u32,
        r: Request,
    ) -> Result<bool> {
        st.claims.take(seq);
        self.control.shared().set_not_done(seq);
        st.requests[index] = Request {
            state: State::Staged { device },
            ..r
        };
        if device {
            &mut st.device_queue
        } else {
            &mut st.host_queue
        }
        .push(index);
        self.counters.count(
            if device {
                Path::DeviceRing
            } else {
                Path::HostRing
            },
            r.len,
        );
        self.control.progress(st)?;
        Ok(true)
    }

    /// Host memory that no GPU can read waits until the receiver drains the host ring into its own.
    #[cold]
    fn wait_for_drain(&self) -> Result<bool> {
        self.control.ask_host_drain();
        self.control.trouble().map(|()| false)
    }

    #[cold]
    fn refuse(&self, st: &mut SendState, seq: u32, len: u64, why: u32, e: Error) -> Error {
        let shared = self.control.shared();
        shared.set_outcome(seq, len, why);
        st.claims.take(seq);
        shared.set_done(seq);
        e.context(self.control.describe())
    }
}

impl SendEnd for SendConnection {
    #[inline]
    fn send(&self, index: usize, addr: u64, len: u64, tag: u32, region: &Region) -> Result<bool> {
        let control = &*self.control;
        if !region.holds(addr, len) {
            return Err(outside(addr, len, region).context(control.describe()));
        }
        let Some(mut st) = control.gate.enter()? else {
            return Ok(false);
        };
        let st = &mut *st;
        let shared = control.shared();
        let timing = self.counters.timing.as_deref();
        let Some((seq, p)) = st.claims.find(shared, tag) else {
            if timing.is_some() {
                st.waiting.get_or_insert_with(Instant::now);
            }
            return control.trouble().map(|()| false);
        };
        control.trouble()?;
        if len > p.capacity {
            let e = Error::invalid_usage(format!(
                "a send of {len} bytes (tag {tag}) meets a receive of {} bytes: nothing was written; \
                 both sides must agree on the size",
                p.capacity
            ));
            return Err(self.refuse(st, seq, len, status::TOO_LARGE, e));
        }
        let request = Request {
            state: State::Over,
            seq,
            len,
            addr,
            memory: region.memory,
            region: region.id,
            filled: 0,
            last_fill: 0,
            enqueued: None,
        };
        if len == 0 {
            st.claims.take(seq);
            shared.set_outcome(seq, 0, status::OK);
            shared.set_done(seq);
            st.requests[index] = request;
            return Ok(true);
        }
        let drained = || control.host_drain.load(Ordering::Acquire);
        match control.regions.get(p.region) {
            Some(Reach::Mapped(base, bytes)) => {
                if p.offset
                    .checked_add(p.capacity)
                    .is_none_or(|end| end > bytes)
                {
                    let e = Error::remote("a posted receive does not lie in its region");
                    return Err(self.refuse(st, seq, len, status::BAD_DESCRIPTOR, e));
                }
                if region.memory == Memory::Host {
                    return match drained() {
                        host_drain::READY => self.stage(st, index, false, seq, request),
                        host_drain::FAILED => {
                            Err(self.refuse(st, seq, len, status::NO_WAY, no_drain()))
                        }
                        _ => self.wait_for_drain(),
                    };
                }
                let Some(engine) = control.engine.get() else {
                    return Err(control.fail(Error::internal("a mapped region without a GPU")));
                };
                if let Some(t) = timing {
                    t.descriptor
                        .since(st.waiting.take().unwrap_or_else(Instant::now));
                }
                shared.set_outcome(seq, len, status::OK);
                st.claims.take(seq);
                fence(Ordering::Release);
                // SAFETY: the source lies in a region that NCCL keeps while the request lives. The
                // destination lies in a region that was checked to hold it and that the link thread
                // keeps mapped: it saw the gate busy, or its removal would have been seen by `get`.
                // The word is in the shared memory.
                let enqueued = unsafe {
                    engine.push(
                        base + p.offset,
                        addr,
                        len as usize,
                        &shared.done[slot(seq)],
                        seq,
                        timing,
                    )
                }
                .map_err(|e| control.fail(e))?;
                st.requests[index] = Request {
                    state: State::Pushed,
                    enqueued,
                    ..request
                };
                self.counters.count(Path::Push, len);
                Ok(true)
            }
            Some(Reach::HostRing(_)) => self.stage(st, index, false, seq, request),
            Some(Reach::DeviceRing(_)) => match (region.memory, drained()) {
                (Memory::Host, host_drain::READY) => self.stage(st, index, false, seq, request),
                (Memory::Host, host_drain::FAILED) => {
                    Err(self.refuse(st, seq, len, status::NO_WAY, no_drain()))
                }
                (Memory::Host, _) => self.wait_for_drain(),
                _ => self.stage(st, index, true, seq, request),
            },
            None => control.trouble().map(|()| false),
        }
    }
}

#[cold]
fn no_drain() -> Error {
    Error::invalid_usage(
        "host memory that CUDA has not page-locked cannot reach the peer's GPU; see the warning before",
    )
}

fn last_chunk(chunks: &[Chunk], fill: u32) -> &Chunk {
    &chunks[fill.wrapping_sub(1) as usize % chunks.len()]
}

impl End for SendConnection {
    fn register(&self, addr: u64, len: u64, cuda: bool) -> Result<Region> {
        let control = &*self.control;
        let memory = classify(addr, len, cuda)?;
        if let Memory::Device(ordinal) = memory {
            let engine = match control.engine.get() {
                Some(engine) => engine,
                None => control.ensure_engine(Gpu::of_device(ordinal)?)?,
            };
            if !engine.gpu.reaches_alone(addr) {
                telemetry::warn_once(&telemetry::APPLICATION_MEMORY, || {
                    format!(
                        "{}: sends out of cudaMalloc memory (at {addr:#x}) need the application's CUDA \
                         context: while it waits for a kernel there (cudaFree, a graph replayed again \
                         before it has ended) they wait too, and can hang the job. Register memory of \
                         ncclMemAlloc, or of expandable segments",
                        control.describe()
                    )
                });
            }
        }
        if memory == Memory::Host && control.engine.get().is_some() {
            control.ask_host_drain();
        }
        Ok(Region {
            addr,
            len,
            memory,
            id: self.next_region.fetch_add(1, Ordering::Relaxed),
            keys: None,
        })
    }

    fn deregister(&self, region: Region) -> Result<()> {
        let control = &*self.control;
        let deadline = close_deadline();
        if let Some(mut st) = control.gate.enter_by(deadline) {
            for r in &mut st.requests {
                if matches!(r.state, State::Staged { .. })
                    && r.filled < r.len
                    && r.region == region.id
                {
                    r.state = State::Cancelled;
                    control.fail(Error::internal("cancelled"));
                }
            }
        }
        if let (Some(engine), true) = (control.engine.get(), region.memory != Memory::Host) {
            if !engine.drain(deadline).unwrap_or(true) {
                log::warn!(
                    "{}: copies out of {} are still in flight after {} ms, as its registration ends",
                    control.describe(),
                    region.memory,
                    config::current().close_timeout_ms
                );
            }
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
        if st.host_queue.len + st.device_queue.len > 0 {
            control.progress(st)?;
        }
        let Some(r) = control.ended(st, index)? else {
            let trouble = control.trouble();
            // What was done before the trouble counts.
            return match (trouble, control.ended(st, index)?) {
                (Err(_), Some(r)) => Ok(Some(r.len as usize)),
                (trouble, _) => trouble.map(|()| None),
            };
        };
        if let (Some(t), Some(enqueued)) = (&self.counters.timing, r.enqueued) {
            t.completion.since(enqueued);
        }
        Ok(Some(r.len as usize))
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
        let exports = control.retire(None);
        // A copy that failed is over as well.
        let quiet = control
            .engine
            .get()
            .is_none_or(|e| e.drain(deadline).unwrap_or(true));
        if !control.failed.load(Ordering::Relaxed) {
            let state = if quiet { side::CLOSED } else { side::FAILED };
            control.shared().sender.store(state, Ordering::Release);
        }
        if !control.link.is_dead() {
            control
                .link
                .send(&Message::Close { conn: control.conn }, Vec::new());
        }
        if quiet {
            control.link.detach_send(control.conn);
        }
        // Else the link thread goes on to answer the receiver only when the copies are over.
        control.leave(&exports, quiet);
        self.counters.report(&control.describe());
        if !quiet {
            log::warn!(
                "{}: closed while copies are still in flight after {} ms; what they use stays mapped",
                control.describe(),
                config::current().close_timeout_ms
            );
            // The stream may yet write to the shared memory: never unmap it.
            std::mem::forget(control.clone());
        }
        Ok(())
    }

    fn describe(&self) -> String {
        self.control.describe()
    }
}

impl Drop for SendConnection {
    fn drop(&mut self) {
        let _ = self.close();
    }
}
