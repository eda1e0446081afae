//! Connections by RDMA: reliable queue pairs over one or more ports, set up over a TCP socket, which then only
//! tells that the peer is gone.
//!
//! The receiver writes a descriptor of each posted receive into the sender's ring; the sender writes the bytes
//! straight into the buffer and announces them with 32 bits of immediate data. GPU memory that the device
//! cannot reach goes through page-locked chunks at that end.

pub mod adapter;
pub mod gid;
pub mod gpu;
pub mod rails;
pub mod recv;
pub mod send;
pub mod wire;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use self::rails::{lanes_of, Rails};
use self::recv::RecvConnection;
use self::send::SendConnection;
use self::wire::{Offer, Reply, GO, MAX_PORTS, OFFER_LEN, REPLY_LEN};
use super::copy_engine::engine::Gpu;
use super::side::Side;
use super::staging::CHUNKS;
use super::tcp;
use super::tcp::service::{end, Kept, Service, BYE, LINGER};
use super::tcp::wire::purpose;
use super::{Memory, Region};
use crate::config::{self, Ib};
use crate::error::{Error, Result};
use crate::ibverbs::devices::Port;
use crate::ibverbs::{sys, Mr};
use crate::sync::lock;

/// How long a write that proves the way may take, where TCP is there to fall back on.
const PROOF: Duration = Duration::from_secs(10);

/// Completions taken at a time.
const BATCH: usize = 16;

/// What a connection's RDMA devices know a region by.
#[derive(Debug)]
pub struct Keys {
    /// For this end's own writes, by port.
    pub lkeys: [u32; MAX_PORTS],
    /// For the peer's, by port.
    pub rkeys: [u32; MAX_PORTS],
    /// The memory's GPU does not see what has come until the driver is asked.
    pub flush: bool,
    _regions: Vec<Arc<Mr>>,
}

impl Keys {
    fn none() -> Keys {
        Keys {
            lkeys: [0; MAX_PORTS],
            rkeys: [0; MAX_PORTS],
            flush: false,
            _regions: Vec::new(),
        }
    }

    fn add(&mut self, mr: Arc<Mr>) {
        self.lkeys[self._regions.len()] = mr.lkey();
        self.rkeys[self._regions.len()] = mr.rkey();
        self._regions.push(mr);
    }

    /// # Safety
    /// As for [`adapter::Adapter::register`].
    unsafe fn register(rails: &Rails, addr: u64, len: u64, access: u32) -> Result<Keys> {
        let mut keys = Keys::none();
        for (a, _) in rails.adapters() {
            // SAFETY: the caller's promise.
            keys.add(unsafe { a.register(addr, len, access) }?);
        }
        Ok(keys)
    }

    /// For memory of GPU `ordinal`, if all devices get at it; the error says why not.
    ///
    /// # Safety
    /// As for [`adapter::Adapter::register`].
    unsafe fn register_gpu(
        rails: &Rails,
        ordinal: i32,
        addr: u64,
        len: u64,
        access: u32,
        ib: &Ib,
    ) -> std::result::Result<Keys, String> {
        let mut keys = Keys::none();
        keys.flush = gpu::flush_of(ordinal)? == gpu::Flush::Driver;
        for (a, port) in rails.adapters() {
            let how = a.reach(port, ordinal, ib)?;
            // SAFETY: the caller's promise.
            let mr = unsafe { gpu::register(a, how, addr, len, access) };
            keys.add(mr.map_err(|e| e.text().to_string())?);
        }
        Ok(keys)
    }
}

/// Whether a message's bytes and what announces them are written apart.
#[derive(Clone, Copy, Debug)]
pub struct Routing {
    adaptive: bool,
    threshold: u64,
}

impl Routing {
    fn new(ib: &Ib, infiniband: bool) -> Routing {
        Routing {
            adaptive: ib.adaptive_routing.unwrap_or(infiniband),
            threshold: ib.routing_threshold as u64,
        }
    }

    #[inline]
    fn apart(&self, total: u64) -> bool {
        self.adaptive && total > self.threshold
    }
}

/// What both ends of a connection are made of, but for the data path's state.
#[derive(Debug)]
struct End {
    // Queue pairs go before the memory that they use.
    rails: Arc<Rails>,
    chunks: OnceLock<Keys>,
    side: Side,
    socket: Arc<TcpStream>,
    ended: Arc<AtomicU8>,
    ended_at: OnceLock<Instant>,
    /// That whose memory the devices reach.
    gpu: OnceLock<Gpu>,
    halted: AtomicBool,
}

impl End {
    fn new(service: Arc<Service>, socket: TcpStream, rails: Rails, peer: String) -> End {
        let socket = Arc::new(socket);
        let ended = service.watch(&socket);
        End {
            rails: Arc::new(rails),
            chunks: OnceLock::new(),
            side: Side::new(service, peer),
            socket,
            ended,
            ended_at: OnceLock::new(),
            gpu: OnceLock::new(),
            halted: AtomicBool::new(false),
        }
    }

    /// What has ended the connection from outside. A peer that has closed is given `grace` for what is under
    /// way.
    #[inline]
    fn trouble(&self, grace: Duration) -> Option<Error> {
        match self.ended.load(Ordering::Acquire) != end::NONE || self.rails.health.is_bad() {
            false => None,
            true => self.ending(grace),
        }
    }

    #[cold]
    fn ending(&self, grace: Duration) -> Option<Error> {
        if let Some(why) = self.rails.health.why() {
            return Some(why.context(&self.side.peer));
        }
        let since = self.ended_at.get_or_init(Instant::now);
        // Who closed in order keeps its queue pairs until we close too.
        let grace = match self.ended.load(Ordering::Acquire) {
            end::IN_ORDER if !grace.is_zero() => LINGER,
            _ => grace,
        };
        (since.elapsed() >= grace).then(|| {
            Error::remote(format!(
                "{}: the connection is gone: it has ended, or closed its side",
                self.side.peer
            ))
        })
    }

    /// Takes in what has completed, as many as `wcs` has room for at a time, and each success with `took`. What
    /// another port has completed counts, whatever has failed on one.
    #[inline]
    fn complete(
        &self,
        wcs: &mut [sys::Wc],
        mut took: impl FnMut(&sys::Wc) -> Result<()>,
    ) -> Result<()> {
        let mut outcome = Ok(());
        let mut bad: Option<sys::Wc> = None;
        for port in 0..self.rails.ports() {
            loop {
                let n = match self.rails.poll(port, wcs) {
                    Ok(n) => n,
                    Err(e) => {
                        outcome = outcome.and(Err(self.fail(e)));
                        break;
                    }
                };
                for wc in &wcs[..n] {
                    if wc.status == sys::WC_SUCCESS {
                        outcome = outcome.and(took(wc));
                        continue;
                    }
                    // Others may be told of a failure before the one that was its cause.
                    if bad.is_none_or(|b| b.status == sys::WC_WR_FLUSH_ERR) {
                        bad = Some(*wc);
                    }
                }
                if n < wcs.len().max(1) {
                    break;
                }
            }
        }
        match bad {
            Some(wc) => outcome.and(Err(self.failed(&wc))),
            None => outcome,
        }
    }

    /// The connection is over; the first reason counts.
    #[cold]
    fn fail(&self, e: Error) -> Error {
        self.side.fail(e.context(&self.side.peer))
    }

    /// A write or receive was no success.
    #[cold]
    fn failed(&self, wc: &sys::Wc) -> Error {
        // What the completion says is then only what followed.
        if let Some(e) = self.trouble(Duration::ZERO) {
            return self.side.fail(e);
        }
        self.fail(self.rails.failed(wc))
    }

    /// Ends all that is under way in a connection that has failed: whoever is told of it may take the memory
    /// back. The peer learns of it by the socket.
    #[cold]
    fn halt(&self) {
        if !self.halted.swap(true, Ordering::AcqRel) {
            self.rails.stop();
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
        }
    }

    /// A registration ends: what a failed connection still had under way must be over.
    fn settle(&self, deadline: Instant) {
        if self.side.failed.get().is_some() {
            self.halt();
            self.side.drain(deadline);
        }
    }

    /// Registers memory with the devices; GPU memory that they do not reach is staged.
    fn register(&self, addr: u64, len: u64, cuda: bool) -> Result<Region> {
        let memory = self.side.classify(addr, len, cuda)?;
        let ib = &config::current().ib;
        let relaxed = match ib.relaxed_ordering {
            true => sys::ACCESS_RELAXED_ORDERING,
            false => 0,
        };
        let access = self.access() | relaxed;
        let (here, there) = (self.rails.stages(), self.rails.peer_stages());
        // What this end has said counts, whatever becomes of this registration: the peer goes by it.
        if matches!(memory, Memory::Device(_)) && (here || there) {
            self.side.admit(addr, here != there)?;
        }
        // SAFETY, of both: NCCL's memory stays until it is deregistered, and only its messages touch it.
        let keys = match memory {
            Memory::Device(_) if !ib.gpu_direct => None,
            Memory::Device(ordinal) => {
                // SAFETY: see above.
                match unsafe { Keys::register_gpu(&self.rails, ordinal, addr, len, access, ib) } {
                    Ok(keys) => {
                        if self.gpu.get().is_none() {
                            let _ = self.gpu.set(Gpu::of_device(ordinal)?);
                        }
                        Some(keys)
                    }
                    Err(why) => {
                        log::debug!("{}: staged: {why}", self.side.peer);
                        None
                    }
                }
            }
            _ => {
                // SAFETY: see above.
                let keys = unsafe { Keys::register(&self.rails, addr, len, access) };
                Some(keys.map_err(|e| e.context(&self.side.peer))?)
            }
        };
        if let (Memory::Device(ordinal), None) = (memory, &keys) {
            self.side.stage(ordinal)?;
            self.register_chunks()?;
        }
        Ok(self.side.region(addr, len, memory, keys.map(Box::new)))
    }

    /// What the devices may do with memory of this end: what is only sent may be read-only.
    fn access(&self) -> u32 {
        match self.rails.sends() {
            true => 0,
            false => sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE,
        }
    }

    /// Lets the GPU see what has come.
    fn flush(&self) -> Result<()> {
        let Some(gpu) = self.gpu.get() else {
            return Ok(());
        };
        let driver = gpu.driver;
        let _entered = driver.enter(gpu.context)?;
        driver.flush_remote_writes()
    }

    fn register_chunks(&self) -> Result<()> {
        let _one_at_a_time = lock(&self.side.making);
        let (None, Some(staging)) = (self.chunks.get(), self.side.staging.get()) else {
            return Ok(());
        };
        let len = (CHUNKS * staging.chunk()) as u64;
        // SAFETY: the chunks are there for this, and live as long as the queue pairs.
        let keys = unsafe { Keys::register(&self.rails, staging.host(0), len, self.access()) }
            .map_err(|e| e.context(&self.side.peer))?;
        let _ = self.chunks.set(keys);
        Ok(())
    }

    /// The keys of the chunks. There are some wherever a region is staged.
    #[inline]
    fn chunk_keys(&self) -> &Keys {
        self.chunks
            .get()
            .expect("made with the first staged region")
    }

    /// Says that this end is closed. `linger`: the peer may wait for acknowledgements from this end's device.
    fn close(&self, linger: bool) {
        if linger && self.side.failed.get().is_none() {
            // In order: see `end::IN_ORDER`.
            let _ = say(&self.socket, &[BYE]);
            self.side
                .service
                .keep(self.socket.clone(), Box::new(self.rails.clone()));
        } else {
            self.halt();
            self.side.service.unwatch();
        }
    }
}

/// Queue pairs whose connection is closed.
impl Kept for Arc<Rails> {}

/// Reads a message of a fixed size from a socket that does not block.
#[derive(Debug)]
struct Reading<const N: usize> {
    bytes: Box<[u8; N]>,
    have: usize,
}

impl<const N: usize> Reading<N> {
    fn new() -> Self {
        Reading {
            bytes: Box::new([0; N]),
            have: 0,
        }
    }

    /// The whole message; `None`: not yet.
    fn poll(&mut self, mut socket: &TcpStream) -> Result<Option<&[u8; N]>> {
        while self.have < N {
            match socket.read(&mut self.bytes[self.have..]) {
                Ok(0) => return Err(Error::remote("the peer gave it up")),
                Ok(n) => self.have += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(socket_lost(e)),
            }
        }
        Ok(Some(&self.bytes))
    }
}

#[cold]
fn socket_lost(e: std::io::Error) -> Error {
    let errno = Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO));
    Error::remote(format!("the connection is gone: {}", errno.desc()))
}

/// Writes a message: what is said here always fits a new socket's buffer.
fn say(mut socket: &TcpStream, bytes: &[u8]) -> Result<()> {
    socket.write_all(bytes).map_err(socket_lost)
}

/// A connection that is being asked for.
#[derive(Debug)]
pub struct Connecting {
    ports: Vec<Port>,
    peer_ports: usize,
    started: Instant,
    stage: Stage,
    service: Arc<Service>,
    peer: SocketAddr,
    /// There is another way if this one leads nowhere.
    fallback: bool,
    /// The communicator's.
    traffic_class: Option<u8>,
}

#[derive(Debug)]
enum Stage {
    Socket(tcp::Connecting),
    Reply(TcpStream, Box<Rails>, Reading<REPLY_LEN>),
    /// Lanes that are proved, and since when it goes on.
    Proof(TcpStream, Box<Rails>, usize, Instant, String),
    Over,
}

impl Connecting {
    /// Starts to connect from `ports` to a listener that has `peer_ports` of them.
    pub fn new(
        address: tcp::Address,
        ports: Vec<Port>,
        peer_ports: usize,
        fallback: bool,
        traffic_class: Option<u8>,
    ) -> Result<Connecting> {
        let socket = tcp::Connecting::new(address, purpose::VERBS)?;
        Ok(Connecting {
            ports,
            peer_ports: peer_ports.clamp(1, MAX_PORTS),
            started: Instant::now(),
            service: socket.service().clone(),
            peer: socket.peer(),
            stage: Stage::Socket(socket),
            fallback,
            traffic_class,
        })
    }

    /// How long it has been going on.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Goes on; `None`: not yet.
    pub fn poll(&mut self) -> Result<Option<SendConnection>> {
        let config = config::current();
        let ib = &config.ib;
        let limit = Duration::from_secs(config.connect_timeout_s);
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Socket(mut s) => {
                    let Some(socket) = s.poll_sockets()?.and_then(|mut s| s.pop()) else {
                        self.stage = Stage::Socket(s);
                        return Ok(None);
                    };
                    let n = lanes_of(self.ports.len(), self.peer_ports, ib.qps);
                    let mut rails = Rails::new(
                        &self.ports,
                        self.peer_ports,
                        n,
                        true,
                        ib.traffic_class.or(self.traffic_class).unwrap_or(0),
                        ib,
                    )?;
                    rails.look_at_gpu(ib);
                    say(&socket, &rails.offer().encode()[..])?;
                    self.stage = Stage::Reply(socket, Box::new(rails), Reading::new());
                }
                Stage::Reply(socket, mut rails, mut reading) => {
                    let Some(bytes) = reading.poll(&socket)? else {
                        if self.age() > limit {
                            return Err(Error::remote(format!(
                                "the listener did not answer within {} s (VCCL_CONNECT_TIMEOUT)",
                                config.connect_timeout_s
                            )));
                        }
                        self.stage = Stage::Reply(socket, rails, reading);
                        return Ok(None);
                    };
                    let (offer, gids) = match Reply::decode(bytes) {
                        Some(Reply::Ready { offer, gids }) => (offer, gids),
                        Some(Reply::Refused(why)) => {
                            return Err(Error::remote(format!("the listener refused: {why}")))
                        }
                        None => {
                            return Err(Error::remote(
                                "the listener's answer is not one of vccl's: use the same library on all ranks",
                            ))
                        }
                    };
                    rails.connect(&offer, &gids, ib)?;
                    rails.post_proof()?;
                    let way = rails.describe(&offer, &gids);
                    self.stage = Stage::Proof(socket, rails, 0, Instant::now(), way);
                }
                Stage::Proof(socket, rails, mut proved, since, way) => {
                    let mut wcs = [sys::Wc::default(); 16];
                    for port in 0..rails.ports() {
                        let n = rails.poll(port, &mut wcs)?;
                        for wc in &wcs[..n] {
                            if wc.status != sys::WC_SUCCESS {
                                return Err(rails.failed(wc).context(way));
                            }
                            proved += 1;
                        }
                    }
                    if let Some(e) = rails.health.why() {
                        return Err(e.context(way));
                    }
                    if proved == rails.lanes().len() {
                        say(&socket, &GO)?;
                        let routing = Routing::new(ib, rails.infiniband());
                        let peer = format!("connection to {} ({way})", self.peer);
                        return Ok(Some(SendConnection::new(
                            self.service.clone(),
                            socket,
                            *rails,
                            routing,
                            peer,
                        )));
                    }
                    // The listener has nothing to say now: this only tells of its end.
                    if Reading::<1>::new()
                        .poll(&socket)
                        .map_err(|e| e.context(&way))?
                        .is_some()
                    {
                        return Err(Error::remote("the listener says what nobody asked it for"));
                    }
                    let limit = if self.fallback {
                        PROOF.min(limit)
                    } else {
                        limit
                    };
                    if since.elapsed() > limit {
                        return Err(Error::remote(format!(
                            "{way}: a write to the peer is not acknowledged within {} s: is there a way between \
                             the two addresses, and do firewalls and switches let RoCE (UDP port 4791) pass?",
                            limit.as_secs()
                        )));
                    }
                    self.stage = Stage::Proof(socket, rails, proved, since, way);
                    return Ok(None);
                }
                Stage::Over => return Err(Error::internal("a failed attempt to connect goes on")),
            }
        }
    }
}

/// A connector at a listener, before there is a connection.
#[derive(Debug)]
pub struct Negotiation {
    ports: Vec<Port>,
    socket: TcpStream,
    service: Arc<Service>,
    peer: SocketAddr,
    since: Instant,
    offer: Reading<OFFER_LEN>,
    built: Option<(Box<Rails>, Reading<8>, String)>,
}

impl Negotiation {
    /// Begins.
    pub fn new(
        ports: Vec<Port>,
        socket: TcpStream,
        service: Arc<Service>,
        peer: SocketAddr,
    ) -> Negotiation {
        Negotiation {
            ports,
            socket,
            service,
            peer,
            since: Instant::now(),
            offer: Reading::new(),
            built: None,
        }
    }

    /// Who it is.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    fn build(ports: &[Port], offer: &Offer, ib: &Ib) -> Result<(Rails, Reply, String)> {
        let mut rails = Rails::new(
            ports,
            offer.ports.len(),
            offer.qps.len(),
            false,
            offer.traffic_class,
            ib,
        )?;
        rails.look_at_gpu(ib);
        let gids = rails.choose(offer, ib)?;
        rails.post_receives()?;
        rails.connect(offer, &gids, ib)?;
        let way = rails.describe(offer, &gids);
        let reply = Reply::Ready {
            offer: rails.offer(),
            gids,
        };
        Ok((rails, reply, way))
    }

    /// Goes on; says whether it can be finished.
    pub fn poll(&mut self) -> Result<bool> {
        let config = config::current();
        if self.built.is_none() {
            let Some(bytes) = self.offer.poll(&self.socket)? else {
                return self.not_yet(config.connect_timeout_s);
            };
            let Some(offer) = Offer::decode(bytes) else {
                return Err(Error::remote("what it offers is not vccl's"));
            };
            match Negotiation::build(&self.ports, &offer, &config.ib) {
                Ok((rails, reply, way)) => {
                    say(&self.socket, &reply.encode()[..])?;
                    self.built = Some((Box::new(rails), Reading::new(), way));
                }
                Err(e) => {
                    let _ = say(&self.socket, &Reply::Refused(e.text().into()).encode()[..]);
                    return Err(e);
                }
            }
        }
        let Some((_, reading, _)) = &mut self.built else {
            return Ok(false);
        };
        match reading.poll(&self.socket)? {
            None => self.not_yet(config.connect_timeout_s),
            Some(bytes) if *bytes == GO => Ok(true),
            Some(_) => Err(Error::remote("what it says is not vccl's")),
        }
    }

    fn not_yet(&self, limit: u64) -> Result<bool> {
        if self.since.elapsed() > Duration::from_secs(2 * limit) {
            return Err(Error::remote("it says nothing any more"));
        }
        Ok(false)
    }

    /// The connection, once [`Negotiation::poll`] said so.
    pub fn finish(self) -> Result<RecvConnection> {
        let Some((rails, _, way)) = self.built else {
            return Err(Error::internal("a negotiation is finished before its end"));
        };
        Ok(RecvConnection::new(
            self.service,
            self.socket,
            *rails,
            format!("connection from {} ({way})", self.peer),
        ))
    }
}
