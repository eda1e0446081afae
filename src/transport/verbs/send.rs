//! The sending end.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use super::rails::{id, Rails, Write, SEND_DEPTH};
use super::wire::{
    done, done_words, load, offset, Descriptor, Imm, DESCRIPTOR_WORDS, FIRST, MAX_PORTS, RING,
    SHORT,
};
use super::{End as VerbsEnd, Routing, BATCH};
use crate::error::Result;
use crate::gate::Gate;
use crate::ibverbs::sys;
use crate::transport::staging::CHUNKS;
use crate::transport::tcp::service::Service;
use crate::transport::{close_deadline, outside, too_large, End, Region, SendEnd};

/// A message is split over queue pairs only in parts of this size or more.
const STRIPE: u64 = 64 << 10;
/// Parts begin at multiples of this.
const ALIGN: u64 = 4096;
/// How long writes may take to be acknowledged by a peer that has closed: it closes as soon as it has the
/// bytes, and its device acknowledges them after that.
const GRACE: Duration = Duration::from_millis(500);
/// Attempts to send that found no receive, between two looks at the connection's health.
const LOOKS: u32 = 64;

/// What a chunk is used for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Use {
    #[default]
    Free,
    /// The copy into it is in flight.
    Copying,
    /// It is written from.
    Writing,
}

#[derive(Clone, Copy, Default, Debug)]
struct Chunk {
    used: Use,
    step: u32,
    request: usize,
    len: u64,
}

/// A message out of a GPU that is not all in chunks yet.
#[derive(Clone, Copy, Debug)]
struct Fill {
    request: usize,
    addr: u64,
    total: u64,
    copied: u64,
    /// Bytes of one chunk at most.
    piece: u64,
}

/// A message that is not all posted yet.
#[derive(Clone, Copy, Debug)]
struct Message {
    request: usize,
    post: Descriptor,
    addr: u64,
    total: u64,
    /// Keys of its memory by port; none: it comes out of chunks.
    keys: Option<[u32; MAX_PORTS]>,
    /// The CPU can read it.
    host: bool,
    /// Bytes posted so far.
    posted: u64,
    /// Direct messages: writes posted so far; else lanes that have been told of the end.
    steps: u64,
    /// Lanes that have a part.
    lanes: usize,
    /// The first of them.
    first: usize,
}

#[derive(Clone, Copy, Default, Debug)]
struct Request {
    live: bool,
    /// Its number among the sends.
    order: u32,
    /// All its writes are posted.
    posted: bool,
    /// Writes posted whose completions have not come.
    writes: u32,
    len: u64,
    region: u32,
    /// The receive that it did not fit.
    capacity: Option<u64>,
}

impl Request {
    #[inline]
    fn is_over(&self) -> bool {
        self.posted && self.writes == 0
    }
}

/// Writes of one queue pair.
#[derive(Clone, Copy, Default, Debug)]
struct Count {
    posted: u32,
    done: u32,
}

#[derive(Debug)]
struct State {
    counts: Box<[Count]>,
    order: u32,
    turn: usize,
    requests: [Request; RING],
    queue: VecDeque<Message>,
    fills: VecDeque<Fill>,
    chunks: [Chunk; CHUNKS],
    fill: usize,
    send: usize,
    /// The receiver's chunks that were used since the start.
    used: u32,
    /// Those of them that it has freed, as far as we know.
    freed: u32,
    posts: VecDeque<Descriptor>,
    /// Number of the next descriptor.
    next: u32,
    idle: u32,
    /// The receiver posts no more.
    over: bool,
    /// Room for completions.
    wcs: Vec<sys::Wc>,
}

/// The sending end of a connection.
#[derive(Debug)]
pub struct SendConnection {
    end: VerbsEnd,
    routing: Routing,
    gate: Gate<State>,
    closed: bool,
}

impl SendConnection {
    pub(super) fn new(
        service: Arc<Service>,
        socket: TcpStream,
        rails: Rails,
        routing: Routing,
        peer: String,
    ) -> SendConnection {
        let counts = vec![Count::default(); rails.lanes().len()].into_boxed_slice();
        SendConnection {
            end: VerbsEnd::new(service, socket, rails, peer),
            routing,
            gate: Gate::new(State {
                counts,
                order: 0,
                turn: 0,
                requests: [Request::default(); RING],
                queue: VecDeque::with_capacity(RING),
                fills: VecDeque::with_capacity(RING),
                chunks: [Chunk::default(); CHUNKS],
                fill: 0,
                send: 0,
                used: 0,
                freed: 0,
                posts: VecDeque::with_capacity(RING),
                next: FIRST,
                idle: 0,
                over: false,
                wcs: vec![sys::Wc::default(); BATCH],
            }),
            closed: false,
        }
    }

    /// Queue pairs that it has.
    pub fn lanes(&self) -> usize {
        self.end.rails.lanes().len()
    }

    /// Takes in what the receiver has posted.
    #[inline]
    fn read_posts(&self, st: &mut State) {
        let ring = &self.end.rails.block().ring;
        while st.posts.len() < RING {
            let slot = &ring[st.next as usize % RING].0;
            if slot[10].load(Ordering::Acquire) != st.next {
                return;
            }
            let words = load::<DESCRIPTOR_WORDS>(slot);
            let Some(d) = Descriptor::of(&words, st.next) else {
                return;
            };
            // The numbers go round; none is 0, which is what an empty slot has.
            st.next = next(st.next);
            st.posts.push_back(d);
        }
    }

    /// Takes in what has completed.
    #[inline]
    fn complete(&self, st: &mut State) -> Result<()> {
        let mut wcs = std::mem::take(&mut st.wcs);
        let completed = self.end.complete(&mut wcs, |wc| {
            let (kind, lane, index, posted) = id::parts(wc.wr_id);
            st.counts[lane].done = posted;
            match kind {
                id::MESSAGE => st.requests[index].writes -= 1,
                id::CHUNK => {
                    let c = &mut st.chunks[index];
                    c.used = Use::Free;
                    st.requests[c.request].writes -= 1;
                }
                _ => {}
            }
            Ok(())
        });
        st.wcs = wcs;
        completed
    }

    /// Fills free chunks.
    #[inline]
    fn fill(&self, st: &mut State) -> Result<()> {
        let Some(staging) = self.end.side.staging.get() else {
            return Ok(());
        };
        while let Some(m) = st.fills.front_mut() {
            let c = &mut st.chunks[st.fill];
            if c.used != Use::Free {
                break;
            }
            let len = (m.total - m.copied).min(m.piece);
            *c = Chunk {
                used: Use::Copying,
                step: c.step.wrapping_add(1),
                request: m.request,
                len,
            };
            let from = m.addr + m.copied;
            // SAFETY: the request's memory is registered, and `deregister` waits for copies out of it.
            unsafe { staging.copy(st.fill, from, len as usize, true, c.step) }
                .map_err(|e| self.end.side.copy_failed(e))?;
            m.copied += len;
            st.fill = (st.fill + 1) % CHUNKS;
            if m.copied == m.total {
                st.fills.pop_front();
            }
        }
        Ok(())
    }

    /// Posts the writes that there is room for.
    #[inline]
    fn pump(&self, st: &mut State) -> Result<()> {
        if !st.fills.is_empty() {
            self.fill(st)?;
        }
        while let Some(mut m) = st.queue.pop_front() {
            let all = match (
                m.post.capacity < m.total,
                m.post.chunk > 0 && m.total > 0,
                m.keys,
            ) {
                (true, ..) => self.refuse(st, &m)?,
                (_, true, keys) => self.to_chunks(st, &mut m, keys)?,
                (_, false, Some(keys)) => self.direct(st, &mut m, &keys)?,
                (_, false, None) => self.out_of_chunks(st, &mut m)?,
            };
            if !all {
                st.queue.push_front(m);
                break;
            }
            st.requests[m.request].posted = true;
        }
        Ok(())
    }

    /// Whether a lane takes a message's write with what may go before and behind it.
    #[inline]
    fn has_room(st: &State, lane: usize) -> bool {
        let c = &st.counts[lane];
        c.posted.wrapping_sub(c.done) + 3 <= SEND_DEPTH
    }

    #[inline]
    fn count(st: &mut State, lane: usize) -> u32 {
        let c = &mut st.counts[lane];
        c.posted = c.posted.wrapping_add(1);
        c.posted
    }

    /// Announces a message on one lane, with a write of its bytes or without; room was looked for.
    fn announce(
        &self,
        st: &mut State,
        m: &Message,
        lane: usize,
        bytes: Option<Write>,
    ) -> Result<()> {
        let slot = m.post.seq % RING as u32;
        let striped = m.lanes > 1;
        let imm = match m.total < SHORT {
            true => Imm::Short {
                slot,
                total: m.total as u32,
                striped,
            },
            false => {
                self.total(st, m, lane, done::WRITTEN)?;
                Imm::Long { slot }
            }
        };
        let mut w = bytes.unwrap_or(NOTHING);
        let together = w.len == 0 || !self.routing.apart(m.total);
        if !together {
            // Its packets may take several routes: what announces them comes behind it.
            w.imm = None;
            w.signal = false;
            w.wr_id = id::of(id::MESSAGE, lane, m.request, Self::count(st, lane));
            // SAFETY: the request's memory is registered until its request is over.
            unsafe { self.end.rails.write(lane, &w) }.map_err(|e| self.end.fail(e))?;
            w = NOTHING;
        }
        w.imm = Some(imm.encode());
        w.signal = true;
        w.wr_id = id::of(id::MESSAGE, lane, m.request, Self::count(st, lane));
        st.requests[m.request].writes += 1;
        // SAFETY: as above.
        unsafe { self.end.rails.write(lane, &w) }.map_err(|e| self.end.fail(e))
    }

    /// Writes a total where an announcement has no room for it.
    fn total(&self, st: &mut State, m: &Message, lane: usize, kind: u32) -> Result<()> {
        let rails = &self.end.rails;
        let slot = m.post.seq % RING as u32;
        let source = &rails.block().source[slot as usize].0;
        for (to, w) in source.iter().zip(done_words(m.total, kind, m.lanes > 1)) {
            to.store(w, Ordering::Relaxed);
        }
        let wr_id = id::of(id::CONTROL, lane, 0, Self::count(st, lane));
        let at = source.as_ptr() as u64;
        rails
            .write_block(lane, wr_id, at, 16, offset::done(slot), false)
            .map_err(|e| self.end.fail(e))
    }

    /// Tells the receiver that a message does not fit.
    fn refuse(&self, st: &mut State, m: &Message) -> Result<bool> {
        if !Self::has_room(st, m.first) {
            return Ok(false);
        }
        self.total(st, m, m.first, done::TOO_LARGE)?;
        let imm = Imm::Long {
            slot: m.post.seq % RING as u32,
        };
        let w = Write {
            wr_id: id::of(id::MESSAGE, m.first, m.request, Self::count(st, m.first)),
            imm: Some(imm.encode()),
            signal: true,
            ..NOTHING
        };
        st.requests[m.request].writes += 1;
        // SAFETY: no bytes.
        unsafe { self.end.rails.write(m.first, &w) }.map_err(|e| self.end.fail(e))?;
        Ok(true)
    }

    /// From registered memory into registered memory, over one lane or in as many parts as there are.
    #[inline]
    fn direct(&self, st: &mut State, m: &mut Message, keys: &[u32; MAX_PORTS]) -> Result<bool> {
        let rails = &self.end.rails;
        let n = m.lanes as u64;
        let each = m.total.div_ceil(n).next_multiple_of(ALIGN);
        loop {
            let (part, turn) = (m.steps % n, m.steps / n);
            let lane = (m.first + part as usize) % st.counts.len();
            let l = &rails.lanes()[lane];
            let (from, to) = ((part * each).min(m.total), ((part + 1) * each).min(m.total));
            let at = from + turn * l.max_write;
            // Lanes of other devices may have more turns.
            if turn == 0 || at < to {
                if !Self::has_room(st, lane) {
                    return Ok(false);
                }
                let len = (to - at).min(l.max_write);
                let w = Write {
                    addr: m.addr + at,
                    len: len as u32,
                    lkey: keys[l.port],
                    to: m.post.addr.wrapping_add(at),
                    rkey: m.post.rkeys[l.peer_port],
                    host: m.host,
                    ..NOTHING
                };
                if at + len == to {
                    self.announce(st, m, lane, Some(w))?;
                } else {
                    // Some tell of their completion, or the queue would never be known to have room again.
                    let posted = Self::count(st, lane);
                    let w = Write {
                        wr_id: id::of(id::CONTROL, lane, 0, posted),
                        signal: signals(posted),
                        ..w
                    };
                    // SAFETY: the request's memory is registered until its request is over.
                    unsafe { rails.write(lane, &w) }.map_err(|e| self.end.fail(e))?;
                }
                m.posted += len;
            }
            m.steps += 1;
            if m.posted == m.total && m.steps >= n {
                return Ok(true);
            }
        }
    }

    /// The front chunk, if it holds bytes of the front message that are there.
    #[inline]
    fn filled(&self, st: &State) -> Option<usize> {
        let staging = self.end.side.staging.get()?;
        let c = &st.chunks[st.send];
        (c.used == Use::Copying && staging.is_over(st.send, c.step)).then_some(st.send)
    }

    /// From chunks into registered memory.
    fn out_of_chunks(&self, st: &mut State, m: &mut Message) -> Result<bool> {
        let rails = &self.end.rails;
        while m.posted < m.total {
            // What announces a message comes behind its bytes only on the same lane.
            let lane = if m.lanes == 1 { m.first } else { st.turn };
            let Some(c) = self.filled(st).filter(|_| Self::has_room(st, lane)) else {
                return Ok(false);
            };
            let len = st.chunks[c].len;
            let l = &rails.lanes()[lane];
            let w = Write {
                wr_id: id::of(id::CHUNK, lane, c, Self::count(st, lane)),
                to: m.post.addr.wrapping_add(m.posted),
                rkey: m.post.rkeys[l.peer_port],
                signal: true,
                ..self.chunk(c, len, l.port)
            };
            self.write_chunk(st, c, lane, m, &w)?;
            // Chunks that are free again are filled while this one is on its way.
            self.fill(st)?;
        }
        while (m.steps as usize) < m.lanes {
            let lane = (m.first + m.steps as usize) % st.counts.len();
            if !Self::has_room(st, lane) {
                return Ok(false);
            }
            self.announce(st, m, lane, None)?;
            m.steps += 1;
        }
        Ok(true)
    }

    /// Into the receiver's chunks, as many as it has free.
    fn to_chunks(
        &self,
        st: &mut State,
        m: &mut Message,
        keys: Option<[u32; MAX_PORTS]>,
    ) -> Result<bool> {
        let rails = &self.end.rails;
        while m.posted < m.total {
            if st.used.wrapping_sub(st.freed) as usize >= CHUNKS {
                // A device may place the counts in any order: the newest counts.
                for c in &rails.block().credits {
                    let freed = c.load(Ordering::Acquire) as u32;
                    if freed.wrapping_sub(st.freed) as i32 > 0 {
                        st.freed = freed;
                    }
                }
            }
            let lane = st.turn;
            if st.used.wrapping_sub(st.freed) as usize >= CHUNKS || !Self::has_room(st, lane) {
                return Ok(false);
            }
            let l = &rails.lanes()[lane];
            let own = match keys {
                Some(_) => None,
                None => match self.filled(st) {
                    None => return Ok(false),
                    found => found,
                },
            };
            let theirs = st.used % CHUNKS as u32;
            let len = match own {
                Some(c) => st.chunks[c].len,
                None => (m.total - m.posted).min(m.post.chunk.into()),
            };
            let imm = Imm::Chunk {
                slot: m.post.seq % RING as u32,
                chunk: theirs,
                bytes: len as u32,
                last: m.posted + len == m.total,
            };
            let count = Self::count(st, lane);
            let target = Write {
                to: m
                    .post
                    .addr
                    .wrapping_add(u64::from(theirs) * u64::from(m.post.chunk)),
                rkey: m.post.rkeys[l.peer_port],
                imm: Some(imm.encode()),
                signal: true,
                ..NOTHING
            };
            st.used = st.used.wrapping_add(1);
            match (own, keys) {
                (Some(c), _) => {
                    let from = self.chunk(c, len, l.port);
                    let w = Write {
                        wr_id: id::of(id::CHUNK, lane, c, count),
                        addr: from.addr,
                        len: from.len,
                        lkey: from.lkey,
                        host: true,
                        ..target
                    };
                    self.write_chunk(st, c, lane, m, &w)?;
                    self.fill(st)?;
                }
                (None, keys) => {
                    let w = Write {
                        wr_id: id::of(id::MESSAGE, lane, m.request, count),
                        addr: m.addr + m.posted,
                        len: len as u32,
                        lkey: keys.map_or(0, |k| k[l.port]),
                        host: m.host,
                        ..target
                    };
                    st.requests[m.request].writes += 1;
                    m.posted += len;
                    st.turn = (lane + 1) % st.counts.len();
                    // SAFETY: the request's memory is registered until its request is over.
                    unsafe { rails.write(lane, &w) }.map_err(|e| self.end.fail(e))?;
                }
            }
        }
        Ok(true)
    }

    /// The source of a write out of a chunk.
    fn chunk(&self, c: usize, len: u64, port: usize) -> Write {
        Write {
            addr: self.end.side.staging.get().map_or(0, |s| s.host(c)),
            len: len as u32,
            lkey: self.end.chunk_keys().lkeys[port],
            host: true,
            ..NOTHING
        }
    }

    fn write_chunk(
        &self,
        st: &mut State,
        c: usize,
        lane: usize,
        m: &mut Message,
        w: &Write,
    ) -> Result<()> {
        st.chunks[c].used = Use::Writing;
        st.requests[m.request].writes += 1;
        st.send = (c + 1) % CHUNKS;
        st.turn = (lane + 1) % st.counts.len();
        m.posted += u64::from(w.len);
        // SAFETY: the chunk stays registered as long as the connection, and is filled anew only once this
        // write has completed.
        unsafe { self.end.rails.write(lane, w) }.map_err(|e| self.end.fail(e))
    }

    #[inline]
    fn progress(&self, st: &mut State) -> Result<()> {
        self.end.side.trouble()?;
        // Looked for first: what completed before the end counts.
        let trouble = self.end.trouble(GRACE);
        let completed = self.complete(st);
        if let Some(e) = trouble {
            return Err(self.end.side.fail(e));
        }
        completed?;
        self.pump(st)
    }
}

/// Whether the write of that number tells of its completion although nothing waits for it.
#[inline]
fn signals(posted: u32) -> bool {
    posted.is_multiple_of(SEND_DEPTH / 4)
}

/// No bytes to nowhere.
const NOTHING: Write = Write {
    wr_id: 0,
    addr: 0,
    len: 0,
    lkey: 0,
    to: 0,
    rkey: 0,
    imm: None,
    signal: false,
    host: false,
};

/// The number after `seq`: never 0, and such that slots follow each other.
#[inline]
pub(super) fn next(seq: u32) -> u32 {
    match seq.wrapping_add(1) {
        0 => RING as u32,
        n => n,
    }
}

impl End for SendConnection {
    fn register(&self, addr: u64, len: u64, cuda: bool) -> Result<Region> {
        self.end.register(addr, len, cuda)
    }

    fn deregister(&self, region: Region) -> Result<()> {
        let deadline = close_deadline();
        let Some(mut st) = self.gate.enter_by(deadline) else {
            log::warn!("{}: in use as a registration ends", self.end.side.peer);
            return Ok(());
        };
        let st = &mut *st;
        let uses = |r: &Request| r.live && r.region == region.id && !r.is_over();
        if st.requests.iter().any(uses) {
            // Its bytes may all be there already.
            let _ = self.complete(st);
        }
        if st.requests.iter().any(uses) {
            self.end.side.taken_back("sends out of it were in flight");
            st.fills.clear();
            st.queue.clear();
        }
        // Sends that ended in an error may have copies or writes in flight.
        self.end.settle(deadline);
        Ok(())
    }

    #[inline]
    fn poll(&self, index: usize) -> Result<Option<usize>> {
        let Some(mut st) = self.gate.enter()? else {
            return Ok(None);
        };
        let st = &mut *st;
        let trouble = self.progress(st);
        if self.end.side.failed.get().is_some() {
            self.end.halt();
        }
        let r = st.requests[index];
        if !r.is_over() {
            return match trouble {
                Ok(()) => Ok(None),
                Err(e) => {
                    st.requests[index].live = false;
                    Err(e)
                }
            };
        }
        // Those that take other queue pairs, or come out of a GPU, may be later; nobody shall see that.
        let older = |o: &Request| {
            o.live
                && !o.is_over()
                && r.order != o.order
                && r.order.wrapping_sub(o.order) < RING as u32
        };
        if trouble.is_ok() && st.requests.iter().any(older) {
            return Ok(None);
        }
        st.requests[index].live = false;
        match r.capacity {
            None => Ok(Some(r.len as usize)),
            Some(capacity) => Err(too_large(&self.end.side.peer, r.len, capacity)),
        }
    }

    fn check(&self) -> Result<()> {
        self.end.side.check_copies()
    }

    fn close(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        self.end.close(false);
        self.end.side.drain(close_deadline());
        Ok(())
    }

    fn describe(&self) -> String {
        self.end.side.peer.clone()
    }
}

impl SendEnd for SendConnection {
    #[inline]
    fn send(&self, index: usize, addr: u64, len: u64, tag: u32, region: &Region) -> Result<bool> {
        if !region.holds(addr, len) {
            return Err(outside(addr, len, region).context(&self.end.side.peer));
        }
        let Some(mut st) = self.gate.enter()? else {
            return Ok(false);
        };
        let st = &mut *st;
        let find = |st: &State| st.posts.iter().position(|p| p.tag == tag);
        let found = match find(st) {
            Some(i) => Some(i),
            None => {
                self.read_posts(st);
                find(st)
            }
        };
        let Some(post) = found.and_then(|i| st.posts.remove(i)) else {
            st.idle = st.idle.wrapping_add(1);
            self.end.side.trouble()?;
            // The receiver may wait for messages before this one, and nobody need test them meanwhile.
            if !st.queue.is_empty() {
                self.complete(st)?;
                self.pump(st)?;
            }
            if st.idle % LOOKS == 0 {
                self.complete(st)?;
                st.over = self.end.trouble(Duration::ZERO).is_some();
            }
            if st.over {
                // Sends before it may still be acknowledged: it has not failed for them.
                if let Some(e) = self.end.trouble(Duration::ZERO) {
                    return Err(e);
                }
            }
            return Ok(false);
        };
        self.end.side.trouble()?;
        // Who has closed has no receive posted any more: what was one may be anybody's memory now.
        if let Some(e) = self.end.trouble(Duration::ZERO) {
            return Err(e);
        }
        let keys = region.keys.as_ref().map(|k| k.lkeys);
        let total = self.end.rails.lanes().len();
        let large = len / STRIPE >= total as u64;
        let own = self.end.side.staging.get().map_or(0, |s| s.chunk() as u64);
        let parts = match (keys, post.chunk) {
            (Some(_), 0) if large => total,
            // Chunks go round all lanes.
            (None, 0) if len > own => total,
            _ => 1,
        };
        st.requests[index] = Request {
            live: true,
            order: st.order,
            posted: false,
            writes: 0,
            len,
            region: region.id,
            capacity: (len > post.capacity).then_some(post.capacity),
        };
        st.order = st.order.wrapping_add(1);
        if keys.is_none() && len > 0 && len <= post.capacity {
            st.fills.push_back(Fill {
                request: index,
                addr,
                total: len,
                copied: 0,
                piece: match post.chunk {
                    0 => own,
                    theirs => own.min(theirs.into()),
                },
            });
        }
        let first = st.turn;
        if keys.is_some() && post.chunk == 0 {
            st.turn = (first + parts) % total;
        }
        st.queue.push_back(Message {
            request: index,
            post,
            addr,
            total: len,
            // Without bytes there is nothing to stage.
            keys: keys.or((len == 0).then_some([0; MAX_PORTS])),
            host: region.memory.is_host(),
            posted: 0,
            steps: 0,
            lanes: parts,
            first,
        });
        // Trouble here is told by test: the request has begun.
        let _ = self.pump(st);
        Ok(true)
    }
}

impl Drop for SendConnection {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_of_writes_that_nobody_waits_for_gets_room_again() {
        // A device of 4 MiB a write, and a message of 1 GiB on one lane.
        for start in [0, 1, 31, 32, u32::MAX - 40] {
            let mut c = Count {
                posted: start,
                done: start,
            };
            let mut told = start;
            for _ in 0..256 {
                if c.posted.wrapping_sub(c.done) + 3 > SEND_DEPTH {
                    assert_ne!(told, c.done, "full, and nothing will tell of room");
                    c.done = told;
                }
                c.posted = c.posted.wrapping_add(1);
                if signals(c.posted) {
                    told = c.posted;
                }
            }
        }
    }

    #[test]
    fn numbers_go_round_without_zero_and_slots_follow_each_other() {
        let mut seq = u32::MAX - 5;
        let mut slot = seq as usize % RING;
        for _ in 0..200 {
            seq = next(seq);
            slot = (slot + 1) % RING;
            assert_ne!(seq, 0);
            assert_eq!(seq as usize % RING, slot);
        }
    }
}
