//! The progress function: a comm's requests, from isend or irecv until test says that they are over.
//!
//! NCCL's proxy thread polls; each poll moves the whole connection forward, so no thread of ours is
//! on the data path. Nothing here allocates, locks, calls the system or formats text on success.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::transport::{End, RecvEnd, Region, SendEnd};

/// Requests that one comm can have at a time. NCCL asks for 32 for each receive of a group; a
/// group has one here.
pub const REQUESTS: usize = 64;

/// Unsuccessful polls between two looks at the driver: about a millisecond.
const POLLS_BETWEEN_CHECKS: u32 = 1 << 13;

/// One end of a connection with its requests.
#[derive(Debug)]
pub struct Proxy<E: ?Sized> {
    free: AtomicU64,
    /// Those of them that ended in an error, and have not been used again.
    failed: AtomicU64,
    errors: Mutex<Errors>,
    polls: AtomicU32,
    end: Box<E>,
}

/// What went wrong. Up to 2.21, NCCL's proxy thread does not stop at an error: it tests the request that
/// failed again and again until the communicator is aborted, and takes the last answer for the reason.
#[derive(Debug, Default)]
struct Errors {
    /// Of each request in `failed`.
    of: Vec<(usize, Error)>,
    /// The text that was last warned of.
    last: String,
}

impl Errors {
    /// The error as it is reported: warned of once, however often it comes.
    fn report(&mut self, e: Error) -> Error {
        if e.text() == self.last {
            return e.again();
        }
        self.last = e.text().to_string();
        e
    }
}

impl<E: End + ?Sized> Proxy<E> {
    /// A proxy with no request.
    pub fn new(end: Box<E>) -> Proxy<E> {
        Proxy {
            free: AtomicU64::new(u64::MAX),
            failed: AtomicU64::new(0),
            errors: Mutex::default(),
            polls: AtomicU32::new(0),
            end,
        }
    }

    /// The connection's end, for what is not the data path.
    pub fn end(&self) -> &E {
        &self.end
    }

    /// The same, to close it.
    pub fn end_mut(&mut self) -> &mut E {
        &mut self.end
    }

    fn errors(&self) -> MutexGuard<'_, Errors> {
        self.errors.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Starts a request with `begin`, which says whether it took: its index, or `None` to try again.
    #[inline]
    fn start(&self, begin: impl FnOnce(&E, usize) -> Result<bool>) -> Result<Option<usize>> {
        let free = self.free.load(Ordering::Relaxed);
        if free == 0 {
            return Ok(None);
        }
        let failed = self.failed.load(Ordering::Relaxed);
        // One that failed may be tested again: it is used only when nothing else is left.
        let index = match free & !failed {
            0 => free,
            fresh => fresh,
        }
        .trailing_zeros() as usize;
        match begin(&self.end, index) {
            Ok(false) => return Ok(None),
            Ok(true) => {}
            Err(e) => return Err(self.errors().report(e)),
        }
        if failed & (1 << index) != 0 {
            self.forget(index);
        }
        self.free.fetch_and(!(1 << index), Ordering::Relaxed);
        Ok(Some(index))
    }

    /// Moves the connection forward; `Some(bytes)` when request `index` is over. An error ends it too, and
    /// stays its answer.
    #[inline]
    pub fn test(&self, index: usize) -> Result<Option<usize>> {
        if index >= REQUESTS || self.free.load(Ordering::Relaxed) & (1 << index) != 0 {
            return Err(self.over(index));
        }
        let r = match self.end.poll(index) {
            Ok(None) => {
                let n = self.polls.load(Ordering::Relaxed).wrapping_add(1);
                self.polls.store(n, Ordering::Relaxed);
                if !n.is_multiple_of(POLLS_BETWEEN_CHECKS) {
                    return Ok(None);
                }
                match self.end.check() {
                    Ok(()) => return Ok(None),
                    // What ends the connection may have been found behind all of this request.
                    Err(e) => self.end.poll(index).ok().flatten().map(Some).ok_or(e),
                }
            }
            r => r,
        };
        let r = r.map_err(|e| self.fail(index, e));
        self.free.fetch_or(1 << index, Ordering::Relaxed);
        r
    }

    #[cold]
    fn fail(&self, index: usize, e: Error) -> Error {
        let mut errors = self.errors();
        errors.of.push((index, e.again()));
        self.failed.fetch_or(1 << index, Ordering::Relaxed);
        errors.report(e)
    }

    #[cold]
    fn forget(&self, index: usize) {
        self.errors().of.retain(|(i, _)| *i != index);
        self.failed.fetch_and(!(1 << index), Ordering::Relaxed);
    }

    /// The answer to a test of a request that is over.
    #[cold]
    fn over(&self, index: usize) -> Error {
        let errors = self.errors();
        match errors.of.iter().find(|(i, _)| *i == index) {
            Some((_, e)) => e.clone(),
            None => Error::invalid_argument("test of a request that is over"),
        }
    }
}

impl Proxy<dyn SendEnd> {
    /// Starts a send; `None`: not yet.
    #[inline]
    pub fn isend(&self, addr: u64, len: u64, tag: u32, region: &Region) -> Result<Option<usize>> {
        self.start(|end, index| end.send(index, addr, len, tag, region))
    }
}

impl Proxy<dyn RecvEnd> {
    /// Starts a receive; `None`: not yet.
    #[inline]
    pub fn irecv(&self, addr: u64, len: u64, tag: u32, region: &Region) -> Result<Option<usize>> {
        self.start(|end, index| end.recv(index, addr, len, tag, region))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Memory;
    use std::sync::atomic::AtomicBool;

    /// Fails what it is asked while `broken`; else every request is over at once.
    #[derive(Debug, Default)]
    struct Mock {
        broken: std::sync::Arc<AtomicBool>,
    }

    impl Mock {
        fn answer<T>(&self, good: T) -> Result<T> {
            match self.broken.load(Ordering::Relaxed) {
                true => Err(Error::remote("the peer is gone")),
                false => Ok(good),
            }
        }
    }

    impl End for Mock {
        fn register(&self, addr: u64, len: u64, _cuda: bool) -> Result<Region> {
            Ok(Region {
                addr,
                len,
                memory: Memory::Host,
                id: 0,
                keys: None,
            })
        }
        fn deregister(&self, _region: Region) -> Result<()> {
            Ok(())
        }
        fn poll(&self, index: usize) -> Result<Option<usize>> {
            self.answer(Some(index))
        }
        fn check(&self) -> Result<()> {
            Ok(())
        }
        fn close(&mut self) -> Result<()> {
            Ok(())
        }
        fn describe(&self) -> String {
            String::new()
        }
    }

    impl SendEnd for Mock {
        fn send(&self, _: usize, _: u64, _: u64, _: u32, _: &Region) -> Result<bool> {
            self.answer(true)
        }
    }

    #[test]
    fn a_failed_request_keeps_its_answer_and_is_warned_of_once() {
        let mock = Mock::default();
        let broken = mock.broken.clone();
        let proxy: Proxy<dyn SendEnd> = Proxy::new(Box::new(mock));
        let region = proxy.end().register(0, 100, false).unwrap();
        let start = || proxy.isend(0, 1, 0, &region).unwrap().unwrap();
        let failing = start();
        let mut ends_well = Vec::new();
        for _ in 0..3 {
            ends_well.push(start());
        }
        // Nothing is known to be broken yet, but the request is tested as the peer dies.
        broken.store(true, Ordering::Relaxed);
        let first = proxy.test(failing).unwrap_err();
        assert_eq!(
            (first.code(), first.is_known()),
            (crate::error::ResultCode::REMOTE, false)
        );
        for _ in 0..3 {
            let again = proxy.test(failing).unwrap_err();
            assert_eq!((again.code(), again.is_known()), (first.code(), true));
        }
        // The same trouble at another request, or in isend, is no news.
        assert!(proxy.test(ends_well[0]).unwrap_err().is_known());
        assert!(proxy.isend(0, 1, 0, &region).unwrap_err().is_known());
        // Other requests do not take its place while there are others.
        broken.store(false, Ordering::Relaxed);
        for i in &ends_well[1..] {
            assert_eq!(proxy.test(*i).unwrap(), Some(*i));
        }
        for _ in 0..REQUESTS - 2 {
            let i = start();
            assert!(i != failing && i != ends_well[0]);
        }
        let mut last = [start(), start()];
        last.sort();
        let mut expected = [failing, ends_well[0]];
        expected.sort();
        assert_eq!(last, expected);
        assert_eq!(proxy.test(failing).unwrap(), Some(failing));
        let over = proxy.test(failing).unwrap_err();
        assert_eq!(over.code(), crate::error::ResultCode::INVALID_ARGUMENT);
    }
}
