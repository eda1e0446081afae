//! Connections over TCP, for processes that share no host, or that are told so (`VCCL_TRANSPORT`).
//!
//! The receiver posts its receives over the connection's first socket; a send waits until one with its
//! tag is posted, and then goes out over all sockets, so that every byte is read straight into the buffer it
//! is for. No call blocks.

mod fork;
mod handover;
mod helpers;
pub mod interfaces;
pub mod recv;
pub mod send;
pub mod service;
#[cfg(test)]
mod tests;
pub mod wire;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::socket::{
    connect, setsockopt, socket, sockopt, AddressFamily, SockFlag, SockType, SockaddrStorage,
};

use self::recv::RecvConnection;
use self::send::SendConnection;
use self::service::{Listener, Service};
use self::wire::{check_answer, purpose, Hello, ANSWER_LEN};
use super::random;
use super::side::Side;
use crate::config;
use crate::error::{Error, Result};
use crate::sync::lock;

impl Side {
    /// The connection is over, for a socket that is of no more use.
    #[cold]
    fn lost(&self, errno: Option<i32>) -> Error {
        self.fail(lost(&self.peer, errno))
    }
}

/// Threads that help the polling one; one thread in all is that one.
fn helper_threads() -> usize {
    match config::current().socket_threads {
        0 | 1 => 0,
        n => n,
    }
}

/// Requests of one end.
pub(crate) const RING: usize = 64;
/// Bytes that one call moves over a socket at most, and about what one poll does: others wait meanwhile.
pub(crate) const POLL_BYTES: usize = 8 << 20;
/// Bytes that one call sends at most. A call keeps the socket to itself, and what the peer acknowledges
/// meanwhile waits for its end: sent at once, a large message goes at less than half the speed.
const SEND_BYTES: usize = 512 << 10;

/// Keeps what waits in the sockets of one connection, beyond what is on its way, to [`SEND_BYTES`] together, or to
/// an eighth of that for each: else several hold more than the caches do, and what is read out of them comes from
/// memory. One socket is left
/// alone, and so are those that have threads, which sleep until there is room and would be woken too late.
fn limit_unsent(sockets: &[TcpStream], threads: usize) {
    let n = sockets.len();
    if n < 2 || threads > 0 {
        return;
    }
    let each = (SEND_BYTES / n).max(SEND_BYTES / 8) as libc::c_int;
    for s in sockets {
        // SAFETY: the value is an int that lives during the call. A wish: it goes as well without.
        unsafe {
            libc::setsockopt(
                s.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_NOTSENT_LOWAT,
                (&raw const each).cast(),
                std::mem::size_of_val(&each) as libc::socklen_t,
            )
        };
    }
}

/// What connectors need to know of a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// Where the process listens.
    pub at: SocketAddr,
    /// The listener in it.
    pub listener: u64,
    /// Proof of holding the handle.
    pub secret: [u8; 16],
}

/// A listener of this process.
#[derive(Debug)]
pub struct Listening {
    service: Arc<Service>,
    listener: Arc<Listener>,
}

/// Who has come to a listener.
#[derive(Debug)]
pub enum Accepted {
    /// A connection over TCP.
    Connection(Box<RecvConnection>),
    /// Who wants to set up RDMA over this socket.
    Verbs(TcpStream, SocketAddr),
}

impl Listening {
    /// Starts to listen, for those who know the secret: for data, or to set up RDMA, or both.
    pub fn new(secret: [u8; 16], data: bool, verbs: bool) -> Result<Listening> {
        let service = Service::get()?;
        let listener = service.listen(secret, [data, verbs]);
        Ok(Listening { service, listener })
    }

    /// What goes into the handle.
    pub fn address(&self) -> Address {
        Address {
            at: self.service.address(),
            listener: self.listener.id,
            secret: self.listener.secret,
        }
    }

    /// The process's own.
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// The next that has come, if there is one.
    pub fn accept(&self) -> Result<Option<Accepted>> {
        let accepted = lock(&self.listener.waiting)
            .as_mut()
            .and_then(|w| w.pop_front());
        let Some(mut a) = accepted else {
            return Ok(None);
        };
        for s in &a.sockets {
            set_options(s)?;
        }
        if a.purpose == purpose::VERBS {
            let socket = a.sockets.pop();
            return Ok(socket.map(|s| Accepted::Verbs(s, a.peer)));
        }
        let connection = RecvConnection::new(self.service.clone(), a.sockets, a.peer);
        Ok(Some(Accepted::Connection(Box::new(connection))))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.service.unlisten(&self.listener);
    }
}

/// A dead host is noticed by probes while nothing is sent, and by missing acknowledgements else (`is_dead`).
const KEEPALIVE_IDLE_S: u32 = 10;
const KEEPALIVE_INTERVAL_S: u32 = 5;
const KEEPALIVE_COUNT: u32 = 4;
const DEAD_MS: u32 = 30_000;

fn set_options(s: &impl AsFd) -> Result<()> {
    setsockopt(s, sockopt::TcpNoDelay, &true)
        .and_then(|()| setsockopt(s, sockopt::KeepAlive, &true))
        .and_then(|()| setsockopt(s, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_S))
        .and_then(|()| setsockopt(s, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL_S))
        .and_then(|()| setsockopt(s, sockopt::TcpKeepCount, &KEEPALIVE_COUNT))
        .map_err(|e| Error::system("setting the options of a socket", e))
}

/// Whether the peer's host has acknowledged nothing for long, although it should have. Not TCP_USER_TIMEOUT:
/// that also ends connections to a process that does not read, because it is stopped.
fn is_dead(s: &TcpStream) -> bool {
    // SAFETY: all zero is a value of this struct.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = std::mem::size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes `len` bytes into `info` at most.
    let r = unsafe {
        libc::getsockopt(
            s.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &mut len,
        )
    };
    // One probe of a window that is shut may be on its way at any time.
    let waits = info.tcpi_unacked > 0 || info.tcpi_probes >= 3;
    r == 0 && waits && info.tcpi_last_ack_recv >= DEAD_MS
}

/// Whether the peer sends no more over a socket, or it has failed. Asking does not wait for who uses it.
fn is_over(s: &TcpStream) -> bool {
    let mut fd = [PollFd::new(
        s.as_fd(),
        PollFlags::from_bits_retain(libc::POLLRDHUP),
    )];
    matches!(poll(&mut fd, PollTimeout::ZERO), Ok(n) if n > 0)
}

/// A connection that is being asked for.
#[derive(Debug)]
pub struct Connecting {
    service: Arc<Service>,
    address: Address,
    purpose: u16,
    connection: [u8; 16],
    started: Instant,
    /// When these sockets were made.
    begun: Instant,
    sockets: Vec<TcpStream>,
    /// Sockets that have connected and introduced themselves, as bits.
    introduced: u64,
    answer: [u8; ANSWER_LEN],
    have: usize,
}

impl Connecting {
    /// Starts to connect for one of [`purpose`].
    pub fn new(address: Address, purpose: u16) -> Result<Connecting> {
        service::allow_files();
        let config = config::current();
        let n = match purpose {
            purpose::VERBS => 1,
            _ => (config.sockets_per_thread * config.socket_threads).clamp(1, wire::MAX_SOCKETS),
        };
        let at = in_own_scope(address.at, || Ok(Service::get()?.address()))?;
        let address = Address { at, ..address };
        // First, because it knows best why there is no way; then the service, which needs an interface.
        let sockets = begin(n, at)?;
        let service = Service::get()?;
        Ok(Connecting {
            service,
            address,
            purpose,
            connection: random(),
            started: Instant::now(),
            begun: Instant::now(),
            sockets,
            introduced: 0,
            answer: [0; ANSWER_LEN],
            have: 0,
        })
    }

    /// How long it has been going on.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    fn unreachable(&self, errno: i32) -> Error {
        Error::remote(format!(
            "{} does not answer over TCP: {}; is the process alive, and may this host reach that one \
             (firewall, NCCL_SOCKET_IFNAME)?",
            self.address.at,
            Errno::from_raw(errno).desc()
        ))
    }

    /// The process's own.
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Whom it asks.
    pub fn peer(&self) -> SocketAddr {
        self.address.at
    }

    /// Goes on; `None`: not yet.
    pub fn poll(&mut self) -> Result<Option<SendConnection>> {
        let sockets = self.poll_sockets()?;
        Ok(sockets.map(|s| SendConnection::new(self.service.clone(), s, self.address.at)))
    }

    /// The same, for the bare sockets.
    pub fn poll_sockets(&mut self) -> Result<Option<Vec<TcpStream>>> {
        if self.begun.elapsed() > STALE
            && (self.introduced.count_ones() as usize) < self.sockets.len()
        {
            // Nobody has asked for long, and the listener does not wait for greetings for ever.
            self.sockets = begin(self.sockets.len(), self.address.at)?;
            self.begun = Instant::now();
            (self.connection, self.introduced) = (random(), 0);
        }
        for (i, s) in self.sockets.iter().enumerate() {
            if self.introduced & (1 << i) != 0 {
                continue;
            }
            let mut fd = [PollFd::new(s.as_fd(), PollFlags::POLLOUT)];
            match poll(&mut fd, PollTimeout::ZERO) {
                Ok(0) | Err(Errno::EINTR) => continue,
                Ok(_) => {}
                Err(e) => return Err(Error::system("poll", e)),
            }
            let trouble = nix::sys::socket::getsockopt(s, sockopt::SocketError)
                .map_err(|e| Error::system("asking for a socket's error", e))?;
            if trouble != 0 {
                return Err(self.unreachable(trouble));
            }
            let hello = Hello {
                listener: self.address.listener,
                secret: self.address.secret,
                connection: self.connection,
                socket: i as u16,
                sockets: self.sockets.len() as u16,
                purpose: self.purpose,
            };
            // The first bytes on a new socket always fit its buffer.
            (&mut &*s)
                .write_all(&hello.encode())
                .map_err(|e| self.unreachable(e.raw_os_error().unwrap_or(libc::EIO)))?;
            self.introduced |= 1 << i;
        }
        if self.introduced.count_ones() < self.sockets.len() as u32 {
            return self.not_yet();
        }
        match (&self.sockets[0]).read(&mut self.answer[self.have..]) {
            Ok(0) => Err(Error::remote(format!(
                "{} turned the connection away: its listener is closed, or the handle is not its own",
                self.address.at
            ))),
            Ok(n) => {
                self.have += n;
                if self.have < ANSWER_LEN {
                    return self.not_yet();
                }
                check_answer(&self.answer)?;
                Ok(Some(std::mem::take(&mut self.sockets)))
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                self.not_yet()
            }
            Err(e) => Err(self.unreachable(e.raw_os_error().unwrap_or(libc::EIO))),
        }
    }

    /// As if so much time had passed since the sockets were made.
    #[cfg(test)]
    fn pass(&mut self, time: Duration) {
        self.begun -= time;
    }

    fn not_yet<T>(&self) -> Result<Option<T>> {
        let limit = config::current().connect_timeout_s;
        if self.started.elapsed() >= Duration::from_secs(limit) {
            return Err(Error::remote(format!(
                "no answer from {} over TCP within {limit} s (VCCL_CONNECT_TIMEOUT); is the process \
                 stopped, or does a firewall drop its packets?",
                self.address.at
            )));
        }
        Ok(None)
    }
}

/// Half of what a listener gives connectors to introduce themselves.
const STALE: Duration = Duration::from_secs(service::GREETING.as_secs() / 2);

/// A link-local address as this host has to say it: its scope is the number of an interface, and the peer's
/// numbers are its own.
fn in_own_scope(to: SocketAddr, own: impl FnOnce() -> Result<SocketAddr>) -> Result<SocketAddr> {
    let SocketAddr::V6(mut v6) = to else {
        return Ok(to);
    };
    if v6.ip().is_unicast_link_local() {
        match own()? {
            SocketAddr::V6(own) if own.scope_id() != 0 => v6.set_scope_id(own.scope_id()),
            _ => {}
        }
    }
    Ok(v6.into())
}

/// Starts so many sockets on their way.
fn begin(n: usize, to: SocketAddr) -> Result<Vec<TcpStream>> {
    (0..n).map(|_| begin_one(to)).collect()
}

fn begin_one(to: SocketAddr) -> Result<TcpStream> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd: OwnedFd = socket(family, SockType::Stream, flags, None)
        .map_err(|e| Error::system("making a TCP socket", e))?;
    fork::close_in_children(fd.as_fd());
    set_options(&fd)?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(TcpStream::from(fd)),
        Err(e) => Err(Error::remote(format!(
            "{to} cannot be reached over TCP: {}",
            e.desc()
        ))),
    }
}

/// Why a socket is of no more use.
#[cold]
fn lost(peer: &str, errno: Option<i32>) -> Error {
    let why = match errno {
        None => "it has ended, or closed its side".to_string(),
        Some(n) => Errno::from_raw(n).desc().to_string(),
    };
    Error::remote(format!("{peer}: the connection is gone: {why}"))
}

/// What one call on a socket did.
enum Moved {
    /// So many bytes.
    Bytes(usize),
    /// Nothing: try again later.
    Nothing,
    /// The peer sends no more.
    End,
    /// It failed with that errno.
    Failed(i32),
}

fn moved(n: isize) -> Moved {
    match n {
        0 => Moved::End,
        n if n > 0 => Moved::Bytes(n as usize),
        _ => match Errno::last_raw() {
            libc::EAGAIN | libc::EINTR => Moved::Nothing,
            errno => Moved::Failed(errno),
        },
    }
}

/// Reads into `[addr, addr + len)`.
///
/// # Safety
/// The range is valid for writes.
#[inline]
unsafe fn receive(socket: &TcpStream, addr: u64, len: usize) -> Moved {
    // SAFETY: the caller's promise; addresses and not references, because the memory is NCCL's.
    moved(unsafe {
        libc::recv(
            socket.as_raw_fd(),
            addr as *mut libc::c_void,
            len.min(POLL_BYTES),
            0,
        )
    })
}

/// Writes `head` and behind it `[addr, addr + len)`, as much as fits.
///
/// # Safety
/// The range is valid for reads.
#[inline]
unsafe fn transmit(socket: &TcpStream, head: &[u8], addr: u64, len: usize) -> Moved {
    let mut parts = [
        libc::iovec {
            iov_base: head.as_ptr().cast_mut().cast(),
            iov_len: head.len(),
        },
        libc::iovec {
            iov_base: addr as *mut libc::c_void,
            iov_len: len.min(SEND_BYTES),
        },
    ];
    // SAFETY: all zero is a value of this struct.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    // SAFETY: the message and its parts live during the call; for the range the caller's promise.
    moved(unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
}
