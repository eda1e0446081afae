//! The receiving end.

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use super::service::Service;
use super::wire::{kind, Frame, Post, FRAME_LEN, POST_LEN};
use super::{lost, receive, transmit, Moved, RING};
use crate::error::{Error, Result};
use crate::gate::Gate;
use crate::transport::copy_engine::link::close_deadline;
use crate::transport::{host_region, outside, End, RecvEnd, Region};

/// What is read ahead of a socket: heads of frames, and whole small messages.
const AHEAD: usize = 16 << 10;
/// Bytes that one poll takes from a socket at most: other connections wait meanwhile.
const POLL_BYTES: usize = 8 << 20;
const NOBODY: u8 = u8::MAX;

/// The bytes of the frame that is being read.
#[derive(Clone, Copy, Debug)]
struct Payload {
    request: usize,
    addr: u64,
    left: u64,
}

#[derive(Debug)]
struct In {
    socket: TcpStream,
    ahead: Box<[u8; AHEAD]>,
    from: usize,
    to: usize,
    payload: Option<Payload>,
    ended: bool,
}

#[derive(Clone, Copy, Default, Debug)]
struct Request {
    live: bool,
    seq: u32,
    addr: u64,
    capacity: u64,
    region: u32,
    /// Bytes of the message, once its first frame has come.
    total: Option<u64>,
    got: u64,
    /// Bytes of a message that does not fit.
    too_large: Option<u64>,
}

#[derive(Debug)]
struct State {
    ins: Box<[In]>,
    requests: [Request; RING],
    by_slot: [u8; RING],
    next: u32,
    posts: [u8; RING * POST_LEN],
    have: usize,
}

/// The receiving end of a connection.
#[derive(Debug)]
pub struct RecvConnection {
    _service: Arc<Service>,
    gate: Gate<State>,
    failed: OnceLock<Error>,
    regions: AtomicU32,
    peer: String,
}

impl RecvConnection {
    /// The end of a connection that was accepted.
    pub fn new(service: Arc<Service>, sockets: Vec<TcpStream>, peer: SocketAddr) -> RecvConnection {
        let ins = sockets
            .into_iter()
            .map(|socket| In {
                socket,
                ahead: Box::new([0; AHEAD]),
                from: 0,
                to: 0,
                payload: None,
                ended: false,
            })
            .collect();
        RecvConnection {
            _service: service,
            gate: Gate::new(State {
                ins,
                requests: [Request::default(); RING],
                by_slot: [NOBODY; RING],
                next: 0,
                posts: [0; RING * POST_LEN],
                have: 0,
            }),
            failed: OnceLock::new(),
            regions: AtomicU32::new(0),
            peer: format!("connection from {peer}"),
        }
    }

    #[cold]
    fn fail(&self, e: Error) -> Error {
        self.failed.get_or_init(|| e).clone()
    }

    #[cold]
    fn breach(&self, what: &str) -> Error {
        self.fail(Error::remote(format!(
            "{}: the peer breaks the protocol: {what}",
            self.peer
        )))
    }

    #[inline]
    fn trouble(&self) -> Result<()> {
        match self.failed.get() {
            None => Ok(()),
            Some(e) => Err(e.clone()),
        }
    }

    /// Sends the posts that the socket takes.
    #[inline]
    fn flush(&self, st: &mut State) -> Result<()> {
        while st.have > 0 {
            // SAFETY: no bytes but the slice's.
            match unsafe { transmit(&st.ins[0].socket, &st.posts[..st.have], 0, 0) } {
                Moved::Nothing | Moved::End => return Ok(()),
                // The sender may have closed in order; what it sent before counts.
                Moved::Failed(_) => {
                    st.have = 0;
                    return Ok(());
                }
                Moved::Bytes(n) => {
                    st.posts.copy_within(n..st.have, 0);
                    st.have -= n;
                }
            }
        }
        Ok(())
    }

    /// Takes in what has come.
    #[inline]
    fn progress(&self, st: &mut State) -> Result<()> {
        self.flush(st)?;
        let State {
            ins,
            requests,
            by_slot,
            ..
        } = st;
        for i in ins.iter_mut() {
            let mut taken = 0;
            while taken < POLL_BYTES && !i.ended {
                match self.step(i, requests, by_slot)? {
                    0 => break,
                    n => taken += n,
                }
            }
        }
        Ok(())
    }

    /// One step on one socket: bytes that moved, or 0.
    fn step(
        &self,
        i: &mut In,
        requests: &mut [Request; RING],
        by_slot: &[u8; RING],
    ) -> Result<usize> {
        if let Some(p) = &mut i.payload {
            let ahead = (i.to - i.from) as u64;
            let n = match ahead {
                0 => {
                    // SAFETY: the range lies in the buffer of a live receive (`frame` checks it), whose
                    // memory stays registered until it is over or the connection has failed.
                    match unsafe { receive(&i.socket, p.addr, p.left as usize) } {
                        Moved::Nothing => return Ok(0),
                        Moved::End => return Err(self.fail(lost(&self.peer, None))),
                        Moved::Failed(e) => return Err(self.fail(lost(&self.peer, Some(e)))),
                        Moved::Bytes(n) => n as u64,
                    }
                }
                _ => {
                    let n = ahead.min(p.left);
                    // SAFETY: as above; the source is a buffer of ours that holds so much.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            i.ahead[i.from..].as_ptr(),
                            p.addr as *mut u8,
                            n as usize,
                        )
                    };
                    i.from += n as usize;
                    n
                }
            };
            p.addr += n;
            p.left -= n;
            requests[p.request].got += n;
            if p.left == 0 {
                i.payload = None;
            }
            return Ok(n as usize);
        }
        if i.to - i.from >= FRAME_LEN {
            let head: [u8; FRAME_LEN] = i.ahead[i.from..i.from + FRAME_LEN]
                .try_into()
                .expect("32 bytes");
            i.from += FRAME_LEN;
            self.frame(i, &head, requests, by_slot)?;
            return Ok(FRAME_LEN);
        }
        i.ahead.copy_within(i.from..i.to, 0);
        i.to -= i.from;
        i.from = 0;
        let room = &mut i.ahead[i.to..];
        // SAFETY: a buffer of ours.
        match unsafe { receive(&i.socket, room.as_mut_ptr() as u64, room.len()) } {
            Moved::Nothing => Ok(0),
            Moved::End if i.to == 0 => {
                i.ended = true;
                Ok(0)
            }
            Moved::End => Err(self.fail(lost(&self.peer, None))),
            Moved::Failed(e) => Err(self.fail(lost(&self.peer, Some(e)))),
            Moved::Bytes(n) => {
                i.to += n;
                Ok(n)
            }
        }
    }

    fn frame(
        &self,
        i: &mut In,
        head: &[u8; FRAME_LEN],
        requests: &mut [Request; RING],
        by_slot: &[u8; RING],
    ) -> Result<()> {
        let Some(f) = Frame::decode(head) else {
            return Err(self.breach("a frame contradicts itself"));
        };
        let index = by_slot[f.seq as usize % RING] as usize;
        let r = match requests.get_mut(index) {
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
        if f.total > r.capacity || r.total.is_some_and(|t| t != f.total || f.len > t - r.got) {
            return Err(self.breach("a frame has more bytes than its message"));
        }
        r.total = Some(f.total);
        if f.len > 0 {
            i.payload = Some(Payload {
                request: index,
                addr: r.addr + f.offset,
                left: f.len,
            });
        }
        Ok(())
    }

    fn outcome(&self, r: &Request) -> Result<Option<usize>> {
        if let Some(size) = r.too_large {
            return Err(Error::invalid_usage(format!(
                "{}: a receive of {} bytes meets a send of {size} bytes: nothing was written; both sides \
                 must agree on the size",
                self.peer, r.capacity
            )));
        }
        Ok((r.total == Some(r.got)).then_some(r.got as usize))
    }
}

impl End for RecvConnection {
    fn register(&self, addr: u64, len: u64, cuda: bool) -> Result<Region> {
        let id = self.regions.fetch_add(1, Ordering::Relaxed);
        host_region(addr, len, cuda, id).map_err(|e| e.context(&self.peer))
    }

    fn deregister(&self, region: Region) -> Result<()> {
        let Some(st) = self.gate.enter_by(close_deadline()) else {
            log::warn!("{}: in use as a registration ends", self.peer);
            return Ok(());
        };
        if st.requests.iter().any(|r| r.live && r.region == region.id) {
            self.fail(Error::invalid_usage(format!(
                "{}: memory was deregistered while receives into it were posted",
                self.peer
            )));
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
        let trouble = self.trouble().and_then(|()| self.progress(st));
        let outcome = match self.outcome(&st.requests[index]) {
            Ok(None) => match trouble {
                Err(e) => Err(e),
                Ok(()) if st.ins.iter().all(|i| i.ended) => Err(self.fail(lost(&self.peer, None))),
                Ok(()) => return Ok(None),
            },
            r => r,
        };
        let r = &mut st.requests[index];
        r.live = false;
        st.by_slot[r.seq as usize % RING] = NOBODY;
        outcome
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        if let Some(mut st) = self.gate.enter_by(close_deadline()) {
            st.ins = Box::default();
        }
        Ok(())
    }

    fn describe(&self) -> String {
        self.peer.clone()
    }
}

impl RecvEnd for RecvConnection {
    #[inline]
    fn recv(&self, index: usize, addr: u64, len: u64, tag: u32, region: &Region) -> Result<bool> {
        if !region.holds(addr, len) {
            return Err(outside(addr, len, region).context(&self.peer));
        }
        let Some(mut st) = self.gate.enter()? else {
            return Ok(false);
        };
        let st = &mut *st;
        self.trouble()?;
        let seq = st.next;
        if st.by_slot[seq as usize % RING] != NOBODY || st.have + POST_LEN > st.posts.len() {
            return Ok(false);
        }
        st.by_slot[seq as usize % RING] = index as u8;
        st.requests[index] = Request {
            live: true,
            seq,
            addr,
            capacity: len,
            region: region.id,
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
        self.flush(st)?;
        Ok(true)
    }
}
