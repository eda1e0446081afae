//! What both ends of a connection between hosts are made of, whatever moves their bytes, but for the data path's
//! state.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use super::copy_engine::memory::classify;
use super::staging::Staging;
use super::tcp::service::Service;
use super::{verbs, Memory, Region};
use crate::config;
use crate::cuda::driver;
use crate::error::{Error, Result};
use crate::sync::lock;

/// One end.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) service: Arc<Service>,
    pub(crate) failed: OnceLock<Error>,
    regions: AtomicU32,
    pub(crate) staging: OnceLock<Staging>,
    /// Whether the GPU memory that was registered first is VMM memory.
    own_vmm: OnceLock<bool>,
    refused: AtomicBool,
    /// One thread at a time makes the staging, and what belongs to it.
    pub(crate) making: Mutex<()>,
    /// The connection's name in messages to people.
    pub(crate) peer: String,
}

impl Side {
    pub(crate) fn new(service: Arc<Service>, peer: String) -> Side {
        Side {
            service,
            failed: OnceLock::new(),
            regions: AtomicU32::new(0),
            staging: OnceLock::new(),
            own_vmm: OnceLock::new(),
            refused: AtomicBool::new(false),
            making: Mutex::new(()),
            peer,
        }
    }

    /// The connection is over; the first reason counts.
    #[cold]
    pub(crate) fn fail(&self, e: Error) -> Error {
        self.failed.get_or_init(|| e).clone()
    }

    #[inline]
    pub(crate) fn trouble(&self) -> Result<()> {
        match self.failed.get() {
            None => Ok(()),
            Some(e) => Err(e.clone()),
        }
    }

    /// What memory it is.
    pub(crate) fn classify(&self, addr: u64, len: u64, cuda: bool) -> Result<Memory> {
        classify(addr, len, cuda).map_err(|e| e.context(&self.peer))
    }

    /// A region, with the keys that RDMA devices know it by.
    pub(crate) fn region(
        &self,
        addr: u64,
        len: u64,
        memory: Memory,
        keys: Option<Box<verbs::Keys>>,
    ) -> Region {
        Region {
            addr,
            len,
            memory,
            id: self.regions.fetch_add(1, Ordering::Relaxed),
            keys,
        }
    }

    /// Says whether GPU memory is admitted where one of the two ends stages it.
    ///
    /// A user's cudaMalloc memory is refused where NCCL's own buffers, which it registers first, are VMM memory:
    /// NCCL then copies it through those. A copy of this process out of or into cudaMalloc memory takes the lock of
    /// the application's context, and waits for its kernels while another thread of the application loads one; and
    /// NCCL's kernel waits for that copy. Seen with PyTorch; with all kernels loaded at the start it does not
    /// happen. Both ends refuse it, although one may not stage (`mixed`): NCCL needs memory that is registered at
    /// both or at neither.
    pub(crate) fn admit(&self, addr: u64, mixed: bool) -> Result<()> {
        let vmm = driver().is_ok_and(|d| d.is_vmm(addr));
        let eager = std::env::var("CUDA_MODULE_LOADING").is_ok_and(|m| m == "EAGER");
        if *self.own_vmm.get_or_init(|| vmm) && !vmm && !eager {
            let e = Error::invalid_usage(format!(
                "{}: cudaMalloc memory at {addr:#x} is not registered but goes through NCCL's buffers: staged copies of it \
                 could wait for kernels that wait for them (CUDA_MODULE_LOADING=EAGER; or ncclMemAlloc, or \
                 expandable segments, at both ends of a transfer)",
                self.peer
            ));
            if !self.refused.swap(true, Ordering::Relaxed) {
                log::info!("{}", e.text());
                if mixed {
                    log::warn!(
                        "{}: only one of the two hosts has RDMA devices that reach GPU memory; where others that all \
                         do are in the same ring, NCCL may hang with registered cudaMalloc memory \
                         (VCCL_IB_GPU_DIRECT=0 on all hosts, or CUDA_MODULE_LOADING=EAGER)",
                        self.peer
                    );
                }
            }
            // NCCL goes on without, and asks again with each operation.
            return Err(e.again());
        }
        Ok(())
    }

    /// Makes what memory of GPU `ordinal` goes through, unless it is there.
    pub(crate) fn stage(&self, ordinal: i32) -> Result<()> {
        let _one_at_a_time = lock(&self.making);
        if self.staging.get().is_none() {
            let made = Staging::new(ordinal).map_err(|e| e.context(&self.peer))?;
            let _ = self.staging.set(made);
        }
        Ok(())
    }

    /// Memory was taken back that was in use, for `what`.
    #[cold]
    pub(crate) fn taken_back(&self, what: &str) {
        self.fail(Error::invalid_usage(format!(
            "{}: memory was deregistered while {what}",
            self.peer
        )));
    }

    /// Looks whether a copy failed.
    pub(crate) fn check_copies(&self) -> Result<()> {
        match self.staging.get() {
            Some(s) => s.check().map_err(|e| self.copy_failed(e)),
            None => Ok(()),
        }
    }

    #[cold]
    pub(crate) fn copy_failed(&self, e: Error) -> Error {
        self.fail(e.context(&self.peer))
    }

    /// Waits for the copies of an end whose memory or whose life ends.
    pub(crate) fn drain(&self, deadline: Instant) {
        if self.staging.get().is_some_and(|s| !s.drain(deadline)) {
            log::warn!(
                "{}: copies are still in flight after {} ms (VCCL_CLOSE_TIMEOUT)",
                self.peer,
                config::current().close_timeout_ms
            );
        }
    }

    /// Registers memory; GPU memory is staged, by what is made at the first such call.
    pub(crate) fn register(&self, addr: u64, len: u64, cuda: bool) -> Result<Region> {
        let memory = self.classify(addr, len, cuda)?;
        if let Memory::Device(ordinal) = memory {
            self.admit(addr, false)?;
            self.stage(ordinal)?;
        }
        Ok(self.region(addr, len, memory, None))
    }
}
