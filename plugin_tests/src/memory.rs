//! Memory of every kind that NCCL hands to a plugin.

use crate::cuda::{self, Vmm};
use crate::error::{Error, Result};
use crate::fail;

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Host memory from malloc.
    Malloc,
    /// Host memory from an anonymous mmap.
    Mmap,
    /// Host memory that the driver has page-locked: what NCCL itself allocates.
    Pinned,
    /// Device memory from cuMemAlloc.
    Cuda,
    /// Device memory of the virtual memory management, exportable as a file descriptor: what NCCL
    /// itself allocates.
    Vmm,
    /// The same, but not exportable.
    VmmPrivate,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 6] = [
        Kind::Malloc,
        Kind::Mmap,
        Kind::Pinned,
        Kind::Cuda,
        Kind::Vmm,
        Kind::VmmPrivate,
    ];

    /// The name on command lines and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Malloc => "host",
            Kind::Mmap => "mmap",
            Kind::Pinned => "pinned",
            Kind::Cuda => "cuda",
            Kind::Vmm => "vmm",
            Kind::VmmPrivate => "vmm-private",
        }
    }

    /// The kind of that name.
    pub fn parse(name: &str) -> Result<Kind> {
        Kind::ALL
            .into_iter()
            .find(|k| k.name() == name)
            .ok_or_else(|| {
                Error::new(format!(
                "no kind of memory is called {name}; there are host, mmap, pinned, cuda, vmm, vmm-private"
            ))
            })
    }

    /// Whether it is the GPU's.
    pub fn is_device(self) -> bool {
        !matches!(self, Kind::Malloc | Kind::Mmap | Kind::Pinned)
    }
}

#[derive(Debug)]
enum Owner {
    Malloc,
    Mmap,
    Pinned,
    Cuda,
    Vmm(Vmm),
}

/// An allocation.
#[derive(Debug)]
pub struct Buffer {
    kind: Kind,
    gpu: usize,
    address: usize,
    len: usize,
    owner: Owner,
}

impl Buffer {
    /// Allocates; the content of device memory is whatever was there.
    pub fn new(kind: Kind, len: usize, gpu: usize) -> Result<Buffer> {
        Buffer::at(kind, len, gpu, 0)
    }

    /// Allocates at `address` if the kind allows to ask for that and the place is free.
    pub fn at(kind: Kind, len: usize, gpu: usize, address: usize) -> Result<Buffer> {
        let len = len.max(1);
        let (address, owner) = match kind {
            Kind::Malloc => {
                // SAFETY: malloc may be called with any size; the result is checked.
                let p = unsafe { libc::malloc(len) } as usize;
                if p == 0 {
                    fail!("malloc of {len} bytes failed");
                }
                (p, Owner::Malloc)
            }
            Kind::Mmap => {
                // SAFETY: an anonymous mapping without MAP_FIXED replaces no other.
                let p = unsafe {
                    libc::mmap(
                        address as *mut libc::c_void,
                        len,
                        libc::PROT_READ | libc::PROT_WRITE,
                        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                        -1,
                        0,
                    )
                };
                if p == libc::MAP_FAILED {
                    fail!(
                        "mmap of {len} bytes failed: {}",
                        std::io::Error::last_os_error()
                    );
                }
                (p as usize, Owner::Mmap)
            }
            Kind::Pinned => {
                let c = cuda::get()?;
                c.bind(gpu)?;
                (c.alloc_host(len)?, Owner::Pinned)
            }
            Kind::Cuda => {
                let c = cuda::get()?;
                c.bind(gpu)?;
                (c.alloc(len)? as usize, Owner::Cuda)
            }
            Kind::Vmm | Kind::VmmPrivate => {
                let c = cuda::get()?;
                c.bind(gpu)?;
                let v = c.vmm_alloc(gpu, len, kind == Kind::Vmm, address as u64)?;
                (v.address as usize, Owner::Vmm(v))
            }
        };
        Ok(Buffer {
            kind,
            gpu,
            address,
            len,
            owner,
        })
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its address, on the device or the host.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an allocation has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn range(&self, offset: usize, len: usize) -> usize {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "a case reads or writes beyond its buffer"
        );
        self.address + offset
    }

    /// Writes bytes into it.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let to = self.range(offset, from.len());
        if self.kind.is_device() {
            let c = cuda::get()?;
            c.bind(self.gpu)?;
            return c.write(to as u64, from);
        }
        // SAFETY: the range was checked to lie in this allocation, which `self` owns; `from` is a
        // slice of other memory.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    /// Reads bytes out of it.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let from = self.range(offset, to.len());
        if self.kind.is_device() {
            let c = cuda::get()?;
            c.bind(self.gpu)?;
            return c.read(from as u64, to);
        }
        // SAFETY: as for `write`, the other way.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Sets every byte of it.
    pub fn set(&self, byte: u8) -> Result<()> {
        const PIECE: usize = 4 << 20;
        let piece = vec![byte; self.len.min(PIECE)];
        let mut at = 0;
        while at < self.len {
            let n = PIECE.min(self.len - at);
            self.write(at, &piece[..n])?;
            at += n;
        }
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let freed = match self.owner {
            Owner::Malloc => {
                // SAFETY: the address came from malloc and is freed once.
                unsafe { libc::free(self.address as *mut libc::c_void) };
                Ok(())
            }
            Owner::Mmap => {
                // SAFETY: the mapping is ours and is unmapped once.
                unsafe { libc::munmap(self.address as *mut libc::c_void, self.len) };
                Ok(())
            }
            Owner::Pinned => cuda::get().and_then(|c| {
                c.bind(self.gpu)?;
                c.free_host(self.address)
            }),
            Owner::Cuda => cuda::get()
                .and_then(|c| c.bind(self.gpu).and_then(|()| c.free(self.address as u64))),
            Owner::Vmm(v) => {
                cuda::get().and_then(|c| c.bind(self.gpu).and_then(|()| c.vmm_free(v)))
            }
        };
        if let Err(e) = freed {
            log::warn!("freeing {} memory: {e}", self.kind.name());
        }
    }
}
