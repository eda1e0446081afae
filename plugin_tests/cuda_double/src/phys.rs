//! Physical device memory: a memfd, the mapping through which the double reaches its bytes, and a
//! header page behind the data that says whose memory it is.
//!
//! The header travels with the memfd, so a process that is handed the descriptor learns the device,
//! the size and the identity of the memory. It also counts, per process, who has the memory open and
//! who has copies under way in it.

use crate::abi::*;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

const MAGIC: u64 = u64::from_le_bytes(*b"vcclmem\x01");
const PAGE: usize = 4096;
const SLOTS: usize = 128;

/// One process's use of the memory.
#[repr(C)]
struct Slot {
    pid: AtomicU32,
    opens: AtomicU32,
    pending: AtomicU32,
}

/// The page behind the data. Only atomics: other processes write here too.
#[repr(C)]
struct Header {
    magic: AtomicU64,
    id: AtomicU64,
    size: AtomicU64,
    device: AtomicU32,
    flags: AtomicU32,
    slots: [Slot; SLOTS],
}

const _: () = assert!(size_of::<Header>() <= PAGE);

const FLAG_VMM: u32 = 1;

/// A piece of physical memory of one device.
pub struct Phys {
    file: File,
    base: NonNull<u8>,
    size: usize,
    slot: Option<usize>,
    /// The device, as numbered by the machine.
    pub device: u32,
    /// The same in every process that has the memory.
    pub id: u64,
    /// Made by `cuMemCreate`.
    pub vmm: bool,
}

// SAFETY: the mapping belongs to the whole process; its bytes are only touched through raw copies
// and atomics, as device memory is by a device.
unsafe impl Send for Phys {}
// SAFETY: as above.
unsafe impl Sync for Phys {}

/// A random number that is not zero.
pub fn random_id() -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is ours and its length is right.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    let id = u64::from_le_bytes(bytes);
    if got == 8 && id != 0 {
        id
    } else {
        u64::from(std::process::id()) << 32 | 1
    }
}

fn alive(pid: u32) -> bool {
    // SAFETY: signal 0 only asks whether the process exists.
    let gone = unsafe { libc::kill(pid as i32, 0) } != 0
        && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
    !gone
}

impl Phys {
    /// New memory, all zero.
    pub fn create(device: u32, size: usize, vmm: bool) -> Res<Arc<Phys>> {
        let size = size.next_multiple_of(PAGE);
        let name = format!("vccl-double-gpu{device}\0");
        // SAFETY: the name ends in NUL.
        let fd = unsafe {
            libc::memfd_create(
                name.as_ptr().cast(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            )
        };
        if fd < 0 {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        // SAFETY: the descriptor was just made and is nobody else's.
        let file = File::from(unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) });
        file.set_len((size + PAGE) as u64)
            .map_err(|_| ERROR_OUT_OF_MEMORY)?;
        let seals = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
        // SAFETY: the descriptor is open, and the call only takes integers.
        unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) };
        let mut phys = Phys {
            base: map(&file, size)?,
            file,
            size,
            slot: None,
            device,
            id: random_id(),
            vmm,
        };
        let header = phys.header();
        header.id.store(phys.id, Ordering::Relaxed);
        header.size.store(size as u64, Ordering::Relaxed);
        header.device.store(device, Ordering::Relaxed);
        header
            .flags
            .store(if vmm { FLAG_VMM } else { 0 }, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        phys.slot = phys.claim();
        Ok(Arc::new(phys))
    }

    /// Memory that another process, or this one, made.
    pub fn adopt(fd: OwnedFd) -> Option<Arc<Phys>> {
        let file = File::from(fd);
        // SAFETY: the descriptor is open, and the call takes no more arguments.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        let must = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK;
        if seals < 0 || seals & must != must {
            return None;
        }
        let total = usize::try_from(file.metadata().ok()?.len()).ok()?;
        let size = total
            .checked_sub(PAGE)
            .filter(|s| *s > 0 && s % PAGE == 0)?;
        let mut phys = Phys {
            base: map(&file, size).ok()?,
            file,
            size,
            slot: None,
            device: 0,
            id: 0,
            vmm: false,
        };
        let header = phys.header();
        if header.magic.load(Ordering::Acquire) != MAGIC
            || header.size.load(Ordering::Relaxed) != size as u64
        {
            return None;
        }
        let device = header.device.load(Ordering::Relaxed);
        let id = header.id.load(Ordering::Relaxed);
        let vmm = header.flags.load(Ordering::Relaxed) & FLAG_VMM != 0;
        (phys.device, phys.id, phys.vmm) = (device, id, vmm);
        phys.slot = phys.claim();
        Some(Arc::new(phys))
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is `size` bytes and one page more, page aligned; the header fits the
        // page, holds only atomics, and the file cannot shrink (sealed).
        unsafe { &*self.base.as_ptr().add(self.size).cast::<Header>() }
    }

    /// Takes a slot for this process, one that it has already if it can.
    fn claim(&self) -> Option<usize> {
        let me = std::process::id();
        let slots = &self.header().slots;
        if let Some(i) = slots
            .iter()
            .position(|s| s.pid.load(Ordering::Acquire) == me)
        {
            slots[i].opens.fetch_add(1, Ordering::AcqRel);
            return Some(i);
        }
        for (i, slot) in slots.iter().enumerate() {
            let pid = slot.pid.load(Ordering::Acquire);
            if (pid == 0 || !alive(pid))
                && slot
                    .pid
                    .compare_exchange(pid, me, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            {
                slot.opens.store(1, Ordering::Release);
                slot.pending.store(0, Ordering::Release);
                return Some(i);
            }
        }
        None
    }

    fn mine(&self) -> Option<&Slot> {
        self.slot.map(|i| &self.header().slots[i])
    }

    /// The pid of another living process that has copies under way here.
    pub fn busy_elsewhere(&self) -> Option<u32> {
        self.elsewhere(|s| s.pending.load(Ordering::Acquire) > 0)
    }

    /// The pid of another living process that has the memory open.
    pub fn open_elsewhere(&self) -> Option<u32> {
        self.elsewhere(|s| s.opens.load(Ordering::Acquire) > 0)
    }

    fn elsewhere(&self, test: impl Fn(&Slot) -> bool) -> Option<u32> {
        let me = std::process::id();
        self.header()
            .slots
            .iter()
            .map(|s| (s.pid.load(Ordering::Acquire), s))
            .find(|(pid, s)| *pid != 0 && *pid != me && test(s) && alive(*pid))
            .map(|(pid, _)| pid)
    }

    /// Bytes of data.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The memfd.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// A new descriptor of the memfd, closed on exec.
    pub fn dup(&self) -> Res<OwnedFd> {
        use std::os::fd::AsFd;
        let fd: BorrowedFd<'_> = self.file.as_fd();
        fd.try_clone_to_owned().map_err(|_| ERROR_OPERATING_SYSTEM)
    }

    /// Where the double sees these bytes; the range must lie within the data.
    pub fn shadow(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.size));
        // SAFETY: the range was checked against the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Copies from host memory; an address that cannot be read is told, not fatal.
    pub fn write_from_host(&self, offset: usize, host: usize, len: usize) -> bool {
        self.host_io(offset, host, len, |fd, p, n, o| {
            // SAFETY: the kernel checks the address itself and answers EFAULT.
            unsafe { libc::pwrite(fd, p as *const libc::c_void, n, o) }
        })
    }

    /// Copies to host memory; an address that cannot be written is told, not fatal.
    pub fn read_to_host(&self, offset: usize, host: usize, len: usize) -> bool {
        self.host_io(offset, host, len, |fd, p, n, o| {
            // SAFETY: the kernel checks the address itself and answers EFAULT. The bytes are the
            // caller's to overwrite: they asked for this copy.
            unsafe { libc::pread(fd, p as *mut libc::c_void, n, o) }
        })
    }

    fn host_io(
        &self,
        offset: usize,
        host: usize,
        len: usize,
        io: impl Fn(i32, usize, usize, i64) -> isize,
    ) -> bool {
        let mut done = 0;
        while done < len {
            let n = io(
                self.file.as_raw_fd(),
                host + done,
                len - done,
                (offset + done) as i64,
            );
            if n > 0 {
                done += n as usize;
            } else if n == 0
                || std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted
            {
                return false;
            }
        }
        true
    }

    /// Copies from bytes of the double's own.
    pub fn write_from(&self, offset: usize, bytes: &[u8]) -> bool {
        self.file.write_all_at(bytes, offset as u64).is_ok()
    }
}

impl Drop for Phys {
    fn drop(&mut self) {
        if let Some(slot) = self.mine() {
            if slot.opens.fetch_sub(1, Ordering::AcqRel) == 1 {
                slot.pid.store(0, Ordering::Release);
            }
        }
        // SAFETY: the mapping was made by `map` with this length, and no reference to it is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.size + PAGE) };
    }
}

/// Lets the process, and so its RDMA devices, reach memory at a device address; nothing else may.
pub fn expose(phys: &Phys, at: u64, size: u64) -> Res {
    // SAFETY: the range is one of device addresses that nobody uses, and the file is longer than it.
    let got = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            size as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
            phys.file.as_raw_fd(),
            0,
        )
    };
    if got == libc::MAP_FAILED {
        return Err(ERROR_OUT_OF_MEMORY);
    }
    Ok(())
}

/// The reverse.
pub fn hide(at: u64, size: u64) {
    // SAFETY: the range is one of device addresses whose memory goes.
    unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            size as usize,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
}

fn map(file: &File, size: usize) -> Res<NonNull<u8>> {
    // SAFETY: a new mapping of an open file, at an address that the kernel chooses.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size + PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(ERROR_OUT_OF_MEMORY);
    }
    NonNull::new(at.cast()).ok_or(ERROR_OUT_OF_MEMORY)
}

/// How many operations under way use one allocation, mapping or registration.
#[derive(Default)]
pub struct Pending {
    count: AtomicUsize,
    dead: std::sync::atomic::AtomicBool,
}

impl Pending {
    /// Operations under way.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// The memory is gone: operations that still come must leave it alone.
    pub fn kill(&self) {
        self.dead.store(true, Ordering::Release);
    }

    /// Is the memory gone?
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
}

/// One operation's use of one piece of memory.
pub struct Use {
    pending: Arc<Pending>,
    phys: Option<Arc<Phys>>,
}

impl Use {
    /// Counts an operation until the value is dropped.
    pub fn new(pending: &Arc<Pending>, phys: Option<&Arc<Phys>>) -> Use {
        pending.count.fetch_add(1, Ordering::AcqRel);
        if let Some(slot) = phys.and_then(|p| p.mine()) {
            slot.pending.fetch_add(1, Ordering::AcqRel);
        }
        Use {
            pending: pending.clone(),
            phys: phys.cloned(),
        }
    }

    /// Is the memory gone?
    pub fn is_dead(&self) -> bool {
        self.pending.is_dead()
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.pending.count.fetch_sub(1, Ordering::AcqRel);
        if let Some(slot) = self.phys.as_ref().and_then(|p| p.mine()) {
            slot.pending.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
