//! Exclusive use of a connection's data-path state, without a lock.
//!
//! NCCL calls a comm's isend, irecv and test from one thread. A gate makes that a checked fact: to
//! enter while another thread is inside is an error, never a wait. Other threads can see whether
//! somebody is inside, and so know when what they changed is seen by everyone who enters later.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// A value that one thread at a time may use.
#[derive(Debug)]
pub struct Gate<T> {
    busy: AtomicBool,
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
            busy: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Enters, or reports `ncclInvalidUsage` when another thread is inside.
    #[inline]
    pub fn enter(&self) -> Result<Pass<'_, T>> {
        // SeqCst: a thread that stores something and then sees the gate free (`is_busy`) knows that
        // whoever enters later sees the store.
        if self.busy.swap(true, Ordering::SeqCst) {
            return Err(Error::invalid_usage(
                "two threads use one comm's isend, irecv or test at the same time; \
                 one thread at a time may",
            ));
        }
        Ok(Pass { gate: self })
    }

    /// Whether somebody is inside.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst)
    }
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
        self.gate.busy.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_again() {
        let g = Gate::new(1);
        {
            let mut a = g.enter().unwrap();
            *a += 1;
            assert!(g.is_busy());
            assert!(g.enter().unwrap_err().text().contains("two threads"));
        }
        assert!(!g.is_busy());
        assert_eq!(*g.enter().unwrap(), 2);
    }

    #[test]
    fn threads_never_overlap() {
        let g = Gate::new(0u64);
        let done: u64 = std::thread::scope(|s| {
            let work = || {
                let mut n = 0;
                for _ in 0..100_000 {
                    if let Ok(mut v) = g.enter() {
                        *v += 1;
                        n += 1;
                    }
                }
                n
            };
            let a = s.spawn(work);
            let b = s.spawn(work);
            a.join().unwrap() + b.join().unwrap()
        });
        assert_eq!(*g.enter().unwrap(), done);
    }
}
