//! The receiving end.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::helpers::{Helpers, WORTH};
use super::service::Service;
use super::wire::{kind, Frame, Post, FIRST, FRAME_LEN, POST_LEN};
use super::{helper_threads, is_dead, lost, receive, transmit, Moved, Side, POLL_BYTES, RING};
use crate::error::{Error, Result};
use crate::gate::Gate;
use crate::transport::staging::CHUNKS;
use crate::transport::{close_deadline, does_not_fit, outside, End, Memory, RecvEnd, Region};

/// What is read ahead of a socket: heads of frames, and whole small messages.
const AHEAD: usize = 16 << 10;
/// How long the other sockets may go on after one has broken: what a sender completed before it died may
/// still be on its way there.
const LAST_WORDS: Duration = Duration::from_secs(2);
const NOBODY: u8 = u8::MAX;

/// The bytes of the frame that is being read.
#[derive(Clone, Copy, Debug)]
struct Payload {
    request: usize,
    /// Where the next of them goes.
    addr: u64,
    left: u64,
    /// It goes into a GPU: by way of a chunk, once there is one.
    device: bool,
    chunk: Option<(usize, usize)>,
}

/// What a chunk is used for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Use {
    #[default]
    Free,
    /// It is read into.
    Filling,
    /// The copy out of it is in flight.
    Copying,
}

#[derive(Clone, Copy, Default, Debug)]
struct Chunk {
    used: Use,
    step: u32,
    request: usize,
    len: u64,
}

/// Why nothing more comes from a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Over {
    /// The sender closed it, behind a whole frame.
    InOrder,
    /// It broke; with the errno, if there is one.
    Broken(Option<i32>),
}

#[derive(Debug)]
struct In {
    index: usize,
    socket: Arc<TcpStream>,
    /// A helper reads from it.
    helped: bool,
    ahead: Box<[u8; AHEAD]>,
    from: usize,
    to: usize,
    payload: Option<Payload>,
    over: Option<Over>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Request {
    live: bool,
    seq: u32,
    tag: u32,
    addr: u64,
    capacity: u64,
    region: u32,
    /// Bytes of the message, once its first frame has come.
    total: Option<u64>,
    /// Bytes that its frames so far have or will bring, and a sum over where they lie (`covers`).
    promised: u64,
    places: u64,
    got: u64,
    /// It goes into a GPU.
    device: bool,
    /// Bytes that are where they belong.
    arrived: u64,
    /// Bytes of a message that does not fit.
    too_large: Option<u64>,
}

#[derive(Debug)]
struct State {
    /// Threads that read large payloads, once there was one; 0: none ever.
    threads: usize,
    helpers: Option<Helpers>,
    needs_help: bool,
    ins: Box<[In]>,
    requests: [Request; RING],
    by_slot: [u8; RING],
    chunks: [Chunk; CHUNKS],
    next: u32,
    posts: [u8; RING * POST_LEN],
    have: usize,
    /// When the first socket broke, and why.
    broken: Option<(Instant, Option<i32>)>,
    /// The sender has been told that nothing is read any more.
    hung_up: bool,
    keys: RandomState,
}

impl State {
    #[cold]
    fn broke(&mut self, errno: Option<i32>) {
        self.broken.get_or_insert_with(|| (Instant::now(), errno));
    }

    /// Reads no more, and lets the sender know.
    #[cold]
    fn hang_up(&mut self) {
        if !std::mem::replace(&mut self.hung_up, true) {
            if let Some(h) = &self.helpers {
                h.halt();
            }
            for i in self.ins.iter() {
                let _ = i.socket.shutdown(Shutdown::Both);
            }
        }
    }

    fn copies(&self) -> bool {
        self.chunks.iter().any(|c| c.used == Use::Copying)
    }

    /// Why what has not come never will, if that is so; `idle`: nothing came just now.
    fn hopeless(&self, idle: bool) -> Option<Option<i32>> {
        if self.ins.iter().all(|i| i.over.is_some()) {
            return Some(self.broken.and_then(|(_, errno)| errno));
        }
        match self.broken {
            Some((since, errno)) if idle && !self.copies() && since.elapsed() > LAST_WORDS => {
                Some(errno)
            }
            _ => None,
        }
    }
}

/// What a socket from which no bytes came is over with.
fn broken(m: Moved) -> Option<Over> {
    match m {
        Moved::Bytes(_) | Moved::Nothing => None,
        Moved::End => Some(Over::Broken(None)),
        Moved::Failed(errno) => Some(Over::Broken(Some(errno))),
    }
}

/// Counts a frame that is a part of a message in; `false`: it is the last, and they overlap.
///
/// Frames that have the message's length together cover it just when every one begins where another ends,
/// but for the first and the last. So sums of a secret function of the places tell, whatever the order, and a
/// sender that does not know it cannot make them agree.
fn covers(keys: &RandomState, r: &mut Request, f: &Frame) -> bool {
    let at = |place: u64| keys.hash_one(place);
    r.places = r
        .places
        .wrapping_add(at(f.offset + f.len))
        .wrapping_sub(at(f.offset));
    r.promised < f.total || r.places == at(f.total).wrapping_sub(at(0))
}

/// The receiving end of a connection.
#[derive(Debug)]
pub struct RecvConnection {
    side: Side,
    gate: Gate<State>,
}

impl RecvConnection {
    /// The end of a connection that was accepted.
    pub fn new(service: Arc<Service>, sockets: Vec<TcpStream>, peer: SocketAddr) -> RecvConnection {
        RecvConnection::with_threads(service, sockets, peer, helper_threads())
    }

    /// With so many threads that help; 0: none.
    pub fn with_threads(
        service: Arc<Service>,
        sockets: Vec<TcpStream>,
        peer: SocketAddr,
        threads: usize,
    ) -> RecvConnection {
        let ins = sockets
            .into_iter()
            .enumerate()
            .map(|(index, socket)| In {
                index,
                socket: Arc::new(socket),
                helped: false,
                ahead: Box::new([0; AHEAD]),
                from: 0,
                to: 0,
                payload: None,
                over: None,
            })
            .collect();
        RecvConnection {
            side: Side::new(service, format!("connection from {peer}")),
            gate: Gate::new(State {
                threads,
                helpers: None,
                needs_help: false,
                ins,
                requests: [Request::default(); RING],
                by_slot: [NOBODY; RING],
                chunks: [Chunk::default(); CHUNKS],
                next: FIRST,
                posts: [0; RING * POST_LEN],
                have: 0,
                broken: None,
                hung_up: false,
                keys: RandomState::new(),
            }),
        }
    }

    #[cold]
    fn breach(&self, what: &str) -> Error {
        self.side.fail(Error::remote(format!(
            "{}: the peer breaks the protocol: {what}",
            self.side.peer
        )))
    }

    /// Sends the posts that the socket takes.
    #[inline]
    fn flush(&self, st: &mut State) {
        while st.have > 0 {
            // SAFETY: no bytes but the slice's.
            match unsafe { transmit(&st.ins[0].socket, &st.posts[..st.have], 0, 0) } {
                Moved::Nothing | Moved::End => return,
                // The sender may have closed in order; what it sent before counts.
                Moved::Failed(errno) => {
                    st.have = 0;
                    st.broke(Some(errno));
                }
                Moved::Bytes(n) => {
                    st.posts.copy_within(n..st.have, 0);
                    st.have -= n;
                }
            }
        }
    }

    /// Takes in what has come: how many bytes.
    #[inline]
    fn progress(&self, st: &mut State) -> Result<usize> {
        self.flush(st);
        let mut ins = std::mem::take(&mut st.ins);
        let r = self.read(&mut ins, st);
        st.ins = ins;
        r
    }

    #[inline]
    fn read(&self, ins: &mut [In], st: &mut State) -> Result<usize> {
        self.unstage(st);
        if std::mem::take(&mut st.needs_help) {
            let started = Helpers::start(ins.iter().map(|i| &i.socket), st.threads, false);
            match started {
                Ok(h) => st.helpers = Some(h),
                Err(e) => {
                    log::warn!("{}: goes on without helping threads: {e}", self.side.peer);
                    st.threads = 0;
                }
            }
        }
        let mut all = 0;
        for i in ins.iter_mut() {
            let mut taken = 0;
            while taken < POLL_BYTES && i.over.is_none() {
                match self.step(i, st)? {
                    0 => break,
                    n => taken += n,
                }
            }
            if let Some(Over::Broken(errno)) = i.over {
                st.broke(errno);
            }
            all += taken;
        }
        Ok(all)
    }

    /// Frees the chunks whose copies are over.
    #[inline]
    fn unstage(&self, st: &mut State) {
        let Some(staging) = self.side.staging.get() else {
            return;
        };
        for (i, c) in st.chunks.iter_mut().enumerate() {
            if c.used == Use::Copying && staging.is_over(i, c.step) {
                c.used = Use::Free;
                st.requests[c.request].arrived += c.len;
            }
        }
    }

    /// Bytes of a frame: how many came.
    fn payload(&self, i: &mut In, p: &mut Payload, st: &mut State) -> Result<usize> {
        let (addr, most) = match (p.device, p.chunk, self.side.staging.get()) {
            (false, ..) => (p.addr, p.left),
            (true, _, None) => return Err(self.breach("GPU memory without staging")),
            (true, Some((c, have)), Some(s)) => (
                s.host(c) + have as u64,
                p.left.min((s.chunk() - have) as u64),
            ),
            (true, None, Some(s)) => {
                let Some(c) = st.chunks.iter().position(|c| c.used == Use::Free) else {
                    return Ok(0);
                };
                st.chunks[c].used = Use::Filling;
                p.chunk = Some((c, 0));
                (s.host(c), p.left.min(s.chunk() as u64))
            }
        };
        let ahead = (i.to - i.from) as u64;
        let helps = ahead == 0 && st.threads > 0 && most >= WORTH;
        let n = match (ahead, &st.helpers) {
            (_, Some(h)) if i.helped => match h.moved(i.index) {
                None => return Ok(0),
                Some(m) => {
                    i.helped = false;
                    match m {
                        Moved::Bytes(n) => n,
                        none => {
                            i.over = broken(none);
                            return Ok(0);
                        }
                    }
                }
            },
            (0, Some(h)) if helps => {
                // SAFETY: as below; whoever fails the connection halts the helpers first.
                unsafe { h.give(i.index, &[], addr, most) };
                i.helped = true;
                return Ok(0);
            }
            (0, _) => {
                st.needs_help |= helps;
                // SAFETY: the range lies in a chunk of ours or in the buffer of a live receive (`frame`
                // checks it), whose memory stays registered until it is over or the connection has failed.
                match unsafe { receive(&i.socket, addr, most as usize) } {
                    Moved::Bytes(n) => n,
                    none => {
                        i.over = broken(none);
                        return Ok(0);
                    }
                }
            }
            (_, _) => {
                let n = ahead.min(most) as usize;
                // SAFETY: as above; the source is a buffer of ours that holds so much.
                unsafe {
                    std::ptr::copy_nonoverlapping(i.ahead[i.from..].as_ptr(), addr as *mut u8, n)
                };
                i.from += n;
                n
            }
        };
        p.left -= n as u64;
        let r = &mut st.requests[p.request];
        r.got += n as u64;
        match (&mut p.chunk, self.side.staging.get()) {
            (Some((c, have)), Some(s)) => {
                *have += n;
                if *have == s.chunk() || p.left == 0 {
                    let (c, have) = (*c, *have);
                    let step = st.chunks[c].step.wrapping_add(1);
                    st.chunks[c] = Chunk {
                        used: Use::Copying,
                        step,
                        request: p.request,
                        len: have as u64,
                    };
                    // SAFETY: the range lies in the buffer of a live receive, and `deregister` waits for
                    // copies into it.
                    unsafe { s.copy(c, p.addr, have, false, step) }
                        .map_err(|e| self.side.copy_failed(e))?;
                    p.addr += have as u64;
                    p.chunk = None;
                }
            }
            _ => {
                p.addr += n as u64;
                r.arrived += n as u64;
            }
        }
        Ok(n)
    }

    /// One step on one socket: bytes that moved, or 0.
    fn step(&self, i: &mut In, st: &mut State) -> Result<usize> {
        if let Some(mut p) = i.payload {
            let n = self.payload(i, &mut p, st)?;
            i.payload = (p.left > 0).then_some(p);
            return Ok(n);
        }
        if i.to - i.from >= FRAME_LEN {
            let head: [u8; FRAME_LEN] = i.ahead[i.from..i.from + FRAME_LEN]
                .try_into()
                .expect("32 bytes");
            i.from += FRAME_LEN;
            self.frame(i, &head, st)?;
            return Ok(FRAME_LEN);
        }
        i.ahead.copy_within(i.from..i.to, 0);
        i.to -= i.from;
        i.from = 0;
        let room = &mut i.ahead[i.to..];
        // SAFETY: a buffer of ours.
        match unsafe { receive(&i.socket, room.as_mut_ptr() as u64, room.len()) } {
            Moved::Bytes(n) => {
                i.to += n;
                Ok(n)
            }
            Moved::End if i.to == 0 => {
                i.over = Some(Over::InOrder);
                Ok(0)
            }
            none => {
                i.over = broken(none);
                Ok(0)
            }
        }
    }

    fn frame(&self, i: &mut In, head: &[u8; FRAME_LEN], st: &mut State) -> Result<()> {
        let Some(f) = Frame::decode(head) else {
            return Err(self.breach("a frame contradicts itself"));
        };
        let index = st.by_slot[f.seq as usize % RING] as usize;
        let r = match st.requests.get_mut(index) {
            Some(r) if r.live && r.seq == f.seq && r.too_large.is_none() => r,
            _ => return Err(self.breach("a frame is for a receive that is not posted")),
        };
        if f.kind == kind::TOO_LARGE {
            if f.total <= r.capacity || r.total.is_some() {
                return Err(self.breach("a message is said not to fit that does"));
            }
            r.too_large = Some(f.total);
            return Ok(());
        }
        if f.total > r.capacity || r.total.is_some_and(|t| t != f.total) {
            return Err(self.breach("a frame is of another message than its receive's"));
        }
        let known = r.total.replace(f.total).is_some();
        if f.len > f.total - r.promised || (f.len == 0 && (f.total > 0 || known)) {
            return Err(self.breach("a frame has more bytes than its message, or none"));
        }
        // Before the last byte is written the receive cannot be over, and its memory not be gone.
        r.promised += f.len;
        if f.len != f.total && !covers(&st.keys, r, &f) {
            return Err(self.breach("the frames of a message overlap"));
        }
        if f.len > 0 {
            i.payload = Some(Payload {
                request: index,
                addr: r.addr + f.offset,
                left: f.len,
                device: r.device,
                chunk: None,
            });
        }
        Ok(())
    }

    /// Why the connection has failed, if it has; then nothing may be read any more.
    #[inline]
    fn trouble(&self, st: &mut State) -> Result<()> {
        let r = self.side.trouble();
        if r.is_err() {
            st.hang_up();
        }
        r
    }

    fn outcome(&self, r: &Request) -> Result<Option<usize>> {
        if let Some(size) = r.too_large {
            return Err(does_not_fit(&self.side.peer, r.capacity, size));
        }
        Ok((r.total == Some(r.arrived)).then_some(r.arrived as usize))
    }

    /// Whether a receive with the same tag that was posted before is not over: messages that take different
    /// sockets overtake each other, and nobody shall see that.
    fn is_overtaking(st: &State, r: &Request) -> bool {
        st.requests.iter().any(|o| {
            o.live
                && o.tag == r.tag
                && o.seq != r.seq
                && r.seq.wrapping_sub(o.seq) < RING as u32
                && o.total != Some(o.arrived)
                && o.too_large.is_none()
        })
    }
}

impl End for RecvConnection {
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
        if st.requests.iter().any(|r| r.live && r.region == region.id) {
            self.side.taken_back("receives into it were posted");
        }
        // Receives that ended in an error may have copies in flight.
        if self.trouble(st).is_err() || st.broken.is_some() {
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
        // Once it has failed nothing is written any more: the memory may be gone.
        let came = self.side.trouble().and_then(|()| self.progress(st));
        let trouble = match came {
            Ok(n) => Ok(n == 0),
            Err(e) => {
                st.hang_up();
                Err(e)
            }
        };
        let outcome = match self.outcome(&st.requests[index]) {
            Ok(None) => match trouble {
                Err(e) => Err(e),
                // All of it has come, and is on its way into the GPU.
                Ok(_) if st.requests[index].total == Some(st.requests[index].got) => {
                    return Ok(None)
                }
                Ok(idle) => match st.hopeless(idle) {
                    None => return Ok(None),
                    Some(errno) if st.ins.iter().all(|i| i.over.is_some()) => {
                        st.broke(errno);
                        Err(lost(&self.side.peer, errno))
                    }
                    Some(errno) => {
                        let e = self.side.lost(errno);
                        st.hang_up();
                        Err(e)
                    }
                },
            },
            Ok(Some(_)) if trouble.is_ok() && Self::is_overtaking(st, &st.requests[index]) => {
                return Ok(None)
            }
            r => r,
        };
        let r = &mut st.requests[index];
        r.live = false;
        st.by_slot[r.seq as usize % RING] = NOBODY;
        outcome
    }

    fn check(&self) -> Result<()> {
        let Some(mut st) = self.gate.enter()? else {
            return Ok(());
        };
        let st = &mut *st;
        if st
            .ins
            .iter()
            .any(|i| i.over.is_none() && is_dead(&i.socket))
        {
            self.side.lost(Some(libc::ETIMEDOUT));
        }
        let copies = self.side.check_copies();
        self.trouble(st).and(copies)
    }

    fn close(&mut self) -> Result<()> {
        let deadline = close_deadline();
        if let Some(mut st) = self.gate.enter_by(deadline) {
            st.helpers = None;
            st.ins = Box::default();
        }
        self.side.drain(deadline);
        Ok(())
    }

    fn describe(&self) -> String {
        self.side.peer.clone()
    }
}

impl RecvEnd for RecvConnection {
    #[inline]
    fn recv(&self, index: usize, addr: u64, len: u64, tag: u32, region: &Region) -> Result<bool> {
        if !region.holds(addr, len) {
            return Err(outside(addr, len, region).context(&self.side.peer));
        }
        let Some(mut st) = self.gate.enter()? else {
            return Ok(false);
        };
        let st = &mut *st;
        self.trouble(st)?;
        let seq = st.next;
        if st.by_slot[seq as usize % RING] != NOBODY || st.have + POST_LEN > st.posts.len() {
            return Ok(false);
        }
        st.by_slot[seq as usize % RING] = index as u8;
        st.requests[index] = Request {
            live: true,
            seq,
            tag,
            addr,
            capacity: len,
            region: region.id,
            device: matches!(region.memory, Memory::Device(_)),
            ..Request::default()
        };
        st.next = seq.wrapping_add(1);
        let post = Post {
            seq,
            tag,
            capacity: len,
        };
        st.posts[st.have..st.have + POST_LEN].copy_from_slice(&post.encode());
        st.have += POST_LEN;
        self.flush(st);
        Ok(true)
    }
}
