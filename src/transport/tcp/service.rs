//! The process's one TCP listener, and the thread that looks at who comes.
//!
//! The thread takes connectors' sockets, reads their greetings, and gives complete connections to the
//! listener that they name; and it keeps the sockets of sending ends that were closed until the peer has read
//! all, because a socket that is closed over unread bytes resets the connection.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::resource::{getrlimit, setrlimit, Resource};
use nix::sys::socket::{listen, Backlog};

use super::wire::{answer, purpose, Hello, HELLO_LEN};
use super::{fork, interfaces};
use crate::config;
use crate::error::{Error, Result};
use crate::sync::{lock, of_process};
use crate::thread::Thread;
use crate::transport::close_deadline;

/// How long a stranger may take to introduce itself.
pub(crate) const GREETING: Duration = Duration::from_secs(10);
/// Sockets that have not introduced themselves, or not all of their connection; beyond that the oldest goes.
const MAX_PENDING: usize = 4096;
/// Files that a process is allowed to open at most: beyond that, programs that close all that they might have
/// open, one by one, take long.
const FILES: u64 = 1 << 20;
/// How long a closed sending end may take until its peer has read all.
pub const LINGER: Duration = Duration::from_secs(30);

/// How long what is kept for peers is kept beyond the thread's end: a device's acknowledgements take less.
const KEEP: Duration = Duration::from_millis(100);

/// The sockets of one connection, in order.
#[derive(Debug)]
pub struct Accepted {
    /// Non-blocking.
    pub sockets: Vec<TcpStream>,
    /// Who connected.
    pub peer: SocketAddr,
    /// What for: one of [`purpose`].
    pub purpose: u16,
}

/// One listener.
#[derive(Debug)]
pub struct Listener {
    /// Its number in this process.
    pub id: u64,
    /// Proof of holding its handle.
    pub secret: [u8; 16],
    /// Whether data may come over its sockets, and whether RDMA may be set up over them.
    pub allows: [bool; 2],
    /// Connections that nobody has accepted; `None` once it is closed.
    pub waiting: Mutex<Option<VecDeque<Accepted>>>,
    /// All that have come, by their own numbers: what was recorded on the network is of no use to others.
    taken: Mutex<HashSet<[u8; 16]>>,
}

#[derive(Debug)]
struct Inner {
    wake: EventFd,
    stop: AtomicBool,
    listeners: Mutex<HashMap<u64, Arc<Listener>>>,
    lingering: Mutex<Vec<Lingering>>,
    watched: Mutex<Vec<Watched>>,
}

/// A socket that is kept until its peer has closed.
#[derive(Debug)]
struct Lingering {
    socket: Arc<TcpStream>,
    until: Instant,
    /// What the peer may still need.
    keep: Option<Box<dyn Kept>>,
}

/// What may be kept for a peer.
pub trait Kept: Send + std::fmt::Debug {}

/// A socket on which nothing more is said, and whose end is to be known.
#[derive(Debug)]
struct Watched {
    socket: Arc<TcpStream>,
    ended: Arc<AtomicU8>,
    said: AtomicBool,
}

/// What is known of a watched socket's peer.
pub mod end {
    /// It is there.
    pub const NONE: u8 = 0;
    /// It died, or gave up.
    pub const ENDED: u8 = 1;
    /// It has closed, and said so ([`super::BYE`]).
    pub const IN_ORDER: u8 = 2;
}

/// What is said on a watched socket before it is closed in order.
pub const BYE: u8 = b'.';

/// The listener of this process, while anybody uses it.
#[derive(Debug)]
pub struct Service {
    inner: Arc<Inner>,
    address: SocketAddr,
    interface: String,
    next: AtomicU64,
    thread: Thread,
}

static SERVICE: Mutex<Weak<Service>> = Mutex::new(Weak::new());

fn system(what: impl std::fmt::Display) -> impl FnOnce(std::io::Error) -> Error {
    move |e| Error::system(what, Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO)))
}

impl Service {
    /// The one of this process, started if nobody uses it yet.
    pub fn get() -> Result<Arc<Service>> {
        of_process(&SERVICE, |s| s.thread.pid(), Service::start)
    }

    fn start() -> Result<Service> {
        allow_files();
        let config = config::current();
        let own = interfaces::own_address(config.socket_ifname.as_deref(), config.socket_family)?;
        let (mut service, guests) = Service::at(own.address, own.name, MAX_PENDING)?;
        service.thread = Thread::start("vccl-tcp", move || guests.run())?;
        Ok(service)
    }

    /// One without its thread, and what that thread is to run. `most`: in place of [`MAX_PENDING`].
    pub(crate) fn at(
        address: SocketAddr,
        interface: String,
        most: usize,
    ) -> Result<(Service, Guests)> {
        let socket = TcpListener::bind(address)
            .map_err(system(format!("listening on {address} ({interface})")))?;
        // The default queue is short for a thousand connections at a time.
        listen(&socket, Backlog::MAXCONN).map_err(|e| Error::system("listening", e))?;
        fork::close_in_children(socket.as_fd());
        socket
            .set_nonblocking(true)
            .map_err(system("making a socket non-blocking"))?;
        let address = socket
            .local_addr()
            .map_err(system("asking for a socket's address"))?;
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| Error::system("eventfd", e))?;
        let inner = Arc::new(Inner {
            wake,
            stop: AtomicBool::new(false),
            listeners: Mutex::default(),
            lingering: Mutex::default(),
            watched: Mutex::default(),
        });
        let guests = Guests::new(inner.clone(), socket, most);
        let service = Service {
            inner,
            address,
            interface,
            next: AtomicU64::new(1),
            thread: Thread::none(),
        };
        Ok((service, guests))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The interface that has the address.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// A new listener, for those who know the secret.
    pub fn listen(&self, secret: [u8; 16], allows: [bool; 2]) -> Arc<Listener> {
        let l = Arc::new(Listener {
            id: self.next.fetch_add(1, Ordering::Relaxed),
            secret,
            allows,
            waiting: Mutex::new(Some(VecDeque::new())),
            taken: Mutex::default(),
        });
        lock(&self.inner.listeners).insert(l.id, l.clone());
        l
    }

    /// Closes a listener, and with it what nobody accepted.
    pub fn unlisten(&self, l: &Listener) {
        lock(&self.inner.listeners).remove(&l.id);
        lock(&l.waiting).take();
        let _ = self.inner.wake.write(1);
    }

    /// Keeps the sockets of a sending end that was closed until its peer has read all.
    pub fn linger(&self, sockets: impl Iterator<Item = TcpStream>) {
        let until = Instant::now() + LINGER;
        let mut lingering = lock(&self.inner.lingering);
        for s in sockets {
            if s.shutdown(std::net::Shutdown::Write).is_ok() {
                lingering.push(Lingering {
                    socket: Arc::new(s),
                    until,
                    keep: None,
                });
            }
        }
        drop(lingering);
        let _ = self.inner.wake.write(1);
    }

    /// Keeps something until the peer of a socket has closed, for as long as for a sending end.
    pub fn keep(&self, socket: Arc<TcpStream>, what: Box<dyn Kept>) {
        if socket.shutdown(std::net::Shutdown::Write).is_ok() {
            lock(&self.inner.lingering).push(Lingering {
                socket,
                until: Instant::now() + LINGER,
                keep: Some(what),
            });
        }
        let _ = self.inner.wake.write(1);
    }

    /// From now on the returned word tells whether the socket's peer has closed or died: one of [`end`].
    pub fn watch(&self, socket: &Arc<TcpStream>) -> Arc<AtomicU8> {
        let ended = Arc::new(AtomicU8::new(end::NONE));
        lock(&self.inner.watched).push(Watched {
            socket: socket.clone(),
            ended: ended.clone(),
            said: AtomicBool::new(false),
        });
        let _ = self.inner.wake.write(1);
        ended
    }

    /// Whoever had a socket watched has dropped the flag.
    pub fn unwatch(&self) {
        let _ = self.inner.wake.write(1);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let inner = &self.inner;
        self.thread.end(|| {
            inner.stop.store(true, Ordering::Release);
            let _ = inner.wake.write(1);
        });
    }
}

/// Somebody who has connected.
struct Guest {
    socket: TcpStream,
    peer: SocketAddr,
    since: Instant,
    bytes: [u8; HELLO_LEN],
    have: usize,
}

/// The sockets of one connection that have introduced themselves so far.
struct Party {
    sockets: Vec<Option<TcpStream>>,
    first: Hello,
    since: Instant,
}

/// What the thread knows.
pub(crate) struct Guests {
    inner: Arc<Inner>,
    socket: TcpListener,
    /// Guests at a time, and parties.
    most: usize,
    guests: Vec<Guest>,
    parties: HashMap<[u8; 16], Party>,
    lingering: Vec<Lingering>,
    watched: Vec<Watched>,
    warned: bool,
}

impl Guests {
    fn new(inner: Arc<Inner>, socket: TcpListener, most: usize) -> Guests {
        Guests {
            inner,
            socket,
            most,
            guests: Vec::new(),
            parties: HashMap::new(),
            lingering: Vec::new(),
            watched: Vec::new(),
            warned: false,
        }
    }

    fn run(mut self) {
        while !self.inner.stop.load(Ordering::Acquire) {
            self.wait();
            self.round();
        }
        self.part();
    }

    /// Does what there is to do, and waits for nothing.
    pub(crate) fn round(&mut self) {
        let _ = self.inner.wake.read();
        self.welcome();
        self.listen_to();
        self.lingering.append(&mut lock(&self.inner.lingering));
        self.lingering
            .retain(|l| l.until > Instant::now() && reads_on(&l.socket));
        self.watched.append(&mut lock(&self.inner.watched));
        self.watched.retain(|w| {
            let unwanted = Arc::strong_count(&w.ended) == 1;
            let ended = !unwanted && !reads_on_for(&w.socket, &w.said);
            if ended {
                let how = match w.said.load(Ordering::Relaxed) {
                    true => end::IN_ORDER,
                    false => end::ENDED,
                };
                w.ended.store(how, Ordering::Release);
            }
            !unwanted && !ended
        });
        // They know the secret, and take as long as a connector may.
        let patience = Duration::from_secs(config::current().connect_timeout_s);
        if !self.parties.is_empty() {
            let listeners = lock(&self.inner.listeners);
            self.parties.retain(|_, p| {
                p.since.elapsed() < patience && listeners.contains_key(&p.first.listener)
            });
        }
    }

    /// Whoever waits for the thread's end waits for this: what was sent last gets to the peers' hosts, if
    /// that is a matter of moments.
    fn part(&mut self) {
        self.lingering.append(&mut lock(&self.inner.lingering));
        let begun = Instant::now();
        let deadline = close_deadline();
        loop {
            self.lingering.retain(|l| {
                let needed = match l.keep {
                    Some(_) => begun.elapsed() < KEEP,
                    None => is_unsent(&l.socket),
                };
                needed && reads_on(&l.socket)
            });
            if self.lingering.is_empty() || Instant::now() >= deadline {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// No more files can be opened: an impostor must not be what they are used up by.
    #[cold]
    fn out_of_files(&mut self, e: &std::io::Error) {
        if !std::mem::replace(&mut self.warned, true) {
            log::warn!(
                "a connection over TCP cannot be accepted: {e}; raise the limit of open files (ulimit -n)"
            );
        }
        self.make_room();
        std::thread::sleep(Duration::from_millis(20));
    }

    fn wait(&self) {
        let input = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![input(self.inner.wake.as_fd()), input(self.socket.as_fd())];
        fds.extend(self.guests.iter().map(|g| input(g.socket.as_fd())));
        fds.extend(self.lingering.iter().map(|l| input(l.socket.as_fd())));
        let busy = fds.len() > 2 || !self.parties.is_empty();
        fds.extend(self.watched.iter().map(|w| input(w.socket.as_fd())));
        let timeout = match busy {
            true => PollTimeout::from(1000u16),
            false => PollTimeout::NONE,
        };
        if poll(&mut fds, timeout).is_err() {
            // No memory for it: do not spin.
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn welcome(&mut self) {
        loop {
            match self.socket.accept() {
                Ok((socket, peer)) => {
                    if socket.set_nonblocking(true).is_err() {
                        continue;
                    }
                    fork::close_in_children(socket.as_fd());
                    if self.guests.len() >= self.most {
                        self.make_room();
                    }
                    self.guests.push(Guest {
                        socket,
                        peer,
                        since: Instant::now(),
                        bytes: [0; HELLO_LEN],
                        have: 0,
                    });
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e)
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
                    ) =>
                {
                    return self.out_of_files(&e);
                }
                // Gone before it was taken.
                Err(_) => continue,
            }
        }
    }

    fn listen_to(&mut self) {
        let mut i = 0;
        while i < self.guests.len() {
            i += usize::from(self.stays(i));
        }
    }

    /// Reads what a guest has said. Who has said all, or is gone, or takes too long, is no guest any more.
    fn stays(&mut self, i: usize) -> bool {
        let g = &mut self.guests[i];
        let said_all = loop {
            match g.socket.read(&mut g.bytes[g.have..]) {
                Ok(0) => break false,
                Ok(n) => {
                    g.have += n;
                    if g.have == HELLO_LEN {
                        break true;
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock && g.since.elapsed() <= GREETING => {
                    return true;
                }
                Err(_) => break false,
            }
        };
        let g = self.guests.remove(i);
        if said_all {
            self.introduce(g);
        }
        false
    }

    /// The oldest guest makes room, unless it has said all by now: then it was not heard yet for all the others
    /// who came.
    fn make_room(&mut self) {
        if !self.guests.is_empty() && self.stays(0) {
            self.guests.remove(0);
        }
    }

    fn introduce(&mut self, g: Guest) {
        let peer = g.peer;
        let Some(hello) = Hello::decode(&g.bytes) else {
            log::info!("{peer} connected over TCP and is not vccl: turned away");
            return;
        };
        let listener = lock(&self.inner.listeners).get(&hello.listener).cloned();
        let Some(listener) = listener.filter(|l| same(&l.secret, &hello.secret)) else {
            log::info!(
                "{peer} connected over TCP to a listener that is closed, or without its secret"
            );
            return;
        };
        if !listener.allows[usize::from(hello.purpose == purpose::VERBS)] {
            log::info!("{peer} asked for a transport that VCCL_TRANSPORT excludes here");
            return;
        }
        if lock(&listener.taken).contains(&hello.connection) {
            log::info!("{peer} repeats over TCP what another has said: turned away");
            return;
        }
        let begun = self.parties.contains_key(&hello.connection);
        if !begun && self.parties.len() >= self.most {
            return;
        }
        let party = self
            .parties
            .entry(hello.connection)
            .or_insert_with(|| Party {
                sockets: (0..hello.sockets).map(|_| None).collect(),
                first: hello,
                since: Instant::now(),
            });
        let agrees = party.first.listener == hello.listener
            && party.first.sockets == hello.sockets
            && party.first.purpose == hello.purpose;
        if !agrees || party.sockets[hello.socket as usize].is_some() {
            // A replay, or a fault. Who repeats something has heard it from the one who was first.
            log::info!("{peer} repeats over TCP what another has said: turned away");
            return;
        }
        party.sockets[hello.socket as usize] = Some(g.socket);
        if party.sockets.iter().any(|s| s.is_none()) {
            return;
        }
        let party = self.parties.remove(&hello.connection).expect("found above");
        let sockets: Vec<TcpStream> = party.sockets.into_iter().flatten().collect();
        lock(&listener.taken).insert(hello.connection);
        let mut waiting = lock(&listener.waiting);
        if let Some(waiting) = waiting.as_mut() {
            // The first bytes on a new socket always fit its buffer.
            if (&sockets[0]).write_all(&answer()).is_ok() {
                waiting.push_back(Accepted {
                    sockets,
                    peer,
                    purpose: hello.purpose,
                });
            }
        }
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl Guests {
    /// As if so much time had passed for all that wait.
    pub(crate) fn pass(&mut self, time: Duration) {
        let begun = self.guests.iter_mut().map(|g| &mut g.since);
        for since in begun.chain(self.parties.values_mut().map(|p| &mut p.since)) {
            *since -= time;
        }
    }

    /// Sockets that have not introduced themselves, connections that are not complete, and sockets that are
    /// kept for their ends.
    pub(crate) fn held(&self) -> [usize; 3] {
        let kept = self.lingering.len() + self.watched.len();
        [self.guests.len(), self.parties.len(), kept]
    }
}

/// Compares in a time that does not tell where they differ.
fn same(a: &[u8; 16], b: &[u8; 16]) -> bool {
    a.iter().zip(b).fold(0, |d, (x, y)| d | (x ^ y)) == 0
}

/// Lets the process open as many files as it may: every socket of a connection is one, and the usual soft limit
/// of 1,024 is only there for programs that use select().
pub(super) fn allow_files() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return;
    };
    let more = hard.min(FILES);
    if soft < more {
        match setrlimit(Resource::RLIMIT_NOFILE, more, hard) {
            Ok(()) => log::info!("soft limit of open files raised from {soft} to {more}"),
            Err(e) => log::info!("soft limit of open files is {soft}, and cannot be raised: {e}"),
        }
    }
}

/// Whether the peer's host has not acknowledged all that was sent, and so has it.
fn is_unsent(s: &TcpStream) -> bool {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes an int.
    let r = unsafe { libc::ioctl(s.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    r == 0 && bytes > 0
}

/// Whether a lingering socket's peer has still not closed.
fn reads_on(s: &TcpStream) -> bool {
    reads_on_for(s, &AtomicBool::new(false))
}

/// The same, for a socket on which nothing but a last word is said; `said`: it was.
fn reads_on_for(mut s: &TcpStream, said: &AtomicBool) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match s.read(&mut bytes) {
            Ok(0) => return false,
            Ok(n) => said.store(bytes[..n] == [BYE], Ordering::Relaxed),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return e.kind() == ErrorKind::WouldBlock,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A service that keeps `most` guests, and connections that are incomplete; and a listener.
    fn listening(most: usize) -> (Service, Guests, Arc<Listener>) {
        let (service, guests) = Service::at(([127, 0, 0, 1], 0).into(), "lo".into(), most).unwrap();
        let l = service.listen([7; 16], [true, false]);
        (service, guests, l)
    }

    fn hello(l: &Listener, connection: u8, socket: u16, sockets: u16) -> [u8; HELLO_LEN] {
        let hello = Hello {
            listener: l.id,
            secret: l.secret,
            connection: [connection; 16],
            socket,
            sockets,
            purpose: purpose::TCP,
        };
        hello.encode()
    }

    fn guest(to: &Service, bytes: &[u8]) -> TcpStream {
        let mut s = TcpStream::connect(to.address()).unwrap();
        s.write_all(bytes).unwrap();
        s
    }

    /// Looks until as many connections as that are complete.
    fn complete(guests: &mut Guests, l: &Listener, n: usize) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(200) {
            guests.round();
            if lock(&l.waiting).as_ref().is_some_and(|w| w.len() == n) {
                return true;
            }
        }
        false
    }

    #[test]
    fn who_has_said_all_is_not_what_makes_room() {
        let (service, mut guests, l) = listening(3);
        let _good = guest(&service, &hello(&l, 1, 0, 1));
        let _silent: Vec<_> = (0..9).map(|_| guest(&service, b"GET / HT")).collect();
        assert!(complete(&mut guests, &l, 1));
        assert_eq!(guests.held()[0], 3);
    }

    #[test]
    fn what_is_half_there_is_completed_when_no_more_may_begin() {
        let (service, mut guests, l) = listening(2);
        let mut kept = Vec::new();
        for connection in 1..=3 {
            kept.push(guest(&service, &hello(&l, connection, 0, 2)));
            assert!(!complete(&mut guests, &l, 1));
        }
        assert_eq!(guests.held()[1], 2);
        kept.push(guest(&service, &hello(&l, 1, 1, 2)));
        assert!(complete(&mut guests, &l, 1));
    }

    #[test]
    fn what_is_repeated_is_turned_away_and_harms_nobody() {
        let (service, mut guests, l) = listening(8);
        let mut kept = vec![guest(&service, &hello(&l, 1, 0, 2))];
        guests.round();
        // Before the connection is complete, with another number of sockets too, and after it.
        for sockets in [2, 1] {
            kept.push(guest(&service, &hello(&l, 1, 0, sockets)));
            assert!(!complete(&mut guests, &l, 1));
        }
        kept.push(guest(&service, &hello(&l, 1, 1, 2)));
        assert!(complete(&mut guests, &l, 1));
        for (socket, sockets) in [(0, 2), (1, 2), (0, 1)] {
            kept.push(guest(&service, &hello(&l, 1, socket, sockets)));
            assert!(!complete(&mut guests, &l, 2));
        }
        assert_eq!(guests.held()[..2], [0, 0]);
        kept.push(guest(&service, &hello(&l, 2, 0, 1)));
        assert!(complete(&mut guests, &l, 2));
    }

    #[test]
    fn a_connector_that_pauses_is_let_in_later() {
        let (service, mut guests, l) = listening(8);
        let to = super::super::Address {
            at: service.address(),
            listener: l.id,
            secret: l.secret,
        };
        let mut c = super::super::Connecting::new(to, purpose::TCP).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        guests.round();
        assert_eq!(guests.held()[0], 1);
        // Nobody asks for so long that the listener gives it up.
        c.pass(2 * GREETING);
        guests.pass(2 * GREETING);
        guests.round();
        assert_eq!(guests.held()[0], 0);
        let begun = Instant::now();
        while c.poll().unwrap().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(20));
            guests.round();
        }
    }
}
