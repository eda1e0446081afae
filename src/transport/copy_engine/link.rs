//! The link between two processes: one socket for all connections in one direction, whatever their
//! number, and the one thread of a process that reads them.
//!
//! A process listens on one Unix socket with an abstract, random name: it leaves no file behind, and
//! whoever reaches it shares the host and the network namespace. Memory is offered and mapped over
//! the link, off the data path; the link's end is how the death of a peer is learnt.
//!
//! The thread exists while the process has a listener or a connection.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{
    accept4, bind, connect, getsockopt, listen, sendmsg, socket, sockopt, AddressFamily, Backlog,
    ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr,
};

use super::export::Exports;
use super::import::Imports;
use super::recv::{Accepted, RecvControl};
use super::send::SendControl;
use super::shm::Shm;
use super::wire::{Message, Nonce, MAX_FDS, MAX_PACKET, PROTOCOL};
use crate::cuda::Relaxed;
use crate::error::{Error, Result};
use crate::sync::{lock, of_process};
use crate::thread::Thread;
use crate::transport::{close_deadline, random};

const TOKEN_LISTENER: u64 = 0;
const TOKEN_WAKE: u64 = 1;
const FIRST_LINK: u64 = 2;
/// Set in the token of the descriptor that tells of the peer process's end.
const PROCESS_BIT: u64 = 1 << 63;

thread_local! {
    static ON_LINK_THREAD: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn address(nonce: &Nonce) -> UnixAddr {
    let hex: String = nonce.iter().map(|b| format!("{b:02x}")).collect();
    UnixAddr::new_abstract(format!("vccl-{hex}").as_bytes()).expect("37 bytes fit an address")
}

/// Who is at the other end of a link, as the kernel says.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Its process id as this process sees it; 0 when it is in a PID namespace that we cannot see.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.pid {
            0 => f.write_str("a process of another PID namespace"),
            pid => write!(f, "process {pid}"),
        }
    }
}

/// One socket to one process.
#[derive(Debug)]
pub struct Link {
    id: u64,
    fd: OwnedFd,
    /// Readable once the peer process has ended: its socket may live on in its children.
    process: Option<OwnedFd>,
    /// Who is there.
    pub peer: Peer,
    /// Whether the other end is this process.
    pub same_process: bool,
    /// Whether we connected: then we send over this link's connections.
    outgoing: bool,
    greeted: AtomicBool,
    dead: AtomicBool,
    slow: AtomicBool,
    why_dead: Mutex<String>,
    out: Mutex<VecDeque<(Vec<u8>, Vec<OwnedFd>)>>,
    next_conn: AtomicU64,
    sends: Mutex<HashMap<u64, Weak<SendControl>>>,
    recvs: Mutex<HashMap<u64, Weak<RecvControl>>>,
    /// What the peer offers.
    pub imports: Mutex<Imports>,
    /// What we offer the peer.
    pub exports: Mutex<Exports>,
    inner: Weak<Inner>,
}

impl Link {
    fn new(
        inner: &Arc<Inner>,
        fd: OwnedFd,
        outgoing: bool,
        same_process: bool,
    ) -> Result<Arc<Link>> {
        let cred = getsockopt(&fd, sockopt::PeerCredentials)
            .map_err(|e| Error::system("reading the credentials of a peer process", e))?;
        let link = Arc::new(Link {
            id: inner.next_id.fetch_add(1, Ordering::Relaxed),
            process: pidfd(fd.as_fd(), cred.pid()),
            fd,
            peer: Peer {
                pid: cred.pid(),
                uid: cred.uid(),
            },
            same_process,
            outgoing,
            greeted: AtomicBool::new(outgoing),
            dead: AtomicBool::new(false),
            slow: AtomicBool::new(false),
            why_dead: Mutex::new(String::new()),
            out: Mutex::new(VecDeque::new()),
            next_conn: AtomicU64::new(1),
            sends: Mutex::default(),
            recvs: Mutex::default(),
            imports: Mutex::default(),
            exports: Mutex::default(),
            inner: Arc::downgrade(inner),
        });
        lock(&inner.links).insert(link.id, link.clone());
        let watch = |fd: BorrowedFd<'_>, token| {
            let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
            inner.epoll.add(fd, EpollEvent::new(flags, token))
        };
        watch(link.fd.as_fd(), link.id)
            .and_then(|()| match &link.process {
                Some(p) if !same_process => watch(p.as_fd(), link.id | PROCESS_BIT),
                _ => Ok(()),
            })
            .map_err(|e| Error::system("watching a peer process", e))
            .inspect_err(|_| {
                lock(&inner.links).remove(&link.id);
            })?;
        Ok(link)
    }

    /// Whether the peer process is gone.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Until when close and deregMr may wait for this peer, from now on. One that let a wait run out is
    /// not waited for at length again before it says something: many connections close in turn.
    pub fn peer_deadline(&self) -> Instant {
        let full = close_deadline();
        if self.slow.load(Ordering::Relaxed) {
            full.min(Instant::now() + Duration::from_millis(5))
        } else {
            full
        }
    }

    /// Whether the peer process has ended, as far as that can be seen. A system call.
    pub fn process_is_over(&self) -> bool {
        use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
        if self.same_process {
            return false;
        }
        match &self.process {
            Some(p) => {
                let mut fds = [PollFd::new(p.as_fd(), PollFlags::POLLIN)];
                matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
            }
            None => true,
        }
    }

    /// A wait for the peer ran out.
    pub fn waited_in_vain(&self) {
        self.slow.store(true, Ordering::Relaxed);
    }

    /// The error for what cannot be because the peer is gone.
    #[cold]
    pub fn dead_error(&self) -> Error {
        Error::remote(lock(&self.why_dead).clone())
    }

    /// A number for a new connection, with the maps that route to it.
    pub fn new_conn(&self) -> u64 {
        self.next_conn.fetch_add(1, Ordering::Relaxed)
    }

    /// Routes the connection's messages to `control`.
    pub fn attach_send(&self, conn: u64, control: &Arc<SendControl>) {
        lock(&self.sends).insert(conn, Arc::downgrade(control));
    }

    /// Routes no more messages to the connection's sending end.
    pub fn detach_send(&self, conn: u64) {
        lock(&self.sends).remove(&conn);
    }

    /// Routes no more messages to the connection's receiving end.
    pub fn detach_recv(&self, conn: u64) {
        lock(&self.recvs).remove(&conn);
    }

    /// Sends a message, or queues it where the peer is slow to read. Order is kept.
    pub fn send(&self, message: &Message, fds: Vec<OwnedFd>) {
        debug_assert!(message.fits_descriptors(fds.len()));
        let mut out = lock(&self.out);
        out.push_back((message.encode(), fds));
        self.flush(&mut out);
    }

    fn flush(&self, out: &mut VecDeque<(Vec<u8>, Vec<OwnedFd>)>) {
        while let Some((packet, fds)) = out.front() {
            let raw: Vec<RawFd> = fds.iter().map(|f| f.as_raw_fd()).collect();
            let rights = [ControlMessage::ScmRights(&raw)];
            let cmsgs = if raw.is_empty() {
                &rights[..0]
            } else {
                &rights[..]
            };
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match sendmsg::<()>(
                self.fd.as_raw_fd(),
                &[IoSlice::new(packet)],
                cmsgs,
                flags,
                None,
            ) {
                Ok(_) => {
                    out.pop_front();
                }
                // An edge of EPOLLOUT will come.
                Err(Errno::EAGAIN) => return,
                Err(Errno::EINTR) => {}
                // Too many descriptors in flight, or no memory: the peer will take some.
                Err(Errno::ETOOMANYREFS | Errno::ENOBUFS | Errno::ENOMEM) => {
                    if let Some(inner) = self.inner.upgrade() {
                        // The link thread looks at the flag by itself before it sleeps.
                        if !inner.retry.swap(true, Ordering::AcqRel) && !ON_LINK_THREAD.get() {
                            inner.wake();
                        }
                    }
                    return;
                }
                Err(_) => {
                    // The reading side will see the end and say so.
                    out.clear();
                    return;
                }
            }
        }
    }

    fn receive(&self) -> Received {
        let mut packet = vec![0u8; MAX_PACKET];
        let (n, fds, cut) = match receive_packet(self.fd.as_fd(), &mut packet) {
            Ok(received) => received,
            Err(Errno::EAGAIN) => return Received::Nothing,
            Err(Errno::EINTR) => return Received::Again,
            Err(e) => return Received::End(format!("its socket failed: {}", e.desc())),
        };
        if n == 0 {
            return Received::End("it has ended, or closed its side".into());
        }
        match Message::decode(&packet[..n]) {
            Some(m) if cut || m.fits_descriptors(fds.len()) => Received::Message(m, fds, cut),
            _ => Received::End("it sent a message that is none of vccl's".into()),
        }
    }

    /// Marks the link dead, and tells its connections.
    fn die(&self, why: &str) {
        if self.is_dead() {
            return;
        }
        *lock(&self.why_dead) = format!("the peer, {}, is gone: {why}", self.peer);
        self.dead.store(true, Ordering::Release);
        lock(&self.out).clear();
        if let Some(inner) = self.inner.upgrade() {
            let _ = inner.epoll.delete(&self.fd);
            if let Some(p) = &self.process {
                let _ = inner.epoll.delete(p);
            }
            lock(&inner.links).remove(&self.id);
            lock(&inner.by_peer).retain(|_, l| l.id != self.id);
        }
        let _ = nix::sys::socket::shutdown(self.fd.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        for r in lock(&self.recvs).values().filter_map(Weak::upgrade) {
            r.wake();
        }
        for s in lock(&self.sends).values().filter_map(Weak::upgrade) {
            s.stop();
        }
    }

    fn send_control(&self, conn: u64) -> Option<Arc<SendControl>> {
        lock(&self.sends).get(&conn).and_then(Weak::upgrade)
    }

    fn recv_control(&self, conn: u64) -> Option<Arc<RecvControl>> {
        lock(&self.recvs).get(&conn).and_then(Weak::upgrade)
    }

    /// Acts on a message. An error ends the link.
    fn handle(
        self: &Arc<Link>,
        inner: &Inner,
        m: Message,
        fds: Vec<OwnedFd>,
        cut: bool,
    ) -> Result<()> {
        if let Message::Hello {
            version,
            target,
            source,
        } = m
        {
            if self.outgoing {
                return Err(Error::remote("it greets as if it had connected to us"));
            }
            return self.greeting(inner, version, &target, &source);
        }
        if !self.greeted.load(Ordering::Acquire) {
            return Err(Error::remote("it sent a message before its greeting"));
        }
        if self.outgoing {
            self.handle_as_sender(inner, m, fds, cut)
        } else {
            self.handle_as_receiver(inner, m, fds)
        }
    }

    fn greeting(&self, inner: &Inner, version: u32, target: &Nonce, source: &Nonce) -> Result<()> {
        let refusal = if version != PROTOCOL {
            format!(
                "vccl of another version: this side speaks protocol {PROTOCOL}, the other {version}; \
                 use the same library on all ranks"
            )
        } else if *target != inner.nonce {
            "the handle belongs to another process".to_string()
        } else {
            if source == &inner.nonce && !self.same_process {
                return Err(Error::remote("it claims to be this process"));
            }
            self.greeted.store(true, Ordering::Release);
            self.send(&Message::Welcome, Vec::new());
            return Ok(());
        };
        self.send(
            &Message::Refused {
                text: refusal.clone(),
            },
            Vec::new(),
        );
        Err(Error::remote(refusal))
    }

    fn handle_as_sender(
        self: &Arc<Link>,
        inner: &Inner,
        m: Message,
        fds: Vec<OwnedFd>,
        cut: bool,
    ) -> Result<()> {
        match m {
            Message::Welcome => {}
            Message::Refused { text } => return Err(Error::remote(format!("it refused: {text}"))),
            Message::Connected { conn } => {
                if let Some(c) = self.send_control(conn) {
                    c.connected();
                }
            }
            Message::ConnectFailed { conn, text } => {
                if let Some(c) = self.send_control(conn) {
                    c.refused(text);
                }
            }
            Message::Export { export, uuid, kind } => {
                lock(&self.imports).offered(export, uuid, kind, fds, cut)?;
            }
            Message::Withdraw { export } => lock(&self.imports).withdrawn(export),
            Message::Region {
                conn,
                region,
                len,
                target,
            } => {
                // A connection that is closed here needs no region.
                if let Some(c) = self.send_control(conn) {
                    self.send(&c.region_offered(region, len, target)?, Vec::new());
                }
            }
            Message::Drop { conn, region } => {
                let answer = Message::Dropped { conn, region };
                match self.send_control(conn) {
                    Some(c) => inner.chore(c.quiesce(Some(region)), self.clone(), answer),
                    None => self.send(&answer, Vec::new()),
                }
            }
            Message::Close { conn } => {
                let answer = Message::CloseAck { conn };
                match self.send_control(conn) {
                    Some(c) => inner.chore(c.quiesce(None), self.clone(), answer),
                    None => self.send(&answer, Vec::new()),
                }
            }
            Message::HostDrainReady { conn } => {
                if let Some(c) = self.send_control(conn) {
                    c.host_drain(Ok(()));
                }
            }
            Message::HostDrainFailed { conn, text } => {
                if let Some(c) = self.send_control(conn) {
                    c.host_drain(Err(text));
                }
            }
            _ => return Err(Error::remote("it sent a message that only a sender sends")),
        }
        Ok(())
    }

    fn handle_as_receiver(
        self: &Arc<Link>,
        inner: &Inner,
        m: Message,
        fds: Vec<OwnedFd>,
    ) -> Result<()> {
        match m {
            Message::Connect {
                conn,
                listener,
                secret,
                host_chunk,
                first,
            } => {
                let answer =
                    match self.accept(inner, conn, listener, &secret, host_chunk, first, fds) {
                        Ok(()) => Message::Connected { conn },
                        Err(e) => Message::ConnectFailed {
                            conn,
                            text: e.text().to_string(),
                        },
                    };
                self.send(&answer, Vec::new());
            }
            // The sender looks at its own table; this end need not know.
            Message::RegionReady { .. } => {}
            Message::RegionFailed { conn, region, text } => {
                if let Some(c) = self.recv_control(conn) {
                    c.region_failed(region, &text);
                }
            }
            Message::Dropped { conn, region } => {
                if let Some(c) = self.recv_control(conn) {
                    c.region_dropped(region);
                }
            }
            Message::CloseAck { conn } => {
                if let Some(c) = self.recv_control(conn) {
                    c.close_acknowledged();
                }
            }
            Message::WantHostDrain { conn } => {
                if let Some(c) = self.recv_control(conn) {
                    c.want_host_drain();
                }
            }
            Message::Close { conn } => {
                if let Some(c) = self.recv_control(conn) {
                    c.wake();
                }
            }
            _ => {
                return Err(Error::remote(
                    "it sent a message that only a receiver sends",
                ))
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn accept(
        self: &Arc<Link>,
        inner: &Inner,
        conn: u64,
        listener: u64,
        secret: &Nonce,
        host_chunk: u64,
        first: u32,
        fds: Vec<OwnedFd>,
    ) -> Result<()> {
        let listener = lock(&inner.listeners)
            .get(&listener)
            .cloned()
            .ok_or_else(closed)?;
        if listener.secret != *secret {
            return Err(Error::remote("the handle's secret is wrong"));
        }
        if !(4096..=16 << 20).contains(&host_chunk) || !host_chunk.is_multiple_of(4096) {
            return Err(Error::remote(format!(
                "chunks of {host_chunk} bytes are not possible"
            )));
        }
        let [fd] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| {
            Error::remote(
                "the connection's shared memory did not arrive: the listening process is at its limit \
                 of open files (ulimit -n)",
            )
        })?;
        let shm = Shm::open(fd.as_fd(), host_chunk as usize)?;
        let control = Arc::new(RecvControl::new(self.clone(), conn, Arc::new(shm), first));
        {
            let mut recvs = lock(&self.recvs);
            if recvs.contains_key(&conn) {
                return Err(Error::remote(format!("connection {conn} exists already")));
            }
            recvs.insert(conn, Arc::downgrade(&control));
        }
        match lock(&listener.waiting).as_mut() {
            Some(waiting) => waiting.push_back(Accepted { control }),
            None => {
                self.detach_recv(conn);
                return Err(closed());
            }
        }
        Ok(())
    }
}

/// Whether a process of that user may be a rank of this job: ours, or the superuser's.
fn same_user(uid: u32) -> bool {
    let ours = nix::unistd::geteuid().as_raw();
    uid == ours || uid == 0 || ours == 0
}

fn closed() -> Error {
    Error::remote("nobody listens on this handle any more: it was closed")
}

enum Received {
    /// With its descriptors, and whether some of them did not arrive.
    Message(Message, Vec<OwnedFd>, bool),
    Nothing,
    Again,
    End(String),
}

/// A packet's length, its descriptors, and whether it was cut. Not nix's `recvmsg`: where some descriptors were
/// cut off, it does not give the others, and nobody closes them.
fn receive_packet(
    socket: BorrowedFd<'_>,
    packet: &mut [u8],
) -> nix::Result<(usize, Vec<OwnedFd>, bool)> {
    // SAFETY: only arithmetic.
    const SPACE: usize =
        unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<RawFd>()) as u32) as usize };
    // Words, so that the headers are aligned.
    let mut space = [0u64; SPACE.div_ceil(8)];
    let mut part = libc::iovec {
        iov_base: packet.as_mut_ptr().cast(),
        iov_len: packet.len(),
    };
    // SAFETY: all zero is a value of this struct.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = space.as_mut_ptr().cast();
    message.msg_controllen = SPACE;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the message and all that it points to live during the call.
    let n = Errno::result(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) })?;
    let mut fds = Vec::new();
    // SAFETY: the kernel has written the headers, and how far they go.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&message) };
    while !header.is_null() {
        // SAFETY: not NULL, so it lies in `space`.
        let (c, data) = unsafe { (*header, libc::CMSG_DATA(header)) };
        if (c.cmsg_level, c.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            let bytes = c.cmsg_len - (data as usize - header as usize);
            for i in 0..bytes / size_of::<RawFd>() {
                // SAFETY: inside of what the header covers; the kernel has just made the descriptor for us.
                fds.push(unsafe {
                    OwnedFd::from_raw_fd(data.cast::<RawFd>().add(i).read_unaligned())
                });
            }
        }
        // SAFETY: as for the first.
        header = unsafe { libc::CMSG_NXTHDR(&message, header) };
    }
    let cut = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    Ok((n as usize, fds, cut))
}

/// A descriptor that becomes readable when the peer process ends; none where the kernel cannot.
fn pidfd(socket: BorrowedFd<'_>, pid: i32) -> Option<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut len = std::mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option is an int of this length (Linux 6.5 on); both live through the call.
    let r = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &mut len,
        )
    };
    if r != 0 && pid > 0 {
        // SAFETY: takes no pointers; gives a new descriptor, which is closed on exec.
        fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as libc::c_int;
    } else if r != 0 {
        return None;
    }
    // SAFETY: a new descriptor that nobody else has.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What connectors reach by a handle.
#[derive(Debug)]
pub struct Listener {
    /// Its number in this process.
    pub id: u64,
    /// Proof of holding the handle.
    pub secret: Nonce,
    /// Connections that wait for accept; `None` once the listener is closed.
    pub waiting: Mutex<Option<VecDeque<Accepted>>>,
}

/// Work of the service thread that waits for something: `Ok(true)` when it is over.
pub type Step = Box<dyn FnMut() -> bool + Send>;

struct Chore {
    step: Step,
    link: Arc<Link>,
    answer: Message,
}

/// What the service thread shares with the others.
pub struct Inner {
    epoll: Epoll,
    wake: EventFd,
    socket: OwnedFd,
    /// This process's name.
    pub nonce: Nonce,
    links: Mutex<HashMap<u64, Arc<Link>>>,
    by_peer: Mutex<HashMap<Nonce, Arc<Link>>>,
    listeners: Mutex<HashMap<u64, Arc<Listener>>>,
    chores: Mutex<Vec<Chore>>,
    next_id: AtomicU64,
    retry: AtomicBool,
    stop: AtomicBool,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("nonce", &self.nonce)
            .finish_non_exhaustive()
    }
}

impl Inner {
    fn wake(&self) {
        let _ = self.wake.write(1);
    }

    fn chore(&self, step: Step, link: Arc<Link>, answer: Message) {
        lock(&self.chores).push(Chore { step, link, answer });
    }

    /// One round of what waits; whether anything still does.
    fn run_chores(&self) -> bool {
        let mut chores = std::mem::take(&mut *lock(&self.chores));
        chores.retain_mut(|c| {
            // A step that panics is over: its answer must not be waited for in vain.
            let step = std::panic::AssertUnwindSafe(|| (c.step)());
            let over = std::panic::catch_unwind(step).unwrap_or(true);
            if over {
                c.link.send(&c.answer, Vec::new());
            }
            !over
        });
        let mut all = lock(&self.chores);
        all.append(&mut chores);
        !all.is_empty()
    }

    fn accept_links(self: &Arc<Inner>) {
        loop {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            match accept4(self.socket.as_raw_fd(), flags) {
                Ok(raw) => {
                    // SAFETY: the kernel has just made the descriptor for us.
                    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
                    let Ok(cred) = getsockopt(&fd, sockopt::PeerCredentials) else {
                        continue;
                    };
                    if !same_user(cred.uid()) {
                        // Said by closing; the other side knows the cause.
                        continue;
                    }
                    let own = cred.pid() == std::process::id() as i32;
                    match Link::new(self, fd, false, own) {
                        // What came before it was watched gives an edge as well.
                        Ok(_) => {}
                        Err(e) => log::warn!("a peer process could not be served: {e}"),
                    }
                }
                Err(Errno::EINTR | Errno::ECONNABORTED) => {}
                Err(Errno::EAGAIN) => return,
                Err(e) => {
                    log::warn!(
                        "accepting a peer process failed: {} ({e:?}){}",
                        e.desc(),
                        if e == Errno::EMFILE {
                            "; raise the limit of open files (ulimit -n)"
                        } else {
                            ""
                        }
                    );
                    // The listener is level-triggered: do not spin on it.
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            }
        }
    }

    fn read_link(self: &Arc<Inner>, link: &Arc<Link>) {
        loop {
            match link.receive() {
                Received::Nothing => return,
                Received::Again => {}
                Received::End(why) => return link.die(&why),
                Received::Message(m, fds, cut) => {
                    link.slow.store(false, Ordering::Relaxed);
                    if let Err(e) = link.handle(self, m, fds, cut) {
                        log::warn!("the link to {} ends: {e}", link.peer);
                        return link.die(e.text());
                    }
                }
            }
        }
    }

    fn serve(self: &Arc<Inner>) {
        let mut busy_rounds = 0u32;
        while !self.stop.load(Ordering::Acquire) {
            let waiting = self.run_chores();
            let retry = self.retry.swap(false, Ordering::AcqRel);
            let timeout = if waiting && busy_rounds < 32 {
                // A copy in flight is over in microseconds, mostly.
                busy_rounds += 1;
                std::thread::sleep(Duration::from_micros(20));
                EpollTimeout::ZERO
            } else if waiting || retry {
                EpollTimeout::from(1u8)
            } else {
                busy_rounds = 0;
                EpollTimeout::NONE
            };
            self.attend(timeout, retry);
        }
    }

    /// Acts on what happens, waiting for `timeout` at most. `retry`: some messages could not be sent.
    fn attend(self: &Arc<Inner>, timeout: EpollTimeout, retry: bool) {
        let mut events = [EpollEvent::empty(); 64];
        let n = match self.epoll.wait(&mut events, timeout) {
            Ok(n) => n,
            Err(Errno::EINTR) => return,
            Err(e) => {
                log::warn!("the link thread cannot wait for events: {}", e.desc());
                std::thread::sleep(Duration::from_millis(10));
                return;
            }
        };
        if retry {
            let links: Vec<_> = lock(&self.links).values().cloned().collect();
            for l in links {
                l.flush(&mut lock(&l.out));
            }
        }
        for e in &events[..n] {
            match e.data() {
                TOKEN_LISTENER => self.accept_links(),
                TOKEN_WAKE => {
                    let _ = self.wake.read();
                }
                token => {
                    let Some(link) = lock(&self.links).get(&(token & !PROCESS_BIT)).cloned() else {
                        continue;
                    };
                    if token & PROCESS_BIT == 0 {
                        link.flush(&mut lock(&link.out));
                    }
                    self.read_link(&link);
                    if token & PROCESS_BIT != 0 {
                        link.die("its process has ended");
                    }
                }
            }
        }
    }
}

/// The service of this process: its listener, its links, and the thread that serves them.
#[derive(Debug)]
pub struct Service {
    inner: Arc<Inner>,
    thread: Thread,
}

static SERVICE: Mutex<Weak<Service>> = Mutex::new(Weak::new());

impl Service {
    /// The service of this process; starts it if there is none.
    pub fn get() -> Result<Arc<Service>> {
        of_process(&SERVICE, |s| s.thread.pid(), Service::start)
    }

    fn start() -> Result<Service> {
        let mut service = Service::by_hand()?;
        let shared = service.inner.clone();
        service.thread = Thread::start("vccl-link", move || {
            let _relaxed = Relaxed::begin();
            ON_LINK_THREAD.set(true);
            // A panic must not leave connections waiting for ever.
            while std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shared.serve())).is_err()
            {
                log::warn!("the link thread failed (a fault of vccl's) and goes on");
            }
        })?;
        Ok(service)
    }

    /// One without its thread.
    pub(crate) fn by_hand() -> Result<Service> {
        let sys = |what: &'static str| move |e| Error::system(what, e);
        let nonce = random();
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(sys("epoll_create1"))?;
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(sys("eventfd"))?;
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
            .map_err(sys("making a Unix socket"))?;
        bind(fd.as_raw_fd(), &address(&nonce)).map_err(sys("binding a Unix socket"))?;
        listen(&fd, Backlog::MAXALLOWABLE).map_err(sys("listening on a Unix socket"))?;
        epoll
            .add(&fd, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_LISTENER))
            .and_then(|()| epoll.add(&wake, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_WAKE)))
            .map_err(sys("epoll_ctl"))?;
        let inner = Arc::new(Inner {
            epoll,
            wake,
            socket: fd,
            nonce,
            links: Mutex::default(),
            by_peer: Mutex::default(),
            listeners: Mutex::default(),
            chores: Mutex::default(),
            next_id: AtomicU64::new(FIRST_LINK),
            retry: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        Ok(Service {
            inner,
            thread: Thread::none(),
        })
    }

    /// What its thread does in a round, without waiting.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn round(&self) {
        self.inner.run_chores();
        let retry = self.inner.retry.swap(false, Ordering::AcqRel);
        self.inner.attend(EpollTimeout::ZERO, retry);
    }

    /// How many links it has.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn links(&self) -> usize {
        lock(&self.inner.links).len()
    }

    /// This process's name.
    pub fn nonce(&self) -> &Nonce {
        &self.inner.nonce
    }

    /// A new listener.
    pub fn listen(&self) -> Arc<Listener> {
        let l = Arc::new(Listener {
            id: self.inner.next_id.fetch_add(1, Ordering::Relaxed),
            secret: random(),
            waiting: Mutex::new(Some(VecDeque::new())),
        });
        lock(&self.inner.listeners).insert(l.id, l.clone());
        l
    }

    /// Ends a listener; gives the connections that nobody accepted.
    pub fn unlisten(&self, l: &Listener) -> VecDeque<Accepted> {
        lock(&self.inner.listeners).remove(&l.id);
        lock(&l.waiting).take().unwrap_or_default()
    }

    /// The link to the process `peer`; connects if there is none. `None`: the peer has too many
    /// waiting connections, try again.
    pub fn link_to(&self, peer: &Nonce) -> Result<Option<Arc<Link>>> {
        let mut by_peer = lock(&self.inner.by_peer);
        if let Some(l) = by_peer.get(peer) {
            return Ok(Some(l.clone()));
        }
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
            .map_err(|e| Error::system("making a Unix socket", e))?;
        match connect(fd.as_raw_fd(), &address(peer)) {
            Ok(()) => {}
            Err(Errno::EAGAIN | Errno::EINTR | Errno::EINPROGRESS) => return Ok(None),
            Err(Errno::ECONNREFUSED | Errno::ENOENT) => {
                return Err(Error::remote("its Unix socket cannot be reached"))
            }
            Err(e) => return Err(Error::system("connecting to the peer's Unix socket", e)),
        }
        let cred = getsockopt(&fd, sockopt::PeerCredentials)
            .map_err(|e| Error::system("reading the credentials of a peer process", e))?;
        if !same_user(cred.uid()) {
            return Err(Error::remote(format!(
                "its process runs as user {}, this one as user {}: the ranks of a job run as one user",
                cred.uid(),
                nix::unistd::geteuid()
            )));
        }
        let link = Link::new(&self.inner, fd, true, *peer == self.inner.nonce)?;
        let hello = Message::Hello {
            version: PROTOCOL,
            target: *peer,
            source: self.inner.nonce,
        };
        link.send(&hello, Vec::new());
        by_peer.insert(*peer, link.clone());
        Ok(Some(link))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let inner = &self.inner;
        let ours = self.thread.end(|| {
            inner.stop.store(true, Ordering::Release);
            inner.wake();
        });
        if !ours {
            return;
        }
        let links = std::mem::take(&mut *lock(&self.inner.links));
        lock(&self.inner.by_peer).clear();
        drop(links);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::fcntl::OFlag;
    use std::fs::File;
    use std::io::Read;

    /// A process that connects to a service, and sends a packet with descriptors.
    fn stranger(service: &Service, packet: &[u8], fds: &[RawFd]) -> OwnedFd {
        let flags = SockFlag::SOCK_CLOEXEC;
        let s = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        connect(s.as_raw_fd(), &address(service.nonce())).unwrap();
        let iov = [IoSlice::new(packet)];
        let rights = [ControlMessage::ScmRights(fds)];
        sendmsg::<()>(s.as_raw_fd(), &iov, &rights, MsgFlags::empty(), None).unwrap();
        s
    }

    #[test]
    fn descriptors_that_nobody_wants_are_closed() {
        let service = Service::by_hand().unwrap();
        for (packet, n) in [
            (Message::Welcome.encode(), 1),
            (Message::Welcome.encode(), MAX_FDS),
            // More than there is room for.
            (Message::Welcome.encode(), MAX_FDS + 16),
            (b"what?".to_vec(), MAX_FDS + 16),
            (vec![0; MAX_PACKET + 1], 3),
        ] {
            let flags = OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
            let (all_closed, end) = nix::unistd::pipe2(flags).unwrap();
            let _s = stranger(&service, &packet, &vec![end.as_raw_fd(); n]);
            drop(end);
            // One to accept it, one to read.
            service.inner.attend(EpollTimeout::ZERO, false);
            service.inner.attend(EpollTimeout::ZERO, false);
            let read = File::from(all_closed).read(&mut [0]);
            assert_eq!(read.ok(), Some(0), "{n} with {} bytes", packet.len());
        }
    }
}
