//! The memory that both ends of a connection map: a sealed memfd. It has no name, so a crash leaves
//! nothing behind, and it does not count against /dev/shm.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use nix::fcntl::{fcntl, FcntlArg, SealFlag};
use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::mman::{mmap, munmap, MapFlags, ProtFlags};

use super::steps::{Shared, HOST_CHUNKS};
use crate::error::{Error, Result};

const PAGE: usize = 4096;
const SEALS: SealFlag = SealFlag::F_SEAL_SHRINK
    .union(SealFlag::F_SEAL_GROW)
    .union(SealFlag::F_SEAL_SEAL);

/// Bytes of the control part: [`Shared`], in whole pages.
pub const CONTROL_LEN: usize = std::mem::size_of::<Shared>().next_multiple_of(PAGE);

/// A mapping of a connection's memory: [`Shared`], then the chunks of the host ring.
#[derive(Debug)]
pub struct Shm {
    base: NonNull<u8>,
    host_chunk: usize,
}

// SAFETY: the mapping is plain memory that stays until drop; all access to it is through atomics
// (`Shared`) or raw pointers into the ring, whose users follow the ring's protocol.
unsafe impl Send for Shm {}
// SAFETY: as above.
unsafe impl Sync for Shm {}

/// Bytes of the whole mapping when the host ring's chunks have `host_chunk` bytes.
pub fn mapping_len(host_chunk: usize) -> usize {
    CONTROL_LEN + HOST_CHUNKS * host_chunk
}

impl Shm {
    /// Makes the memory of a new connection, and the descriptor that the peer gets.
    pub fn create(host_chunk: usize) -> Result<(Shm, OwnedFd)> {
        let name = CString::new("vccl-connection").expect("no NUL in it");
        let fd = memfd_create(
            name.as_c_str(),
            MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING,
        )
        .map_err(|e| Error::system("memfd_create for a connection's shared memory", e))?;
        nix::unistd::ftruncate(&fd, mapping_len(host_chunk) as i64)
            .map_err(|e| Error::system("sizing a connection's shared memory", e))?;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALS))
            .map_err(|e| Error::system("sealing a connection's shared memory", e))?;
        let shm = Shm::map(fd.as_fd(), host_chunk)?;
        Ok((shm, fd))
    }

    /// Maps what a peer sent. The seals prove that the peer cannot shrink it under us, which would
    /// turn our next access into SIGBUS.
    pub fn open(fd: BorrowedFd<'_>, host_chunk: usize) -> Result<Shm> {
        let seals = fcntl(fd, FcntlArg::F_GET_SEALS)
            .map_err(|e| Error::system("the peer's descriptor is no memfd", e))?;
        if !SealFlag::from_bits_truncate(seals)
            .contains(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW)
        {
            return Err(Error::remote("the peer's shared memory is not sealed"));
        }
        let size = nix::sys::stat::fstat(fd)
            .map_err(|e| Error::system("the peer's shared memory cannot be examined", e))?
            .st_size;
        if size as usize != mapping_len(host_chunk) {
            return Err(Error::remote(format!(
                "the peer's shared memory has {size} bytes where {} were announced",
                mapping_len(host_chunk)
            )));
        }
        Shm::map(fd, host_chunk)
    }

    fn map(fd: BorrowedFd<'_>, host_chunk: usize) -> Result<Shm> {
        let len = std::num::NonZeroUsize::new(mapping_len(host_chunk)).expect("not empty");
        // SAFETY: a new mapping at an address of the kernel's choice; the length was checked to be
        // the file's, which is sealed.
        let base = unsafe {
            mmap(
                None,
                len,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                fd,
                0,
            )
        }
        .map_err(|e| Error::system("mapping a connection's shared memory", e))?;
        Ok(Shm {
            base: base.cast(),
            host_chunk,
        })
    }

    /// The control part.
    #[inline]
    pub fn shared(&self) -> &Shared {
        // SAFETY: the mapping is page-aligned, at least as large as `Shared`, lives as long as `self`,
        // and holds only atomics, for which every bit pattern is a value.
        unsafe { self.base.cast::<Shared>().as_ref() }
    }

    /// First byte of the mapping.
    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes of one chunk of the host ring.
    #[inline]
    pub fn host_chunk(&self) -> usize {
        self.host_chunk
    }

    /// Offset from the base of chunk `i` of the host ring.
    #[inline]
    pub fn host_chunk_offset(&self, i: usize) -> usize {
        debug_assert!(i < HOST_CHUNKS);
        CONTROL_LEN + i * self.host_chunk
    }

    /// Bytes of the whole mapping.
    pub fn bytes(&self) -> usize {
        mapping_len(self.host_chunk)
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length, and the borrows that `shared` gave are over.
        let r = unsafe { munmap(self.base.cast(), self.bytes()) };
        debug_assert!(r.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn both_ends_see_the_same() {
        let (a, fd) = Shm::create(8192).unwrap();
        let b = Shm::open(fd.as_fd(), 8192).unwrap();
        a.shared().posted.store(7, Ordering::Release);
        assert_eq!(b.shared().posted.load(Ordering::Acquire), 7);
        assert_ne!(a.base(), b.base());
        assert_eq!(a.host_chunk_offset(7) + 8192, a.bytes());
    }

    #[test]
    fn what_a_peer_could_shrink_is_refused() {
        let plain =
            memfd_create(c"x", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        nix::unistd::ftruncate(&plain, mapping_len(4096) as i64).unwrap();
        let e = Shm::open(plain.as_fd(), 4096).unwrap_err();
        assert!(e.text().contains("not sealed"), "{e}");
        let (_a, fd) = Shm::create(4096).unwrap();
        let e = Shm::open(fd.as_fd(), 8192).unwrap_err();
        assert!(e.text().contains("announced"), "{e}");
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(Shm::open(null.as_fd(), 4096).is_err());
    }
}
