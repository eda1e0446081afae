//! The receiving end.

use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::rails::{id, Rails, CONTROL_DEPTH};
use super::send::next;
use super::wire::{
    done, done_of, load, offset, Descriptor, Imm, Slot, DESCRIPTOR_LEN, FIRST, RING,
};
use super::{End as VerbsEnd, BATCH};
use crate::error::{Error, Result};
use crate::gate::Gate;
use crate::ibverbs::sys;
use crate::transport::staging::CHUNKS;
use crate::transport::tcp::service::Service;
use crate::transport::{close_deadline, does_not_fit, outside, End, RecvEnd, Region};

/// Each so many control writes one tells of its completion.
const SIGNAL: u32 = 16;
const NOBODY: u8 = u8::MAX;
/// While messages are of no more bytes than this, several descriptors are written at once: for the device
/// each write costs as much as such a message.
const SMALL: u64 = 4 << 10;
/// Receives that the sender is left with meanwhile, of the tag that the waiting ones have.
const AHEAD: u32 = 2;

/// What a chunk is used for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Use {
    /// The sender may write to it, if it has been told so.
    #[default]
    Free,
    /// Bytes have come, those of chunks before not yet.
    Arrived {
        request: usize,
        bytes: u64,
        last: bool,
    },
    /// The copy out of it is in flight.
    Copying { request: usize, bytes: u64 },
}

#[derive(Clone, Copy, Default, Debug)]
struct Chunk {
    used: Use,
    step: u32,
}

#[derive(Clone, Copy, Default, Debug)]
struct Request {
    live: bool,
    seq: u32,
    tag: u32,
    run: u32,
    addr: u64,
    capacity: u64,
    region: u32,
    staged: bool,
    /// The GPU must be told before the receive is over.
    flush: bool,
    /// Bytes of the message, once they are known.
    total: Option<u64>,
    /// Parts that have not come.
    parts: u32,
    /// Bytes that came in chunks.
    got: u64,
    /// Bytes of those that are where they belong.
    copied: u64,
    /// Bytes of a message that does not fit.
    too_large: Option<u64>,
}

impl Request {
    /// All has come and is where it belongs.
    #[inline]
    fn is_over(&self) -> bool {
        self.total.is_some() && self.parts == 0 && self.copied == self.got
    }
}

/// Descriptors that the sender has not been told of yet. It needs none of them before it has used up those with
/// the same tag that it was told of before; that it has, this end learns whenever it is polled.
#[derive(Clone, Copy, Default, Debug)]
struct Waiting {
    count: u32,
    /// Receives with one tag, posted in a row; the last such row.
    run: u32,
    tag: u32,
    /// Those of them that are waiting.
    of_run: u32,
    /// Those of them that the sender knows, and for which nothing has come.
    ahead: u32,
    /// The last message was small.
    small: bool,
    /// Something has completed in this look: what answers it goes first.
    busy: bool,
}

impl Waiting {
    /// A receive with this tag is posted.
    #[inline]
    fn post(&mut self, tag: u32) {
        if tag != self.tag {
            self.tag = tag;
            self.run = self.run.wrapping_add(1);
            (self.of_run, self.ahead) = (0, 0);
            // Nobody counts any more what the sender has left of the row before.
            self.small = false;
        }
        self.count += 1;
        self.of_run += 1;
    }

    /// All have been told.
    #[inline]
    fn told(&mut self) {
        self.ahead += self.of_run;
        (self.count, self.of_run) = (0, 0);
    }

    /// A message of so many bytes came for a receive of that row.
    #[inline]
    fn came(&mut self, run: u32, total: u64) {
        self.small = total <= SMALL;
        if run == self.run {
            self.ahead = self.ahead.saturating_sub(1);
        }
    }

    #[inline]
    fn is_due(&self) -> bool {
        self.count > 0 && (!self.small || self.ahead < AHEAD)
    }
}

#[derive(Debug)]
struct State {
    requests: [Request; RING],
    by_slot: [u8; RING],
    /// Number of the next descriptor.
    next: u32,
    waiting: Waiting,
    /// Control writes, all on the first lane.
    posted: u32,
    done: u32,
    chunks: [Chunk; CHUNKS],
    /// The chunk whose bytes come next in their message, and the one that is freed next.
    expected: u32,
    freed: u32,
    /// What the sender has been told of that.
    told: u32,
    /// Room for completions.
    wcs: Vec<sys::Wc>,
}

/// The receiving end of a connection.
#[derive(Debug)]
pub struct RecvConnection {
    end: VerbsEnd,
    gate: Gate<State>,
    closed: bool,
}

impl RecvConnection {
    pub(super) fn new(
        service: Arc<Service>,
        socket: TcpStream,
        rails: Rails,
        peer: String,
    ) -> RecvConnection {
        RecvConnection {
            end: VerbsEnd::new(service, socket, rails, peer),
            gate: Gate::new(State {
                requests: [Request::default(); RING],
                by_slot: [NOBODY; RING],
                next: FIRST,
                waiting: Waiting::default(),
                posted: 0,
                done: 0,
                chunks: [Chunk::default(); CHUNKS],
                expected: 0,
                freed: 0,
                told: 0,
                wcs: vec![sys::Wc::default(); BATCH],
            }),
            closed: false,
        }
    }

    #[cold]
    fn breach(&self, what: &str) -> Error {
        self.end.side.fail(Error::remote(format!(
            "{}: the peer breaks the protocol: {what}",
            self.end.side.peer
        )))
    }

    /// Takes in what has completed.
    #[inline]
    fn complete(&self, st: &mut State) -> Result<()> {
        let mut wcs = std::mem::take(&mut st.wcs);
        st.waiting.busy = false;
        let completed = self.end.complete(&mut wcs, |wc| {
            let (kind, lane, _, posted) = id::parts(wc.wr_id);
            if kind != id::RECV {
                st.done = posted;
                return Ok(());
            }
            st.waiting.busy = true;
            self.announced(st, u32::from_be(wc.imm_data))?;
            let posted = self.end.rails.post_receive(lane);
            posted.map_err(|e| self.end.fail(e))
        });
        st.wcs = wcs;
        completed
    }

    #[inline]
    fn announced(&self, st: &mut State, bits: u32) -> Result<()> {
        let Some(imm) = Imm::decode(bits) else {
            return Err(self.breach("an announcement means nothing"));
        };
        let slot = match imm {
            Imm::Short { slot, .. } | Imm::Long { slot } | Imm::Chunk { slot, .. } => slot,
        };
        let index = st.by_slot[slot as usize] as usize;
        let r = match st.requests.get_mut(index) {
            Some(r) if r.live && r.too_large.is_none() => r,
            _ => return Err(self.breach("an announcement is for a receive that is not posted")),
        };
        let (total, striped) = match imm {
            Imm::Short { total, striped, .. } => (u64::from(total), striped),
            Imm::Long { slot } => {
                let words = load::<4>(&self.end.rails.block().done[slot as usize].0);
                let Some((total, kind, striped)) = done_of(&words) else {
                    return Err(self.breach("a message has no size"));
                };
                match kind {
                    done::WRITTEN => {}
                    done::TOO_LARGE if total > r.capacity && r.total.is_none() => {
                        r.too_large = Some(total);
                        st.waiting.came(r.run, total);
                        return Ok(());
                    }
                    _ => return Err(self.breach("a message is said not to fit that does")),
                }
                (total, striped)
            }
            Imm::Chunk {
                chunk, bytes, last, ..
            } => {
                let c = &mut st.chunks[chunk as usize];
                if !r.staged || c.used != Use::Free {
                    return Err(self.breach("a chunk is written that was not free"));
                }
                c.used = Use::Arrived {
                    request: index,
                    bytes: bytes.into(),
                    last,
                };
                return self.unpack(st);
            }
        };
        if r.staged && total > 0 {
            return Err(self.breach("a message does not come in chunks"));
        }
        let lanes = self.end.rails.lanes().len() as u32;
        match r.total {
            None if total <= r.capacity => {
                r.total = Some(total);
                r.parts = if striped { lanes - 1 } else { 0 };
                st.waiting.came(r.run, total);
            }
            Some(t) if t == total && r.parts > 0 && striped => r.parts -= 1,
            _ => return Err(self.breach("a message has more bytes or parts than it should")),
        }
        Ok(())
    }

    /// Copies the chunks whose turn it is to where they belong.
    fn unpack(&self, st: &mut State) -> Result<()> {
        let Some(staging) = self.end.side.staging.get() else {
            return Err(self.breach("a chunk comes where there are none"));
        };
        loop {
            let i = st.expected as usize % CHUNKS;
            let c = &mut st.chunks[i];
            let Use::Arrived {
                request,
                bytes,
                last,
            } = c.used
            else {
                return Ok(());
            };
            let r = &mut st.requests[request];
            if r.total.is_some() || bytes > r.capacity - r.got || bytes == 0 {
                return Err(self.breach("chunks have more bytes than their message"));
            }
            c.used = Use::Copying { request, bytes };
            c.step = c.step.wrapping_add(1);
            st.expected = st.expected.wrapping_add(1);
            let to = r.addr + r.got;
            r.got += bytes;
            if last {
                r.total = Some(r.got);
                st.waiting.came(r.run, r.got);
            }
            // SAFETY: the range lies in the buffer of a live receive, and `deregister` waits for copies
            // into it.
            unsafe { staging.copy(i, to, bytes as usize, false, c.step) }
                .map_err(|e| self.end.side.copy_failed(e))?;
        }
    }

    /// Frees the chunks whose copies are over, and tells the sender, if there still is one.
    #[inline]
    fn free(&self, st: &mut State, tell: bool) -> Result<()> {
        let Some(staging) = self.end.side.staging.get() else {
            return Ok(());
        };
        while st.freed != st.expected {
            let i = st.freed as usize % CHUNKS;
            let c = &mut st.chunks[i];
            let Use::Copying { request, bytes } = c.used else {
                break;
            };
            if !staging.is_over(i, c.step) {
                break;
            }
            c.used = Use::Free;
            st.requests[request].copied += bytes;
            st.freed = st.freed.wrapping_add(1);
        }
        if tell && st.told != st.freed && Self::has_room(st) {
            let block = self.end.rails.block();
            block.source_word.store(st.freed.into(), Ordering::Release);
            st.told = st.freed;
            let source = &raw const block.source_word as u64;
            self.control(st, source, 8, offset::credits(st.freed))?;
        }
        Ok(())
    }

    /// Whether there is room for all that is written at a time: descriptors on both sides of the ring's end.
    #[inline]
    fn has_room(st: &State) -> bool {
        st.posted.wrapping_sub(st.done) + 2 <= CONTROL_DEPTH
    }

    /// Tells the sender of the descriptors that wait; room was looked for.
    #[inline]
    fn tell(&self, st: &mut State) -> Result<()> {
        let mut left = st.waiting.count as usize;
        let end = st.next as usize % RING;
        let mut slot = (end + RING - left) % RING;
        st.waiting.told();
        while left > 0 {
            let n = left.min(RING - slot);
            let source = self.end.rails.block().source[slot].0.as_ptr() as u64;
            let len = (n - 1) * size_of::<Slot>() + DESCRIPTOR_LEN;
            self.control(st, source, len as u32, offset::slot(slot as u32))?;
            left -= n;
            slot = 0;
        }
        Ok(())
    }

    /// Writes to the sender's block.
    #[inline]
    fn control(&self, st: &mut State, source: u64, len: u32, to: u64) -> Result<()> {
        st.posted = st.posted.wrapping_add(1);
        let signal = st.posted.is_multiple_of(SIGNAL);
        let wr_id = id::of(id::CONTROL, 0, 0, st.posted);
        self.end
            .rails
            .write_block(0, wr_id, source, len, to, signal)
            .map_err(|e| self.end.fail(e))
    }

    #[inline]
    fn progress(&self, st: &mut State) -> Result<()> {
        // Once it has failed nothing is written any more: the memory may be gone.
        self.end.side.trouble()?;
        // Looked for first: what completed before the end counts.
        let trouble = self.end.trouble(Duration::ZERO);
        let moved = self
            .complete(st)
            .and_then(|()| self.free(st, trouble.is_none()))
            .and_then(
                |()| match st.waiting.is_due() && !st.waiting.busy && Self::has_room(st) {
                    true if trouble.is_none() => self.tell(st),
                    _ => Ok(()),
                },
            );
        let copying = |r: &Request| r.live && r.total.is_some() && r.parts == 0 && !r.is_over();
        match trouble {
            Some(e) if !st.requests.iter().any(copying) => Err(self.end.side.fail(e)),
            _ => moved,
        }
    }

    fn outcome(&self, r: &Request) -> Result<Option<usize>> {
        if let Some(size) = r.too_large {
            return Err(does_not_fit(&self.end.side.peer, r.capacity, size));
        }
        Ok(r.total.filter(|_| r.is_over()).map(|t| t as usize))
    }

    /// Whether nothing is posted into which the peer may still write.
    fn is_idle(&self, deadline: Instant) -> bool {
        let Some(mut st) = self.gate.enter_by(deadline) else {
            return false;
        };
        !self.is_waiting(&mut st, |r| r.too_large.is_none())
    }

    /// Whether a receive that is `one` is not over; its bytes may all be there already.
    fn is_waiting(&self, st: &mut State, one: impl Fn(&Request) -> bool) -> bool {
        let waits = |st: &State| {
            let mut all = st.requests.iter();
            all.any(|r| r.live && !r.is_over() && one(r))
        };
        // Once it has failed nothing is written any more: memory of other registrations may be gone.
        if waits(st) && self.end.side.failed.get().is_none() {
            let _ = self.complete(st);
        }
        waits(st)
    }

    /// Whether a receive with the same tag that was posted before is not over: messages that take different
    /// queue pairs overtake each other, and nobody shall see that.
    fn is_overtaking(st: &State, r: &Request) -> bool {
        st.requests.iter().any(|o| {
            o.live
                && o.tag == r.tag
                && o.seq != r.seq
                && r.seq.wrapping_sub(o.seq) < 2 * RING as u32
                && !o.is_over()
                && o.too_large.is_none()
        })
    }
}

impl End for RecvConnection {
    fn register(&self, addr: u64, len: u64, cuda: bool) -> Result<Region> {
        self.end.register(addr, len, cuda)
    }

    fn deregister(&self, region: Region) -> Result<()> {
        let deadline = close_deadline();
        let Some(mut st) = self.gate.enter_by(deadline) else {
            log::warn!("{}: in use as a registration ends", self.end.side.peer);
            return Ok(());
        };
        if self.is_waiting(&mut st, |r| r.region == region.id) {
            self.end.side.taken_back("receives into it were posted");
        }
        // Receives that ended in an error may have copies or writes in flight.
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
        let outcome = match self.outcome(&st.requests[index]) {
            Ok(None) => match trouble {
                Err(e) => Err(e),
                Ok(()) => return Ok(None),
            },
            Ok(Some(_)) if trouble.is_ok() && Self::is_overtaking(st, &st.requests[index]) => {
                return Ok(None)
            }
            r => r,
        };
        let r = &mut st.requests[index];
        r.live = false;
        st.by_slot[r.seq as usize % RING] = NOBODY;
        if r.flush && outcome.is_ok() {
            self.end.flush().map_err(|e| self.end.fail(e))?;
        }
        outcome
    }

    fn check(&self) -> Result<()> {
        self.end.side.check_copies()
    }

    fn close(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        let deadline = close_deadline();
        let linger = self.is_idle(deadline);
        self.end.close(linger);
        self.end.side.drain(deadline);
        Ok(())
    }

    fn describe(&self) -> String {
        self.end.side.peer.clone()
    }
}

impl RecvEnd for RecvConnection {
    #[inline]
    fn recv(&self, index: usize, addr: u64, len: u64, tag: u32, region: &Region) -> Result<bool> {
        if !region.holds(addr, len) {
            return Err(outside(addr, len, region).context(&self.end.side.peer));
        }
        let Some(mut st) = self.gate.enter()? else {
            return Ok(false);
        };
        let st = &mut *st;
        self.end.side.trouble()?;
        if let Some(e) = self.end.trouble(Duration::ZERO) {
            // Other receives may have come before that: it has not failed for them.
            return Err(e);
        }
        let seq = st.next;
        let slot = seq as usize % RING;
        if st.by_slot[slot] != NOBODY {
            return Ok(false);
        }
        if !Self::has_room(st) {
            self.complete(st)?;
            if !Self::has_room(st) {
                return Ok(false);
            }
        }
        let staged = region.keys.is_none();
        let (to, rkeys, chunk) = match (&region.keys, self.end.side.staging.get()) {
            (Some(k), _) => (addr, k.rkeys, 0),
            (None, Some(s)) => (s.host(0), self.end.chunk_keys().rkeys, s.chunk() as u32),
            (None, None) => return Err(self.breach("GPU memory without staging")),
        };
        st.by_slot[slot] = index as u8;
        st.waiting.post(tag);
        st.requests[index] = Request {
            live: true,
            seq,
            tag,
            run: st.waiting.run,
            addr,
            capacity: len,
            region: region.id,
            staged,
            flush: region.keys.as_ref().is_some_and(|k| k.flush),
            ..Request::default()
        };
        st.next = next(seq);
        let descriptor = Descriptor {
            seq,
            tag,
            addr: to,
            capacity: len,
            rkeys,
            chunk,
        };
        let source = &self.end.rails.block().source[slot].0;
        for (to, w) in source.iter().zip(descriptor.words()) {
            to.store(w, Ordering::Relaxed);
        }
        if st.waiting.is_due() {
            // Trouble here is told by test: the receive is posted.
            let _ = self.tell(st);
        }
        Ok(true)
    }
}

impl Drop for RecvConnection {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A receiver and a sender who uses descriptors by tag. Each waiting one must be told of when the sender has
    /// used up those of its tag, at the latest: if this end is polled, no send waits for ever.
    #[derive(Default)]
    struct Model {
        waiting: Waiting,
        untold: Vec<(u32, u32)>,
        told: Vec<(u32, u32)>,
        writes: u32,
    }

    impl Model {
        fn tell(&mut self) {
            assert_eq!(self.untold.len(), self.waiting.count as usize);
            self.told.append(&mut self.untold);
            self.waiting.told();
            self.writes += 1;
        }
        fn post(&mut self, tag: u32) {
            self.waiting.post(tag);
            self.untold.push((tag, self.waiting.run));
            if self.waiting.is_due() {
                self.tell();
            }
        }
        fn poll(&mut self) {
            if self.waiting.is_due() {
                self.tell();
            }
        }
        /// Whether the sender knows of a receive for it.
        fn send(&mut self, tag: u32, total: u64) -> bool {
            let Some(i) = self.told.iter().position(|t| t.0 == tag) else {
                return false;
            };
            let (_, run) = self.told.remove(i);
            self.waiting.came(run, total);
            true
        }
    }

    #[test]
    fn small_messages_in_a_row_have_their_descriptors_together() {
        let mut m = Model::default();
        for _ in 0..8 {
            m.post(5);
        }
        // Nothing is known of the messages yet.
        assert_eq!((m.told.len(), m.writes), (8, 8));
        for _ in 0..6_001 {
            assert!(m.send(5, 8));
            m.poll();
            m.post(5);
        }
        assert_eq!(m.writes, 8 + 1_000, "six at a time");
        // Large ones are told of at once.
        assert!(m.send(5, SMALL + 1));
        m.poll();
        for _ in 0..100 {
            m.post(5);
            assert!(m.untold.is_empty());
            assert!(m.send(5, SMALL + 1));
        }
    }

    proptest::proptest! {
        #[test]
        fn no_send_waits_for_a_descriptor_for_ever(
            acts in proptest::collection::vec((0u8..3, 0u32..3, 0u64..2), 0..400)
        ) {
            let mut m = Model::default();
            for (act, tag, large) in acts {
                match act {
                    0 if m.told.len() + m.untold.len() < RING => m.post(tag),
                    1 => { m.send(tag, large * 2 * SMALL); }
                    _ => m.poll(),
                }
                // Whatever is still waiting when this end has been polled, the sender has others to use first.
                let mut polled = m.waiting;
                if polled.is_due() {
                    polled.told();
                }
                if polled.count > 0 {
                    for (tag, _) in &m.untold {
                        let before = m.told.iter().filter(|t| t.0 == *tag).count();
                        proptest::prop_assert!(before >= AHEAD as usize);
                    }
                }
            }
        }
    }
}
