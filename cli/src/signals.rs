//! Ctrl-C: noticed, so that the ranks are stopped and reaped before this program ends.

use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From now on, SIGINT and SIGTERM set the flag that is returned.
pub fn watch() -> &'static AtomicBool {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic, which a signal handler may do.
        unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
    }
    &INTERRUPTED
}
