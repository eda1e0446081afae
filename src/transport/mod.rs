//! What moves the bytes of one connection, behind one trait for each end.

pub mod copy_engine;
mod side;
pub mod staging;
pub mod tcp;
pub mod verbs;

use std::fmt;
use std::time::{Duration, Instant};

use crate::config;
use crate::error::{Error, Result};

/// What memory a region is, as far as the data path must know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// Host memory that no GPU can read.
    Host,
    /// Host memory that the CUDA driver has page-locked.
    PinnedHost,
    /// Memory of the GPU with that ordinal in this process.
    Device(i32),
}

impl Memory {
    /// Whether the CPU can read and write it.
    #[inline]
    pub fn is_host(self) -> bool {
        !matches!(self, Memory::Device(_))
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Memory::Host => f.write_str("host memory"),
            Memory::PinnedHost => f.write_str("page-locked host memory"),
            Memory::Device(d) => write!(f, "memory of GPU {d}"),
        }
    }
}

/// Memory registered with one end of one connection.
#[derive(Debug)]
pub struct Region {
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// What it is.
    pub memory: Memory,
    /// The region's number in its connection; meaningless at the sending end.
    pub id: u32,
    /// What an RDMA device knows it by, if one does.
    pub keys: Option<Box<verbs::Keys>>,
}

impl Region {
    /// Whether `[addr, addr + len)` lies within the region.
    #[inline]
    pub fn holds(&self, addr: u64, len: u64) -> bool {
        addr.checked_sub(self.addr)
            .is_some_and(|o| o <= self.len && len <= self.len - o)
    }
}

/// A send or receive that its registration does not cover.
#[cold]
pub fn outside(addr: u64, len: u64, region: &Region) -> Error {
    Error::invalid_argument(format!(
        "{len} bytes at {addr:#x} do not lie in the registered region of {} bytes at {:#x}",
        region.len, region.addr
    ))
}

/// A receive whose message does not fit it.
#[cold]
pub fn does_not_fit(peer: impl fmt::Display, capacity: u64, size: u64) -> Error {
    Error::invalid_usage(format!(
        "{peer}: a receive of {capacity} bytes meets a send of {size} bytes: nothing was written; both sides \
         must agree on the size"
    ))
}

/// A send that does not fit its receive.
#[cold]
pub fn too_large(peer: impl fmt::Display, size: u64, capacity: u64) -> Error {
    Error::invalid_usage(format!(
        "{peer}: a send of {size} bytes meets a receive of {capacity} bytes: nothing was written; both sides \
         must agree on the size"
    ))
}

/// What every end can do.
pub trait End: Send + Sync {
    /// Registers memory; `cuda` says that NCCL takes it for GPU memory. Any thread.
    fn register(&self, addr: u64, len: u64, cuda: bool) -> Result<Region>;

    /// Takes a region back. On return no copy of ours touches it, or a warning has said so. Any thread.
    fn deregister(&self, region: Region) -> Result<()>;

    /// Moves forward what the end has in flight, and says whether request `index` is over, with its
    /// bytes. No allocation, lock or system call. An error ends the request too.
    fn poll(&self, index: usize) -> Result<Option<usize>>;

    /// Looks for trouble that only a call to the driver shows. Seldom called.
    fn check(&self) -> Result<()>;

    /// Ends the connection: waits, in bounded time, for the copies that it owns.
    fn close(&mut self) -> Result<()>;

    /// Names the connection and its peer in messages to people.
    fn describe(&self) -> String;
}

/// The sending end of one connection.
pub trait SendEnd: End {
    /// Starts sending `[addr, addr + len)` as request `index`; `false`: not yet, try again.
    fn send(&self, index: usize, addr: u64, len: u64, tag: u32, region: &Region) -> Result<bool>;
}

/// The receiving end of one connection.
pub trait RecvEnd: End {
    /// Starts receiving into `[addr, addr + len)` as request `index`; `false`: not yet, try again.
    fn recv(&self, index: usize, addr: u64, len: u64, tag: u32, region: &Region) -> Result<bool>;
}

/// 128 random bits.
pub fn random() -> [u8; 16] {
    let mut n = [0u8; 16];
    let mut filled = 0;
    while filled < n.len() {
        // SAFETY: writes at most the given length into the rest of `n`.
        let r = unsafe { libc::getrandom(n[filled..].as_mut_ptr().cast(), n.len() - filled, 0) };
        if r > 0 {
            filled += r as usize;
        }
    }
    n
}

/// Until when close and deregMr may wait for copies of this process, from now on.
pub fn close_deadline() -> Instant {
    Instant::now() + Duration::from_millis(config::current().close_timeout_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_does_not_wrap() {
        let r = Region {
            addr: 100,
            len: 10,
            memory: Memory::Host,
            id: 0,
            keys: None,
        };
        assert!(r.holds(100, 10) && r.holds(110, 0) && r.holds(105, 5));
        assert!(!r.holds(99, 1) && !r.holds(105, 6) && !r.holds(111, 0));
        assert!(!r.holds(101, u64::MAX) && !r.holds(u64::MAX, u64::MAX));
    }
}
