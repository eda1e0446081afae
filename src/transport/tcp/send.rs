//! The sending end.

use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;

use super::helpers::{Helpers, WORTH};
use super::service::Service;
use super::wire::{kind, Frame, Post, FIRST, FRAME_LEN, POST_LEN};
use super::{
    helper_threads, is_dead, is_over, limit_unsent, receive, transmit, Moved, Side, POLL_BYTES,
    RING,
};
use crate::error::{Error, Result};
use crate::gate::Gate;
use crate::transport::staging::{CHUNKS, SMALL};
use crate::transport::{close_deadline, outside, too_large, End, Memory, Region, SendEnd};

/// A message is split over sockets only in parts of this size or more.
const STRIPE: u64 = 64 << 10;

/// Bytes that a helper is given at most. Posts are read between two ranges: while a helper sends over the first
/// socket the kernel keeps others off it, and the polling thread would wait there for what is a long time.
const GIVEN: u64 = 1 << 20;

/// Sends in a row that find no receive, between two looks whether the peer's host is dead.
const WAITS_BETWEEN_LOOKS: u32 = 1 << 12;

/// A frame on its way.
#[derive(Debug)]
struct Item {
    request: usize,
    head: [u8; FRAME_LEN],
    head_sent: usize,
    addr: u64,
    len: u64,
    /// The chunk that holds its bytes.
    chunk: Option<usize>,
}

impl Item {
    fn new(request: usize, frame: Frame, addr: u64, chunk: Option<usize>) -> Item {
        Item {
            request,
            head: frame.encode(),
            head_sent: 0,
            addr,
            len: frame.len,
            chunk,
        }
    }
}

/// A message out of a GPU that is not all in chunks yet.
#[derive(Clone, Copy, Debug)]
struct Staged {
    request: usize,
    seq: u32,
    addr: u64,
    total: u64,
    copied: u64,
}

/// What a chunk is used for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Use {
    #[default]
    Free,
    /// The copy into it is in flight.
    Copying,
    /// A frame is sent out of it, or will be once a socket has nothing else to send.
    Sending,
}

#[derive(Clone, Copy, Default, Debug)]
struct Chunk {
    used: Use,
    step: u32,
    request: usize,
    seq: u32,
    total: u64,
    offset: u64,
    len: u64,
}

#[derive(Debug)]
struct Out {
    socket: Arc<TcpStream>,
    /// A helper sends the payload at the queue's head.
    helped: bool,
    queue: VecDeque<Item>,
}

impl Out {
    /// Counts what has gone out of the frame at the queue's head.
    #[inline]
    fn sent(&mut self, n: usize, requests: &mut [Request], chunks: &mut [Chunk]) {
        let Some(item) = self.queue.front_mut() else {
            return;
        };
        let of_head = n.min(FRAME_LEN - item.head_sent);
        item.head_sent += of_head;
        item.addr += (n - of_head) as u64;
        item.len -= (n - of_head) as u64;
        if item.head_sent == FRAME_LEN && item.len == 0 {
            requests[item.request].frames -= 1;
            if let Some(c) = item.chunk {
                chunks[c].used = Use::Free;
            }
            self.queue.pop_front();
        }
    }
}

#[derive(Clone, Copy, Default, Debug)]
struct Request {
    live: bool,
    /// Its number among the sends.
    order: u32,
    /// Frames that are not out yet.
    frames: u32,
    len: u64,
    region: u32,
    /// The receive that it did not fit.
    capacity: Option<u64>,
}

#[derive(Debug)]
struct State {
    /// Threads that send large payloads, once there was one; 0: none ever.
    threads: usize,
    helpers: Option<Helpers>,
    outs: Box<[Out]>,
    /// Number of the next send.
    order: u32,
    /// Which socket the next small message takes.
    turn: usize,
    requests: [Request; RING],
    staged: VecDeque<Staged>,
    chunks: [Chunk; CHUNKS],
    /// Those that are being filled, in the order in which they will be full.
    filling: VecDeque<usize>,
    /// The frames of those that are full. A socket takes one when it has nothing else to send, so that the slow
    /// ones take fewer.
    full: VecDeque<Item>,
    posts: VecDeque<Post>,
    /// Number of the next post that will come.
    next: u32,
    /// Bytes of a post that has not come whole.
    bytes: [u8; RING * POST_LEN],
    have: usize,
    /// The receiver has been told that nothing more is sent.
    hung_up: bool,
    /// Sends that found no receive.
    waits: u32,
    /// Something went out since the last look whether all is well.
    moved: bool,
}

/// The sending end of a connection.
#[derive(Debug)]
pub struct SendConnection {
    side: Side,
    gate: Gate<State>,
    closed: bool,
}

impl SendConnection {
    /// The end of a connection that was answered.
    pub fn new(service: Arc<Service>, sockets: Vec<TcpStream>, peer: SocketAddr) -> SendConnection {
        SendConnection::with_threads(service, sockets, peer, helper_threads())
    }

    /// With so many threads that help; 0: none.
    pub fn with_threads(
        service: Arc<Service>,
        sockets: Vec<TcpStream>,
        peer: SocketAddr,
        threads: usize,
    ) -> SendConnection {
        limit_unsent(&sockets, threads);
        let outs = sockets
            .into_iter()
            .map(|socket| Out {
                socket: Arc::new(socket),
                helped: false,
                queue: VecDeque::with_capacity(RING + 1),
            })
            .collect();
        SendConnection {
            side: Side::new(service, format!("connection to {peer}")),
            gate: Gate::new(State {
                threads,
                helpers: None,
                outs,
                order: 0,
                turn: 0,
                requests: [Request::default(); RING],
                staged: VecDeque::with_capacity(RING),
                chunks: [Chunk::default(); CHUNKS],
                filling: VecDeque::with_capacity(CHUNKS),
                full: VecDeque::with_capacity(CHUNKS),
                posts: VecDeque::with_capacity(RING),
                next: FIRST,
                bytes: [0; RING * POST_LEN],
                have: 0,
                hung_up: false,
                waits: 0,
                moved: false,
            }),
            closed: false,
        }
    }

    /// Sockets that it has.
    pub fn sockets(&mut self) -> usize {
        self.gate
            .enter_by(close_deadline())
            .map_or(0, |st| st.outs.len())
    }

    /// Looks whether the receiver has hung up, or its host is dead. Both wait while a helper sends, so only where
    /// there is reason to.
    #[cold]
    fn look(&self, st: &mut State) -> Result<()> {
        let r = match is_over(&st.outs[0].socket) {
            true => self.read_posts(st),
            false => Ok(()),
        };
        let moved = std::mem::take(&mut st.moved);
        if !moved && st.outs.iter().any(|o| is_dead(&o.socket)) {
            self.side.lost(Some(libc::ETIMEDOUT));
        }
        self.trouble(st).and(r)
    }

    /// Why the connection has failed, if it has.
    #[inline]
    fn trouble(&self, st: &mut State) -> Result<()> {
        st.heed(self.side.trouble())
    }

    /// Takes in what the receiver has posted.
    #[inline]
    fn read_posts(&self, st: &mut State) -> Result<()> {
        loop {
            let room = &mut st.bytes[st.have..];
            // SAFETY: a buffer of ours.
            match unsafe { receive(&st.outs[0].socket, room.as_mut_ptr() as u64, room.len()) } {
                Moved::Nothing => return Ok(()),
                Moved::End => return Err(self.side.lost(None)),
                Moved::Failed(errno) => return Err(self.side.lost(Some(errno))),
                Moved::Bytes(n) => st.have += n,
            }
            let whole = st.have / POST_LEN * POST_LEN;
            for at in (0..whole).step_by(POST_LEN) {
                let p = Post::decode(&st.bytes[at..at + POST_LEN].try_into().expect("16 bytes"));
                if p.seq != st.next || st.posts.len() == RING {
                    return Err(self.side.fail(Error::remote(format!(
                        "{}: the peer breaks the protocol: receive {} is posted where {} should be",
                        self.side.peer, p.seq, st.next
                    ))));
                }
                st.next = st.next.wrapping_add(1);
                st.posts.push_back(p);
            }
            st.bytes.copy_within(whole..st.have, 0);
            st.have -= whole;
        }
    }

    /// Fills free chunks, and finds those that are full.
    #[inline]
    fn stage(&self, st: &mut State) -> Result<()> {
        let Some(staging) = self.side.staging.get() else {
            return Ok(());
        };
        while let Some(m) = st.staged.front_mut() {
            // Any: they are sent in no order.
            let Some(i) = st.chunks.iter().position(|c| c.used == Use::Free) else {
                break;
            };
            let c = &mut st.chunks[i];
            let len = (m.total - m.copied).min(staging.chunk() as u64);
            *c = Chunk {
                used: Use::Copying,
                step: c.step.wrapping_add(1),
                request: m.request,
                seq: m.seq,
                total: m.total,
                offset: m.copied,
                len,
            };
            let from = m.addr + m.copied;
            // SAFETY: the request's memory is registered, and `deregister` waits for copies out of it.
            unsafe { staging.copy(i, from, len as usize, true, c.step) }
                .map_err(|e| self.side.copy_failed(e))?;
            st.filling.push_back(i);
            m.copied += len;
            if m.copied == m.total {
                st.staged.pop_front();
            }
        }
        while let Some(chunk) = st.filling.front().copied() {
            let c = &mut st.chunks[chunk];
            if !staging.is_over(chunk, c.step) {
                break;
            }
            c.used = Use::Sending;
            let frame = Frame {
                kind: kind::DATA,
                seq: c.seq,
                total: c.total,
                offset: c.offset,
                len: c.len,
            };
            let item = Item::new(c.request, frame, staging.host(chunk), Some(chunk));
            st.filling.pop_front();
            st.full.push_back(item);
        }
        Ok(())
    }

    #[cold]
    fn get_help(&self, st: &mut State) {
        match Helpers::start(st.outs.iter().map(|o| &o.socket), st.threads, true) {
            Ok(h) => st.helpers = Some(h),
            Err(e) => {
                log::warn!("{}: goes on without helping threads: {e}", self.side.peer);
                st.threads = 0;
            }
        }
    }

    /// Takes back what the helpers have sent, and what was posted meanwhile.
    #[inline]
    fn collect(&self, st: &mut State) -> Result<()> {
        let (first, failed) = st.take_back();
        if let Some(errno) = failed {
            return Err(self.side.lost(Some(errno)));
        }
        // Only then, and only with more to send: a receiver that has all may have gone.
        if first && (!st.full.is_empty() || st.outs.iter().any(|o| !o.queue.is_empty())) {
            self.read_posts(st)?;
        }
        Ok(())
    }

    /// Sends what the sockets take.
    #[inline]
    fn flush(&self, st: &mut State) -> Result<()> {
        self.collect(st)?;
        let mut needs_help = false;
        for (k, out) in st.outs.iter_mut().enumerate() {
            let mut sent = 0;
            while sent < POLL_BYTES && !out.helped {
                if out.queue.is_empty() {
                    out.queue.extend(st.full.pop_front());
                }
                let Some(item) = out.queue.front_mut() else {
                    break;
                };
                let head = &item.head[item.head_sent..];
                let helps = st.threads > 0 && item.len >= WORTH;
                if helps && st.helpers.is_none() {
                    needs_help = true;
                }
                if let Some(h) = st.helpers.as_ref().filter(|_| helps) {
                    // SAFETY: as below; whoever fails the connection halts the helpers first.
                    unsafe { h.give(k, head, item.addr, item.len.min(GIVEN)) };
                    out.helped = true;
                    break;
                }
                // SAFETY: the request's memory is registered, and stays so until its request is over or the
                // connection has failed: `deregister` sees to that.
                match unsafe { transmit(&out.socket, head, item.addr, item.len as usize) } {
                    Moved::Nothing => break,
                    Moved::End => break,
                    Moved::Failed(errno) => return Err(self.side.lost(Some(errno))),
                    Moved::Bytes(n) => {
                        sent += n;
                        st.moved = true;
                        out.sent(n, &mut st.requests, &mut st.chunks);
                    }
                }
            }
        }
        if needs_help {
            self.get_help(st);
        }
        Ok(())
    }
}

impl State {
    /// Sends no more, and lets the receiver know, behind what has been sent.
    #[cold]
    fn hang_up(&mut self) {
        if !std::mem::replace(&mut self.hung_up, true) {
            if let Some(h) = &self.helpers {
                h.halt();
            }
            // What they have sent counts: it may be all.
            self.take_back();
            self.staged.clear();
            self.full.clear();
            for o in self.outs.iter_mut() {
                o.queue.clear();
                let _ = o.socket.shutdown(Shutdown::Write);
            }
        }
    }

    /// The same, if that is an error.
    #[inline]
    fn heed(&mut self, r: Result<()>) -> Result<()> {
        if r.is_err() {
            self.hang_up();
        }
        r
    }

    /// Takes back what the helpers are done with; whether the first socket is among it, and why one failed.
    #[inline]
    fn take_back(&mut self) -> (bool, Option<i32>) {
        let (mut first, mut failed) = (false, None);
        let Some(h) = &self.helpers else {
            return (first, failed);
        };
        for (k, out) in self.outs.iter_mut().enumerate() {
            if !out.helped {
                continue;
            }
            match h.moved(k) {
                None => continue,
                Some(Moved::Bytes(n)) => {
                    self.moved = true;
                    out.sent(n, &mut self.requests, &mut self.chunks);
                }
                Some(Moved::Failed(errno)) => failed = Some(errno),
                Some(Moved::End | Moved::Nothing) => {}
            }
            out.helped = false;
            first |= k == 0;
        }
        (first, failed)
    }

    /// The caller has counted the frame.
    fn enqueue(&mut self, socket: usize, request: usize, frame: Frame, addr: u64) {
        let item = Item::new(request, frame, addr, None);
        self.outs[socket].queue.push_back(item);
    }

    /// The socket whose turn it is.
    fn turn(&mut self) -> usize {
        let socket = self.turn;
        self.turn = (socket + 1) % self.outs.len();
        socket
    }

    /// A message over as many sockets as it is worth.
    fn split(&mut self, request: usize, seq: u32, addr: u64, total: u64) {
        let n = (total / STRIPE).clamp(1, self.outs.len() as u64);
        let each = total.div_ceil(n);
        for i in 0..n {
            let offset = (i * each).min(total);
            let frame = Frame {
                kind: kind::DATA,
                seq,
                total,
                offset,
                len: each.min(total - offset),
            };
            let socket = self.turn();
            self.requests[request].frames += 1;
            self.enqueue(socket, request, frame, addr + offset);
        }
    }
}

impl End for SendConnection {
    fn register(&self, addr: u64, len: u64, cuda: bool) -> Result<Region> {
        self.side.register(addr, len, cuda)
    }

    fn deregister(&self, region: Region) -> Result<()> {
        let deadline = close_deadline();
        let Some(mut st) = self.gate.enter_by(deadline) else {
            log::warn!("{}: in use as a registration ends", self.side.peer);
            return Ok(());
        };
        let st = &mut *st;
        let uses = |r: &Request| r.live && r.region == region.id && r.frames > 0;
        if st.requests.iter().any(uses) {
            self.side.taken_back("sends out of it were in flight");
        }
        // Sends that ended in an error may have copies in flight.
        if self.trouble(st).is_err() {
            self.side.drain(deadline);
        }
        Ok(())
    }

    #[inline]
    fn poll(&self, index: usize) -> Result<Option<usize>> {
        let Some(mut st) = self.gate.enter()? else {
            return Ok(None);
        };
        let st = &mut *st;
        let trouble = self
            .side
            .trouble()
            .and_then(|()| self.stage(st))
            .and_then(|()| self.flush(st));
        let trouble = st.heed(trouble);
        let r = st.requests[index];
        if r.frames > 0 {
            return match trouble {
                Ok(()) => Ok(None),
                Err(e) => {
                    st.requests[index].live = false;
                    Err(e)
                }
            };
        }
        // Those that take other sockets, or come out of a GPU, may be later; nobody shall see that.
        let older = |o: &Request| {
            o.live
                && o.frames > 0
                && r.order != o.order
                && r.order.wrapping_sub(o.order) < RING as u32
        };
        if trouble.is_ok() && st.requests.iter().any(older) {
            return Ok(None);
        }
        st.requests[index].live = false;
        match r.capacity {
            None => Ok(Some(r.len as usize)),
            Some(capacity) => Err(too_large(&self.side.peer, r.len, capacity)),
        }
    }

    fn check(&self) -> Result<()> {
        let Some(mut st) = self.gate.enter()? else {
            return Ok(());
        };
        let st = &mut *st;
        let r = self.side.trouble();
        match r.and_then(|()| self.side.check_copies()) {
            Ok(()) => self.look(st),
            r => self.trouble(st).and(r),
        }
    }

    fn close(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        let deadline = close_deadline();
        if let Some(mut st) = self.gate.enter_by(deadline) {
            // What was completed counts, whatever else was given up: the receiver can tell half a frame, and
            // half a message.
            st.helpers = None;
            let outs = std::mem::take(&mut st.outs);
            let sockets = Vec::from(outs).into_iter();
            self.side
                .service
                .linger(sockets.filter_map(|o| Arc::into_inner(o.socket)));
        }
        self.side.drain(deadline);
        Ok(())
    }

    fn describe(&self) -> String {
        self.side.peer.clone()
    }
}

impl SendEnd for SendConnection {
    #[inline]
    fn send(&self, index: usize, addr: u64, len: u64, tag: u32, region: &Region) -> Result<bool> {
        if !region.holds(addr, len) {
            return Err(outside(addr, len, region).context(&self.side.peer));
        }
        let Some(mut st) = self.gate.enter()? else {
            return Ok(false);
        };
        let st = &mut *st;
        self.trouble(st)?;
        let find = |st: &State| st.posts.iter().position(|p| p.tag == tag);
        let found = match find(st) {
            Some(i) => Some(i),
            None if st.outs[0].helped => None,
            None => {
                let r = self.read_posts(st);
                st.heed(r)?;
                find(st)
            }
        };
        let Some(post) = found.and_then(|i| st.posts.remove(i)) else {
            // The receiver may wait for messages before this one, and nobody need test them meanwhile.
            let r = self.stage(st).and_then(|()| self.flush(st));
            st.heed(r)?;
            st.waits = st.waits.wrapping_add(1);
            if st.waits % WAITS_BETWEEN_LOOKS == 0 {
                self.look(st)?;
            }
            return Ok(false);
        };
        st.requests[index] = Request {
            live: true,
            order: st.order,
            frames: 0,
            len,
            region: region.id,
            capacity: (len > post.capacity).then_some(post.capacity),
        };
        st.order = st.order.wrapping_add(1);
        if len > post.capacity {
            let frame = Frame {
                kind: kind::TOO_LARGE,
                seq: post.seq,
                total: len,
                offset: 0,
                len: 0,
            };
            st.requests[index].frames = 1;
            st.enqueue(0, index, frame, addr);
        } else if matches!(region.memory, Memory::Device(_)) && len > 0 {
            let chunk = self.side.staging.get().map_or(SMALL, |s| s.chunk()) as u64;
            st.requests[index].frames = len.div_ceil(chunk) as u32;
            st.staged.push_back(Staged {
                request: index,
                seq: post.seq,
                addr,
                total: len,
                copied: 0,
            });
        } else {
            st.split(index, post.seq, addr, len);
        }
        // Trouble here is told by test: the request has begun.
        let _ = self.stage(st).and_then(|()| self.flush(st));
        Ok(true)
    }
}

impl Drop for SendConnection {
    fn drop(&mut self) {
        let _ = self.close();
    }
}
