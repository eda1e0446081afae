//! Threads that move the bytes of one connection's sockets (`NCCL_SOCKET_NTHREADS`), so that it can use more
//! than one core.
//!
//! The polling thread still does everything but moving: it gives a socket's helper a range of memory, and
//! later finds it moved. So a connection's state has one owner, with helpers or without.

use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::handover::{Handover, Head, Work, HEAD_LEN};
use super::wire::FRAME_LEN;
use super::{receive, transmit, Moved};
use crate::error::{Error, Result};
use crate::thread::Thread;

const _: () = assert!(HEAD_LEN == FRAME_LEN);

/// Ranges below this are moved by the polling thread: waking a helper takes longer.
pub const WORTH: u64 = 64 << 10;
/// How long a helper that has nothing to do looks for work before it sleeps: the parts of a message come one
/// after the other, and to be woken takes longer than that. For a socket it sleeps at once: the kernel wakes it,
/// and each look keeps the socket from others.
const PATIENCE: Duration = Duration::from_micros(200);
/// Bytes of one call: as long as halting may take.
const STEP: usize = 1 << 20;

/// What one helper and the polling thread share.
#[derive(Debug)]
struct Shared {
    sockets: Vec<Arc<TcpStream>>,
    handover: Handover,
    wake: EventFd,
    out: bool,
}

/// The helpers of one connection. They end, and are waited for, when it is dropped.
#[derive(Debug)]
pub struct Helpers {
    shared: Vec<Arc<Shared>>,
    threads: Vec<Thread>,
}

impl Helpers {
    /// Starts `n` of them, or as many as there are sockets; `out`: they send.
    pub fn start<'a>(
        sockets: impl Iterator<Item = &'a Arc<TcpStream>>,
        n: usize,
        out: bool,
    ) -> Result<Helpers> {
        let all: Vec<Arc<TcpStream>> = sockets.cloned().collect();
        let n = n.min(all.len());
        let mut helpers = Helpers {
            shared: Vec::new(),
            threads: Vec::new(),
        };
        for k in 0..n {
            let sockets: Vec<Arc<TcpStream>> = all.iter().skip(k).step_by(n).cloned().collect();
            let wake =
                EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
                    .map_err(|e| Error::system("eventfd", e))?;
            let shared = Arc::new(Shared {
                handover: Handover::new(sockets.len()),
                sockets,
                wake,
                out,
            });
            let theirs = shared.clone();
            let thread = Thread::start("vccl-tcp-help", move || theirs.run())?;
            helpers.shared.push(shared);
            helpers.threads.push(thread);
        }
        Ok(helpers)
    }

    fn of(&self, socket: usize) -> (&Shared, usize) {
        let n = self.shared.len();
        (&self.shared[socket % n], socket / n)
    }

    /// Has `[addr, addr + len)` moved over a socket, whose last range is over; where they send, behind the head of
    /// its frame.
    ///
    /// # Safety
    /// The range is valid for that until [`Helpers::moved`] says that it is over, or [`Helpers::halt`] returns.
    pub unsafe fn give(&self, socket: usize, head: &[u8], addr: u64, len: u64) {
        let (h, i) = self.of(socket);
        if h.handover.give(i, head, addr, len) {
            let _ = h.wake.write(1);
        }
    }

    /// What became of what the socket's helper was given, in bytes with those of the head; `None`: it is not over.
    pub fn moved(&self, socket: usize) -> Option<Moved> {
        let (h, i) = self.of(socket);
        h.handover.take(i).map(|(n, end)| match end {
            0 => Moved::Bytes(n as usize),
            ENDED => Moved::End,
            errno => Moved::Failed(errno),
        })
    }

    /// Ends whatever is in flight: on return no helper touches memory.
    pub fn halt(&self) {
        for h in &self.shared {
            for i in 0..h.sockets.len() {
                if h.handover.revoke(i) {
                    let _ = h.wake.write(1);
                }
            }
            while !h.handover.is_quiet() {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        for (h, t) in self.shared.iter().zip(&mut self.threads) {
            t.end(|| {
                h.handover.stop();
                let _ = h.wake.write(1);
            });
        }
    }
}

/// Stands for the end of a stream where else is an errno.
const ENDED: i32 = -1;

impl Shared {
    fn run(&self) {
        let mut fds = Vec::with_capacity(self.sockets.len() + 1);
        let mut last = Instant::now();
        loop {
            let (mut moved, mut waits) = (false, false);
            for (i, socket) in self.sockets.iter().enumerate() {
                match self.handover.work(i) {
                    Work::None => {}
                    Work::Stop => return,
                    Work::Move { head, addr, len } => {
                        match self.step(i, socket, &head, addr, len) {
                            true => moved = true,
                            false => waits = true,
                        }
                    }
                }
            }
            if moved {
                last = Instant::now();
            } else if !waits && last.elapsed() < PATIENCE {
                std::thread::yield_now();
            } else {
                self.sleep(&mut fds);
                last = Instant::now();
            }
        }
    }

    /// Moves a piece; says whether anything came of it.
    fn step(&self, i: usize, socket: &TcpStream, head: &Head, addr: u64, len: u64) -> bool {
        let len = (len as usize).min(STEP);
        // SAFETY: `give`'s caller promised that for the range, until this helper says that it is over.
        let m = unsafe {
            match self.out {
                true => transmit(socket, head.bytes(), addr, len),
                false => receive(socket, addr, len),
            }
        };
        match m {
            Moved::Nothing => return false,
            Moved::End => self.handover.fail(i, ENDED),
            Moved::Failed(errno) => self.handover.fail(i, errno),
            Moved::Bytes(n) => self.handover.advance(i, n as u64),
        }
        true
    }

    /// Waits until a socket that has work is ready, or there is more work.
    fn sleep(&self, fds: &mut Vec<libc::pollfd>) {
        let wait_for = |fd, events| libc::pollfd {
            fd,
            events,
            revents: 0,
        };
        self.handover.announce_sleep();
        fds.clear();
        fds.push(wait_for(self.wake.as_fd().as_raw_fd(), libc::POLLIN));
        for (i, socket) in self.sockets.iter().enumerate() {
            match self.handover.work(i) {
                Work::None => {}
                Work::Stop => return,
                Work::Move { .. } if self.out => {
                    fds.push(wait_for(socket.as_raw_fd(), libc::POLLOUT))
                }
                Work::Move { .. } => fds.push(wait_for(socket.as_raw_fd(), libc::POLLIN)),
            }
        }
        // SAFETY: so many entries are there.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, -1) };
        self.handover.awake();
        let _ = self.wake.read();
    }
}
