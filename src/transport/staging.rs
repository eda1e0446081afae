//! GPU memory over a transport that moves host memory: chunks of page-locked memory that the copy engines
//! fill or empty, several in flight, driven by step counters that the stream itself writes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Instant;

use super::copy_engine::engine::{Engine, Gpu};
use super::copy_engine::shm::Shm;
use super::copy_engine::steps::{reached, HOST_CHUNKS};
use crate::cuda::Relaxed;
use crate::error::Result;

/// Chunks of one end of a connection.
pub const CHUNKS: usize = HOST_CHUNKS;
/// Bytes of each, for the first ends of a process: fewer calls to the driver for each byte.
pub const LARGE: usize = 512 << 10;
/// Bytes of each for those that come when [`LARGE_TOTAL`] is used up. All chunks of 1,000 ends together stay
/// under 1 GiB.
pub const SMALL: usize = 64 << 10;
/// Bytes of all large chunks of the process together.
const LARGE_TOTAL: usize = 256 << 20;

/// Bytes of large chunks in use.
static USED: AtomicUsize = AtomicUsize::new(0);

/// The bytes of one end's chunks, given back when it ends.
#[derive(Debug)]
struct Share(usize);

impl Share {
    fn take() -> Share {
        let more = |used: usize| Some(used + CHUNKS * LARGE).filter(|u| *u <= LARGE_TOTAL);
        match USED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Share(LARGE),
            Err(_) => Share(SMALL),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.0 == LARGE {
            USED.fetch_sub(CHUNKS * LARGE, Ordering::Relaxed);
        }
    }
}

/// The chunks of one end, and the engine that copies.
#[derive(Debug)]
pub struct Staging {
    // Dropped before the memory that it has page-locked.
    engine: Engine,
    shm: Arc<Shm>,
    share: Share,
}

impl Staging {
    /// Makes everything that the data path needs.
    pub fn new(ordinal: i32) -> Result<Staging> {
        let _relaxed = Relaxed::begin();
        let share = Share::take();
        let (shm, _) = Shm::create(share.0)?;
        let shm = Arc::new(shm);
        let engine = Engine::new(Gpu::of_device(ordinal)?, shm.clone())?;
        engine.register_ring()?;
        Ok(Staging { engine, shm, share })
    }

    /// Bytes of one chunk.
    #[inline]
    pub fn chunk(&self) -> usize {
        self.share.0
    }

    /// Where the CPU finds chunk `i`.
    #[inline]
    pub fn host(&self, i: usize) -> u64 {
        self.shm.base() as u64 + self.shm.host_chunk_offset(i) as u64
    }

    /// Starts a copy between GPU memory at `gpu` and the first `len` bytes of chunk `i`; `step` is that of
    /// the copy before in this chunk, plus one.
    ///
    /// # Safety
    /// `[gpu, gpu + len)` is valid for the copy until [`Staging::is_over`], or [`Staging::drain`] says so.
    #[inline]
    pub unsafe fn copy(&self, i: usize, gpu: u64, len: usize, out: bool, step: u32) -> Result<()> {
        debug_assert!(len <= self.chunk());
        let chunk = self.engine.ring_chunk(i).expect("registered by new");
        let (dst, src) = if out { (chunk, gpu) } else { (gpu, chunk) };
        let word = &self.shm.shared().host[i].filled;
        // SAFETY: the chunk lives as long as the engine; for the GPU's memory the caller's promise.
        unsafe { self.engine.copy_then_write(dst, src, len, word, step) }
    }

    /// Whether the copy of that step is over.
    #[inline]
    pub fn is_over(&self, i: usize, step: u32) -> bool {
        reached(
            self.shm.shared().host[i].filled.load(Ordering::Acquire),
            step,
        )
    }

    /// Waits until no copy is in flight; says whether that came about by `deadline`.
    pub fn drain(&self, deadline: Instant) -> bool {
        let _relaxed = Relaxed::begin();
        self.engine.drain(deadline).unwrap_or(true)
    }

    /// Whether a copy failed.
    pub fn check(&self) -> Result<()> {
        self.engine.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_ends_stay_under_a_gibibyte() {
        let all: Vec<Share> = (0..1000).map(|_| Share::take()).collect();
        let bytes: usize = all.iter().map(|s| CHUNKS * s.0).sum();
        assert!(bytes < 1 << 30, "{bytes}");
        let large = all.iter().filter(|s| s.0 == LARGE).count();
        assert!(large > 0 && large <= LARGE_TOTAL / (CHUNKS * LARGE));
        drop(all);
        // Others may have some meanwhile, but not all of them.
        assert_eq!(Share::take().0, LARGE);
    }
}
