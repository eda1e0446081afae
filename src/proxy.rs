//! The progress function: a comm's requests, from isend or irecv until test says that they are over.
//!
//! NCCL's proxy thread polls; each poll moves the whole connection forward, so no thread of ours is
//! on the data path. Nothing here allocates, locks, calls the system or formats text on success.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::transport::{End, RecvEnd, Region, SendEnd};

/// Requests that one comm can have at a time. NCCL asks for 32 for each receive of a group; a
/// group has one here.
pub const REQUESTS: usize = 64;

/// Unsuccessful polls between two looks at the driver: about a millisecond.
const POLLS_BETWEEN_CHECKS: u32 = 1 << 13;

/// One end of a connection with its requests.
#[derive(Debug)]
pub struct Proxy<E: ?Sized> {
    free: AtomicU64,
    polls: AtomicU32,
    end: Box<E>,
}

impl<E: End + ?Sized> Proxy<E> {
    /// A proxy with no request.
    pub fn new(end: Box<E>) -> Proxy<E> {
        Proxy {
            free: AtomicU64::new(u64::MAX),
            polls: AtomicU32::new(0),
            end,
        }
    }

    /// The connection's end, for what is not the data path.
    pub fn end(&self) -> &E {
        &self.end
    }

    /// The same, to close it.
    pub fn end_mut(&mut self) -> &mut E {
        &mut self.end
    }

    /// Starts a request with `begin`, which says whether it took: its index, or `None` to try again.
    #[inline]
    fn start(&self, begin: impl FnOnce(&E, usize) -> Result<bool>) -> Result<Option<usize>> {
        let free = self.free.load(Ordering::Relaxed);
        if free == 0 {
            return Ok(None);
        }
        let index = free.trailing_zeros() as usize;
        if !begin(&self.end, index)? {
            return Ok(None);
        }
        self.free.fetch_and(!(1 << index), Ordering::Relaxed);
        Ok(Some(index))
    }

    /// Moves the connection forward; `Some(bytes)` when request `index` is over. An error ends it too.
    #[inline]
    pub fn test(&self, index: usize) -> Result<Option<usize>> {
        if index >= REQUESTS || self.free.load(Ordering::Relaxed) & (1 << index) != 0 {
            return Err(Error::invalid_argument("test of a request that is over"));
        }
        let r = match self.end.poll(index) {
            Ok(None) => {
                let n = self.polls.load(Ordering::Relaxed).wrapping_add(1);
                self.polls.store(n, Ordering::Relaxed);
                if n % POLLS_BETWEEN_CHECKS != 0 {
                    return Ok(None);
                }
                match self.end.check() {
                    Ok(()) => return Ok(None),
                    Err(e) => Err(e),
                }
            }
            r => r,
        };
        self.free.fetch_or(1 << index, Ordering::Relaxed);
        r
    }
}

impl Proxy<dyn SendEnd> {
    /// Starts a send; `None`: not yet.
    #[inline]
    pub fn isend(&self, addr: u64, len: u64, tag: u32, region: &Region) -> Result<Option<usize>> {
        self.start(|end, index| end.send(index, addr, len, tag, region))
    }
}

impl Proxy<dyn RecvEnd> {
    /// Starts a receive; `None`: not yet.
    #[inline]
    pub fn irecv(&self, addr: u64, len: u64, tag: u32, region: &Region) -> Result<Option<usize>> {
        self.start(|end, index| end.recv(index, addr, len, tag, region))
    }
}
