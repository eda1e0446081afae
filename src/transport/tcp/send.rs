//! The sending end.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use super::service::Service;
use super::wire::{kind, Frame, Post, FRAME_LEN, POST_LEN};
use super::{lost, receive, transmit, Moved, RING};
use crate::error::{Error, Result};
use crate::gate::Gate;
use crate::transport::copy_engine::link::close_deadline;
use crate::transport::{host_region, outside, End, Region, SendEnd};

/// A message is split over sockets only in parts of this size or more.
const STRIPE: u64 = 64 << 10;

/// A frame on its way.
#[derive(Debug)]
struct Item {
    request: usize,
    head: [u8; FRAME_LEN],
    head_sent: usize,
    addr: u64,
    len: u64,
}

#[derive(Debug)]
struct Out {
    socket: TcpStream,
    queue: VecDeque<Item>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Request {
    live: bool,
    /// Frames that are not out yet.
    frames: u32,
    len: u64,
    region: u32,
    /// The receive that it did not fit.
    capacity: Option<u64>,
}

#[derive(Debug)]
struct State {
    outs: Box<[Out]>,
    /// Which socket the next small message takes.
    turn: usize,
    requests: [Request; RING],
    posts: VecDeque<Post>,
    /// Number of the next post that will come.
    next: u32,
    /// Bytes of a post that has not come whole.
    bytes: [u8; RING * POST_LEN],
    have: usize,
}

/// The sending end of a connection.
#[derive(Debug)]
pub struct SendConnection {
    service: Arc<Service>,
    gate: Gate<State>,
    failed: OnceLock<Error>,
    regions: AtomicU32,
    peer: String,
    closed: bool,
}

impl SendConnection {
    /// The end of a connection that was answered.
    pub fn new(service: Arc<Service>, sockets: Vec<TcpStream>, peer: SocketAddr) -> SendConnection {
        let outs = sockets
            .into_iter()
            .map(|socket| Out {
                socket,
                queue: VecDeque::with_capacity(RING),
            })
            .collect();
        SendConnection {
            service,
            gate: Gate::new(State {
                outs,
                turn: 0,
                requests: [Request::default(); RING],
                posts: VecDeque::with_capacity(RING),
                next: 0,
                bytes: [0; RING * POST_LEN],
                have: 0,
            }),
            failed: OnceLock::new(),
            regions: AtomicU32::new(0),
            peer: format!("connection to {peer}"),
            closed: false,
        }
    }

    /// Sockets that it has.
    pub fn sockets(&mut self) -> usize {
        self.gate
            .enter_by(close_deadline())
            .map_or(0, |st| st.outs.len())
    }

    #[cold]
    fn fail(&self, e: Error) -> Error {
        self.failed.get_or_init(|| e).clone()
    }

    #[inline]
    fn trouble(&self) -> Result<()> {
        match self.failed.get() {
            None => Ok(()),
            Some(e) => Err(e.clone()),
        }
    }

    /// Takes in what the receiver has posted.
    #[inline]
    fn read_posts(&self, st: &mut State) -> Result<()> {
        loop {
            let room = &mut st.bytes[st.have..];
            // SAFETY: a buffer of ours.
            match unsafe { receive(&st.outs[0].socket, room.as_mut_ptr() as u64, room.len()) } {
                Moved::Nothing => return Ok(()),
                Moved::End => return Err(self.fail(lost(&self.peer, None))),
                Moved::Failed(errno) => return Err(self.fail(lost(&self.peer, Some(errno)))),
                Moved::Bytes(n) => st.have += n,
            }
            let whole = st.have / POST_LEN * POST_LEN;
            for at in (0..whole).step_by(POST_LEN) {
                let p = Post::decode(&st.bytes[at..at + POST_LEN].try_into().expect("16 bytes"));
                if p.seq != st.next || st.posts.len() == RING {
                    return Err(self.fail(Error::remote(format!(
                        "{}: the peer breaks the protocol: receive {} is posted where {} should be",
                        self.peer, p.seq, st.next
                    ))));
                }
                st.next = st.next.wrapping_add(1);
                st.posts.push_back(p);
            }
            st.bytes.copy_within(whole..st.have, 0);
            st.have -= whole;
        }
    }

    /// Sends what the sockets take.
    #[inline]
    fn flush(&self, st: &mut State) -> Result<()> {
        for out in st.outs.iter_mut() {
            while let Some(item) = out.queue.front_mut() {
                let head = &item.head[item.head_sent..];
                // SAFETY: the request's memory is registered, and stays so until its request is over or
                // the connection has failed: `deregister` sees to that.
                match unsafe { transmit(&out.socket, head, item.addr, item.len as usize) } {
                    Moved::Nothing => break,
                    Moved::End => break,
                    Moved::Failed(errno) => return Err(self.fail(lost(&self.peer, Some(errno)))),
                    Moved::Bytes(n) => {
                        let of_head = n.min(head.len());
                        item.head_sent += of_head;
                        item.addr += (n - of_head) as u64;
                        item.len -= (n - of_head) as u64;
                        if item.head_sent == FRAME_LEN && item.len == 0 {
                            st.requests[item.request].frames -= 1;
                            out.queue.pop_front();
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl State {
    fn enqueue(&mut self, socket: usize, request: usize, frame: Frame, addr: u64) {
        self.requests[request].frames += 1;
        self.outs[socket].queue.push_back(Item {
            request,
            head: frame.encode(),
            head_sent: 0,
            addr,
            len: frame.len,
        });
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
            let socket = self.turn;
            self.turn = (self.turn + 1) % self.outs.len();
            self.enqueue(socket, request, frame, addr + offset);
        }
    }
}

impl End for SendConnection {
    fn register(&self, addr: u64, len: u64, cuda: bool) -> Result<Region> {
        let id = self.regions.fetch_add(1, Ordering::Relaxed);
        host_region(addr, len, cuda, id).map_err(|e| e.context(&self.peer))
    }

    fn deregister(&self, region: Region) -> Result<()> {
        let Some(mut st) = self.gate.enter_by(close_deadline()) else {
            log::warn!("{}: in use as a registration ends", self.peer);
            return Ok(());
        };
        let st = &mut *st;
        let uses = |r: &Request| r.live && r.region == region.id && r.frames > 0;
        if st.requests.iter().any(uses) {
            self.fail(Error::invalid_usage(format!(
                "{}: memory was deregistered while sends out of it were in flight",
                self.peer
            )));
            for out in st.outs.iter_mut() {
                out.queue.clear();
            }
        }
        Ok(())
    }

    #[inline]
    fn poll(&self, index: usize) -> Result<Option<usize>> {
        let Some(mut st) = self.gate.enter()? else {
            return Ok(None);
        };
        let st = &mut *st;
        let trouble = self.trouble().and_then(|()| self.flush(st));
        let r = &mut st.requests[index];
        if r.frames > 0 {
            if let Err(e) = trouble {
                r.live = false;
                return Err(e);
            }
            return Ok(None);
        }
        r.live = false;
        match r.capacity {
            None => Ok(Some(r.len as usize)),
            Some(capacity) => Err(Error::invalid_usage(format!(
                "{}: a send of {} bytes meets a receive of {capacity} bytes: nothing was written; both \
                 sides must agree on the size",
                self.peer, r.len
            ))),
        }
    }

    fn check(&self) -> Result<()> {
        let Some(mut st) = self.gate.enter()? else {
            return Ok(());
        };
        self.trouble()?;
        self.read_posts(&mut st)
    }

    fn close(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        let unfinished = self.failed.get().is_some();
        if let Some(mut st) = self.gate.enter_by(close_deadline()) {
            let busy = st.outs.iter().any(|o| !o.queue.is_empty());
            let outs = std::mem::take(&mut st.outs);
            // Whoever gave up half a frame must not look as if all had been said.
            if !unfinished && !busy {
                self.service
                    .linger(Vec::from(outs).into_iter().map(|o| o.socket));
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        self.peer.clone()
    }
}

impl SendEnd for SendConnection {
    #[inline]
    fn send(&self, index: usize, addr: u64, len: u64, tag: u32, region: &Region) -> Result<bool> {
        if !region.holds(addr, len) {
            return Err(outside(addr, len, region).context(&self.peer));
        }
        let Some(mut st) = self.gate.enter()? else {
            return Ok(false);
        };
        let st = &mut *st;
        self.trouble()?;
        let find = |st: &State| st.posts.iter().position(|p| p.tag == tag);
        let found = match find(st) {
            Some(i) => Some(i),
            None => {
                self.read_posts(st)?;
                find(st)
            }
        };
        let Some(post) = found.and_then(|i| st.posts.remove(i)) else {
            return Ok(false);
        };
        st.requests[index] = Request {
            live: true,
            frames: 0,
            len,
            region: region.id,
            capacity: (len > post.capacity).then_some(post.capacity),
        };
        if len > post.capacity {
            let frame = Frame {
                kind: kind::TOO_LARGE,
                seq: post.seq,
                total: len,
                offset: 0,
                len: 0,
            };
            st.enqueue(0, index, frame, addr);
        } else {
            st.split(index, post.seq, addr, len);
        }
        // Trouble here is told by test: the request has begun.
        let _ = self.flush(st);
        Ok(true)
    }
}

impl Drop for SendConnection {
    fn drop(&mut self) {
        let _ = self.close();
    }
}
