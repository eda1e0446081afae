//! What several parts need of locks.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use crate::error::Result;

/// Locks, whether or not a thread panicked inside: a panic is reported where it happens.
pub fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// The value of this process behind `current`, started if nobody uses it. `pid`: the process that
/// started it.
pub fn of_process<T>(
    current: &Mutex<Weak<T>>,
    pid: impl Fn(&T) -> u32,
    start: impl FnOnce() -> Result<T>,
) -> Result<Arc<T>> {
    let mut current = lock(current);
    if let Some(s) = current.upgrade() {
        if pid(&s) == std::process::id() {
            return Ok(s);
        }
        // This is a fork of the process that made it. Its thread is not here: leave it be.
        std::mem::forget(s);
    }
    let s = Arc::new(start()?);
    *current = Arc::downgrade(&s);
    Ok(s)
}
