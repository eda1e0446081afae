//! Peers' allocations, mapped into this process: once for each allocation and GPU, counted, bounded.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::engine::Gpu;
use super::wire::ExportKind;
use crate::config;
use crate::cuda::{driver, AllocationHandle, DevicePtr, Driver, IpcHandle};
use crate::error::{Error, Result};

/// Mappings of this process, over all links.
static MAPPINGS: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
enum Parts {
    Vmm {
        handles: Vec<(u64, AllocationHandle)>,
        total: u32,
    },
    Ipc {
        handle: [u8; 64],
        base: DevicePtr,
        size: u64,
    },
}

/// Where an export is mapped, and for whom.
#[derive(Debug)]
struct Mapping {
    driver: &'static Driver,
    gpu: Gpu,
    addr: DevicePtr,
    kind: MappingKind,
}

#[derive(Debug)]
enum MappingKind {
    Vmm {
        len: u64,
        sizes: Vec<u64>,
    },
    Ipc,
    /// The exporter is this very process: its own address serves.
    Own,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        MAPPINGS.fetch_sub(1, Ordering::Relaxed);
        match &self.kind {
            MappingKind::Vmm { len, sizes } => {
                let mut at = self.addr;
                for size in sizes {
                    // SAFETY: who leaves the last reference has waited for the copies (`leave`).
                    unsafe { self.driver.unmap(at, *size as usize) };
                    at += size;
                }
                // SAFETY: everything in it has just been unmapped.
                unsafe { self.driver.free_reservation(self.addr, *len as usize) };
            }
            MappingKind::Ipc => {
                if let Ok(_entered) = self.driver.enter(self.gpu.context) {
                    // SAFETY: who leaves the last reference has waited for the copies (`leave`).
                    unsafe { self.driver.ipc_close(self.addr) };
                }
            }
            MappingKind::Own => {}
        }
    }
}

#[derive(Debug)]
struct Import {
    uuid: [u8; 16],
    parts: Parts,
    mappings: Vec<Mapping>,
    /// The GPUs of this process that may use the first mapping of VMM memory.
    allowed: Vec<i32>,
    refs: usize,
    withdrawn: bool,
    /// Copies may use its mappings for ever.
    pinned: bool,
    /// Why it cannot be mapped.
    broken: Option<String>,
    driver: Option<&'static Driver>,
}

impl Drop for Import {
    fn drop(&mut self) {
        if self.pinned {
            std::mem::forget(std::mem::take(&mut self.mappings));
            return;
        }
        self.mappings.clear();
        if let (Parts::Vmm { handles, .. }, Some(driver)) = (&self.parts, self.driver) {
            for (_, h) in handles {
                driver.release_allocation(*h);
            }
        }
    }
}

/// A mapped export.
#[derive(Clone, Copy, Debug)]
pub struct Reached {
    /// Its first address here.
    pub addr: DevicePtr,
    /// Bytes.
    pub len: u64,
    /// Whether it lies in the GPU that reaches for it: then copies to it are local.
    pub same_gpu: bool,
}

/// The exports of one link's peer.
#[derive(Default, Debug)]
pub struct Imports {
    all: HashMap<u64, Import>,
}

impl Imports {
    /// Notes an offer, or a further part of one. Descriptors are imported and closed at once: a large
    /// allocation has more of them than a process may have open. `cut`: some did not arrive.
    pub fn offered(
        &mut self,
        export: u64,
        uuid: [u8; 16],
        kind: ExportKind,
        fds: Vec<OwnedFd>,
        cut: bool,
    ) -> Result<()> {
        let (sizes, fresh) = match kind {
            ExportKind::Vmm { sizes, total } => {
                let handles = Vec::new();
                (sizes, Parts::Vmm { handles, total })
            }
            ExportKind::Ipc { handle, base, size } => {
                if self.all.contains_key(&export) {
                    return Err(Error::remote("the peer offered one allocation twice"));
                }
                (Vec::new(), Parts::Ipc { handle, base, size })
            }
        };
        let import = self.all.entry(export).or_insert_with(|| Import {
            uuid,
            parts: fresh,
            mappings: Vec::new(),
            allowed: Vec::new(),
            refs: 0,
            withdrawn: false,
            pinned: false,
            broken: None,
            driver: driver().ok(),
        });
        let Parts::Vmm { handles, total } = &mut import.parts else {
            return Ok(());
        };
        if handles.len() + sizes.len() > *total as usize || import.refs > 0 {
            return Err(Error::remote(
                "the peer offered more allocations than it announced",
            ));
        }
        if cut {
            import.broken = Some(
                "its descriptors did not all arrive: this process is at its limit of open files \
                 (ulimit -n)"
                    .into(),
            );
            return Ok(());
        }
        let Some(driver) = import.driver else {
            import.broken = Some("this process has no CUDA driver".into());
            return Ok(());
        };
        for (size, fd) in sizes.into_iter().zip(fds) {
            match driver.import_allocation(fd.as_fd()) {
                Ok(h) => handles.push((size, h)),
                Err(e) => import.broken = Some(e.text().to_string()),
            }
        }
        Ok(())
    }

    /// The peer will name the export no more.
    pub fn withdrawn(&mut self, export: u64) {
        if let Some(i) = self.all.get_mut(&export) {
            i.withdrawn = true;
            if i.refs == 0 {
                self.all.remove(&export);
            }
        }
    }

    /// Maps an export for `gpu`, if it is not mapped yet, and counts one more user of it.
    pub fn reach(&mut self, export: u64, gpu: &Gpu, same_process: bool) -> Result<Reached> {
        let import = self
            .all
            .get_mut(&export)
            .ok_or_else(|| Error::remote("the peer names an allocation that it has not offered"))?;
        if let Some(why) = &import.broken {
            return Err(Error::remote(why.clone()));
        }
        let reached = import.map(gpu, same_process)?;
        import.refs += 1;
        Ok(reached)
    }

    /// One user less; the last one's leaving unmaps. The caller has waited for all its copies. The
    /// allocation itself is kept until the peer withdraws it.
    pub fn leave(&mut self, export: u64) {
        if let Some(i) = self.all.get_mut(&export) {
            i.refs = i.refs.saturating_sub(1);
            if i.refs == 0 {
                if !i.pinned {
                    i.mappings.clear();
                    i.allowed.clear();
                }
                if i.withdrawn {
                    self.all.remove(&export);
                }
            }
        }
    }

    /// One user less, but copies of its may go on for ever: the export stays mapped for good.
    pub fn abandon(&mut self, export: u64) {
        if let Some(i) = self.all.get_mut(&export) {
            i.pinned = true;
        }
        self.leave(export);
    }
}

impl Import {
    fn map(&mut self, gpu: &Gpu, same_process: bool) -> Result<Reached> {
        let same_gpu = self.uuid == gpu.uuid;
        let d = gpu.driver;
        let limit = config::current().max_mappings;
        let room = || {
            if MAPPINGS.fetch_add(1, Ordering::Relaxed) < limit {
                Ok(())
            } else {
                MAPPINGS.fetch_sub(1, Ordering::Relaxed);
                Err(Error::system(
                    format!("this process has {limit} mappings of peers' memory; raise VCCL_MAX_MAPPINGS"),
                    nix::errno::Errno::ENOSPC,
                ))
            }
        };
        match &mut self.parts {
            Parts::Vmm { handles, total } => {
                if handles.len() != *total as usize {
                    return Err(Error::remote(format!(
                        "the peer offered {} of {total} allocations",
                        handles.len()
                    )));
                }
                let len = handles
                    .iter()
                    .try_fold(0u64, |sum, (size, _)| sum.checked_add(*size))
                    .ok_or_else(|| Error::remote("the peer's allocation has an impossible size"))?;
                if let Some(m) = self.mappings.first() {
                    if !self.allowed.contains(&gpu.ordinal) {
                        d.allow_access(m.addr, len as usize, gpu.ordinal)?;
                        self.allowed.push(gpu.ordinal);
                    }
                    return Ok(Reached {
                        addr: m.addr,
                        len,
                        same_gpu,
                    });
                }
                room()?;
                let addr = d.reserve(len as usize).inspect_err(|_| {
                    MAPPINGS.fetch_sub(1, Ordering::Relaxed);
                })?;
                // From here on dropping `m` undoes what has been done.
                let kind = MappingKind::Vmm {
                    len,
                    sizes: Vec::with_capacity(handles.len()),
                };
                let mut m = Mapping {
                    driver: d,
                    gpu: *gpu,
                    addr,
                    kind,
                };
                let mut at = addr;
                for (size, h) in handles.iter() {
                    d.map(at, *size as usize, *h)?;
                    at += size;
                    if let MappingKind::Vmm { sizes, .. } = &mut m.kind {
                        sizes.push(*size);
                    }
                }
                d.allow_access(addr, len as usize, gpu.ordinal)?;
                self.allowed.push(gpu.ordinal);
                self.mappings.push(m);
                Ok(Reached {
                    addr,
                    len,
                    same_gpu,
                })
            }
            Parts::Ipc { handle, base, size } => {
                let (base, len) = (*base, *size);
                if let Some(m) = self.mappings.iter().find(|m| m.gpu.context == gpu.context) {
                    return Ok(Reached {
                        addr: m.addr,
                        len,
                        same_gpu,
                    });
                }
                room()?;
                let undo = |_: &Error| {
                    MAPPINGS.fetch_sub(1, Ordering::Relaxed);
                };
                let (addr, kind) = if same_process {
                    own_process(gpu, base).inspect_err(undo)?;
                    (base, MappingKind::Own)
                } else {
                    let opened = open_ipc(gpu, handle, len).inspect_err(undo)?;
                    (opened, MappingKind::Ipc)
                };
                self.mappings.push(Mapping {
                    driver: d,
                    gpu: *gpu,
                    addr,
                    kind,
                });
                Ok(Reached {
                    addr,
                    len,
                    same_gpu,
                })
            }
        }
    }
}

/// Opens a peer's cudaMalloc allocation, which must be as large as the peer says.
fn open_ipc(gpu: &Gpu, handle: &IpcHandle, len: u64) -> Result<DevicePtr> {
    let d = gpu.driver;
    let _entered = d.enter(gpu.context)?;
    let addr = d.ipc_open(handle)?;
    match d.address_range(addr) {
        Ok((base, size)) if base == addr && size as u64 >= len => Ok(addr),
        found => {
            // SAFETY: opened just now, and used by nobody.
            unsafe { d.ipc_close(addr) };
            Err(found.err().unwrap_or_else(|| {
                Error::remote("the peer's allocation is not as large as it says")
            }))
        }
    }
}

/// The exporter is this process, where a cudaIpc handle cannot be opened: let the GPU reach the
/// memory's own device instead.
fn own_process(gpu: &Gpu, addr: DevicePtr) -> Result<()> {
    use crate::cuda::PointerKind;
    match gpu.driver.pointer_kind(addr) {
        PointerKind::Device(o) if o == gpu.ordinal => Ok(()),
        PointerKind::Device(o) => {
            let peer = gpu.driver.primary_context(o)?;
            let r = gpu
                .driver
                .enter(gpu.context)
                .and_then(|_e| gpu.driver.enable_peer_access(peer));
            gpu.driver.release_primary_context(o);
            r
        }
        _ => Err(Error::remote(
            "the peer offered GPU memory that has been freed",
        )),
    }
}
