//! What a registered address is, and how another process can map it.

use std::os::fd::OwnedFd;

use super::wire::{ExportKind, MAX_FDS};
use crate::cuda::{driver, AllocationHandle, DevicePtr, Driver, IpcHandle, PointerKind};
use crate::error::{Error, Result};
use crate::transport::Memory;

/// Classifies `[addr, addr + len)`. `cuda`: NCCL takes it for GPU memory.
pub fn classify(addr: u64, len: u64, cuda: bool) -> Result<Memory> {
    if addr.checked_add(len).is_none() {
        return Err(Error::invalid_argument(format!(
            "a region of {len} bytes at {addr:#x} runs past the end of the address space"
        )));
    }
    let Ok(driver) = driver() else {
        if cuda {
            return Err(Error::invalid_usage(format!(
                "{addr:#x} is registered as GPU memory, but {}",
                driver().err().unwrap_or_default()
            )));
        }
        return Ok(Memory::Host);
    };
    match driver.pointer_kind(addr) {
        PointerKind::Device(ordinal) => Ok(Memory::Device(ordinal)),
        PointerKind::PinnedHost => Ok(Memory::PinnedHost),
        PointerKind::Unknown if cuda => Err(Error::invalid_argument(format!(
            "{addr:#x} is registered as GPU memory, but the CUDA driver does not know it; \
             was it freed?"
        ))),
        PointerKind::Unknown => Ok(Memory::Host),
    }
}

/// One VMM allocation of an export.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Segment {
    /// Where it is mapped in this process.
    pub base: DevicePtr,
    /// Bytes.
    pub size: u64,
    /// The allocation; identity as well as reference.
    pub handle: AllocationHandle,
}

/// What tells one allocation from another that had the same address before.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Identity {
    /// VMM allocations that follow one another.
    Vmm(Vec<Segment>),
    /// A cudaMalloc allocation: address, bytes, and the driver's number for it.
    Ipc(DevicePtr, u64, u64),
}

/// An allocation that another process can map; keeps a reference to it.
#[derive(Debug)]
pub struct Exportable {
    driver: &'static Driver,
    /// What it is.
    pub identity: Identity,
    /// First address.
    pub base: DevicePtr,
    ipc: Option<IpcHandle>,
}

impl Drop for Exportable {
    fn drop(&mut self) {
        if let Identity::Vmm(segments) = &self.identity {
            for s in segments {
                self.driver.release_allocation(s.handle);
            }
        }
    }
}

impl Exportable {
    /// Finds how the allocation (or allocations) behind `[addr, addr + len)` can be exported, or why
    /// it cannot. Errors with `ncclInvalidArgument` when the range is not all allocated.
    pub fn find(addr: DevicePtr, len: u64) -> Result<std::result::Result<Exportable, String>> {
        let driver = driver().map_err(Error::invalid_usage)?;
        let end = addr + len.max(1);
        let (base, size) = driver.address_range(addr)?;
        if let Ok(handle) = driver.retain_allocation(addr) {
            let mut e = Exportable {
                driver,
                identity: Identity::Vmm(vec![Segment {
                    base,
                    size: size as u64,
                    handle,
                }]),
                base,
                ipc: None,
            };
            let mut next = base + size as u64;
            while next < end {
                let found = driver
                    .address_range(next)
                    .and_then(|(b, s)| Ok((b, s as u64, driver.retain_allocation(next)?)));
                match found {
                    Ok((b, size, handle)) if b == next && size > 0 => {
                        if let Identity::Vmm(segments) = &mut e.identity {
                            segments.push(Segment {
                                base: b,
                                size,
                                handle,
                            });
                        }
                        next = b + size;
                    }
                    other => {
                        if let Ok((_, _, handle)) = other {
                            driver.release_allocation(handle);
                        }
                        return Err(Error::invalid_argument(format!(
                            "a region of {len} bytes at {addr:#x} is registered, but memory is mapped \
                             only up to {next:#x}"
                        )));
                    }
                }
            }
            // Try one: whether allocations can be exported was decided when they were made.
            return Ok(match e.fds(0, 1) {
                Ok(_) => Ok(e),
                Err(why) => Err(why.text().to_string()),
            });
        }
        if base + (size as u64) < end {
            return Err(Error::invalid_argument(format!(
                "a region of {len} bytes at {addr:#x} is registered, but its allocation ends at {:#x}",
                base + size as u64
            )));
        }
        Ok(match driver.ipc_handle(base) {
            Ok(h) => Ok(Exportable {
                driver,
                identity: Identity::Ipc(base, size as u64, driver.buffer_id(base)),
                base,
                ipc: Some(h),
            }),
            Err(why) => Err(why.text().to_string()),
        })
    }

    /// An allocation of ours, all of it. Takes the reference `handle` over.
    pub fn of_handle(
        driver: &'static Driver,
        handle: AllocationHandle,
        base: DevicePtr,
        size: u64,
    ) -> Self {
        Exportable {
            driver,
            identity: Identity::Vmm(vec![Segment { base, size, handle }]),
            base,
            ipc: None,
        }
    }

    fn fds(&self, first: usize, most: usize) -> Result<Vec<(u64, OwnedFd)>> {
        match &self.identity {
            Identity::Vmm(segments) => segments
                .iter()
                .skip(first)
                .take(most)
                .map(|s| Ok((s.size, self.driver.export_allocation(s.handle)?)))
                .collect(),
            Identity::Ipc(..) => Ok(Vec::new()),
        }
    }

    /// The packets that offer it to a peer, one at a time, with their descriptors.
    pub fn offers(&self) -> impl Iterator<Item = Result<(ExportKind, Vec<OwnedFd>)>> + '_ {
        let total = match &self.identity {
            Identity::Vmm(s) => s.len(),
            Identity::Ipc(..) => 1,
        };
        (0..total)
            .step_by(MAX_FDS)
            .map(move |first| match (&self.identity, &self.ipc) {
                (&Identity::Ipc(base, size, _), Some(handle)) => Ok((
                    ExportKind::Ipc {
                        handle: *handle,
                        base,
                        size,
                    },
                    Vec::new(),
                )),
                _ => {
                    let (sizes, fds) = self.fds(first, MAX_FDS)?.into_iter().unzip();
                    Ok((
                        ExportKind::Vmm {
                            sizes,
                            total: total as u32,
                        },
                        fds,
                    ))
                }
            })
    }
}
