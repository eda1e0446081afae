//! Children that a rank forks and that go on without another program, as PyTorch's data loaders do: they would hold
//! its sockets, and if it is killed, the kernel would keep its connections up, so that no peer learned of it.
//!
//! A socket is noted when it is made. In a child each one that is still that socket is closed: a number may have
//! been given to another file since, but the inode number of a socket is not used again for long.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::Once;

/// Descriptors below this are noted: with more connections than that some remain in children.
const FDS: usize = 1 << 16;

/// The inode of the socket that was made last with each descriptor, or 0.
static SOCKETS: [AtomicU64; FDS] = [const { AtomicU64::new(0) }; FDS];
/// The highest descriptor that was noted.
static HIGHEST: AtomicI32 = AtomicI32::new(-1);
static HANDLER: Once = Once::new();

/// The inode of an open socket, or 0.
fn inode(fd: i32) -> u64 {
    // SAFETY: all zero is a value of this struct.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes the struct, and fails for what is not open.
    let r = unsafe { libc::fstat(fd, &raw mut stat) };
    match r == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFSOCK {
        true => stat.st_ino,
        false => 0,
    }
}

/// Notes a socket that children shall not hold.
pub fn close_in_children(socket: BorrowedFd<'_>) {
    HANDLER.call_once(|| {
        // SAFETY: the handler makes system calls and reads statics only, and this library is never unloaded. Without
        // memory for it there is no handler: children then hold the sockets.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    let fd = socket.as_raw_fd();
    if let Some(place) = SOCKETS.get(fd as usize) {
        place.store(inode(fd), Ordering::Relaxed);
        HIGHEST.fetch_max(fd, Ordering::Relaxed);
    }
}

extern "C" fn in_child() {
    for fd in 0..=HIGHEST.load(Ordering::Relaxed) {
        let noted = SOCKETS[fd as usize].load(Ordering::Relaxed);
        if noted != 0 && inode(fd) == noted {
            // SAFETY: it is a socket of this library, which the child does not use: its threads are not there.
            unsafe { libc::close(fd) };
        }
    }
}
