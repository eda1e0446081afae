//! Exclusive use of a connection's data-path state, without a lock.
//!
//! NCCL calls a comm's isend, irecv and test from one thread. A gate makes that a checked fact: for
//! a second such thread to enter is an error, never a wait. Another thread that must look at the
//! state, because memory is deregistered, waits for the gate; the data path meanwhile finds it shut,
//! and tells NCCL to try again. And every thread can see whether somebody is inside, and so know when
//! what it changed is seen by all who enter later.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

const FREE: u32 = 0;
const DATA_PATH: u32 = 1;
const OTHER: u32 = 2;

/// A value that one thread at a time may use.
#[derive(Debug)]
pub struct Gate<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through `Pass`, of which at most one exists at a time.
unsafe impl<T: Send> Sync for Gate<T> {}

/// The right to use the value.
#[derive(Debug)]
pub struct Pass<'a, T> {
    gate: &'a Gate<T>,
}

impl<T> Gate<T> {
    /// A gate with nobody inside.
    pub fn new(value: T) -> Gate<T> {
        Gate {
            state: AtomicU32::new(FREE),
            value: UnsafeCell::new(value),
        }
    }

    #[inline]
    fn take(&self, by: u32) -> std::result::Result<Pass<'_, T>, u32> {
        // SeqCst: a thread that stores something and then sees the gate free (`is_busy`) knows that
        // whoever enters later sees the store.
        self.state
            .compare_exchange(FREE, by, Ordering::SeqCst, Ordering::SeqCst)
            .map(|_| Pass { gate: self })
    }

    /// The data path enters; `None`: another thread looks at the state, try again. A second data path
    /// inside is `ncclInvalidUsage`.
    #[inline]
    pub fn enter(&self) -> Result<Option<Pass<'_, T>>> {
        match self.take(DATA_PATH) {
            Ok(pass) => Ok(Some(pass)),
            Err(OTHER) => Ok(None),
            Err(_) => Err(two_threads()),
        }
    }

    /// Another thread enters, and waits for that until `deadline`.
    pub fn enter_by(&self, deadline: Instant) -> Option<Pass<'_, T>> {
        loop {
            if let Ok(pass) = self.take(OTHER) {
                return Some(pass);
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(Duration::from_micros(10));
        }
    }

    /// Whether somebody is inside.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.state.load(Ordering::SeqCst) != FREE
    }
}

#[cold]
fn two_threads() -> Error {
    Error::invalid_usage(
        "two threads use one comm's isend, irecv or test at the same time; one thread at a time may",
    )
}

impl<T> Deref for Pass<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: while this pass exists no other does.
        unsafe { &*self.gate.value.get() }
    }
}

impl<T> DerefMut for Pass<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: while this pass exists no other does.
        unsafe { &mut *self.gate.value.get() }
    }
}

impl<T> Drop for Pass<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.gate.state.store(FREE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    #[test]
    fn one_at_a_time_and_again() {
        let g = Gate::new(1);
        {
            let mut a = g.enter().unwrap().unwrap();
            *a += 1;
            assert!(g.is_busy());
            assert!(g.enter().unwrap_err().text().contains("two threads"));
            assert!(g.enter_by(soon()).is_none());
        }
        assert!(!g.is_busy());
        {
            let _b = g.enter_by(soon()).unwrap();
            assert!(g.enter().unwrap().is_none(), "shut, and no error");
        }
        assert_eq!(*g.enter().unwrap().unwrap(), 2);
    }

    #[test]
    fn threads_never_overlap() {
        let g = Gate::new(0u64);
        let late = Instant::now() + Duration::from_secs(60);
        let done: u64 = std::thread::scope(|s| {
            let data = s.spawn(|| {
                let mut n = 0;
                for _ in 0..100_000 {
                    if let Some(mut v) = g.enter().unwrap() {
                        *v += 1;
                        n += 1;
                    }
                }
                n
            });
            let other = s.spawn(|| {
                for _ in 0..1000 {
                    *g.enter_by(late).unwrap() += 1;
                }
                1000
            });
            data.join().unwrap() + other.join().unwrap()
        });
        assert_eq!(*g.enter().unwrap().unwrap(), done);
    }
}
