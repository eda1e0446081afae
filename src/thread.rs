//! Threads of this library. None is on the data path but those that the user asked for.

use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::sys::signal::{pthread_sigmask, SigSet, SigmaskHow};

use crate::error::{Error, Result};

/// A thread that ends with its owner, and is waited for.
#[derive(Debug)]
pub struct Thread {
    handle: Option<JoinHandle<()>>,
    /// The process that started it: a fork has the memory but not the thread.
    pid: u32,
}

impl Thread {
    /// Starts it.
    pub fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<Thread> {
        let handle = without_signals(|| std::thread::Builder::new().name(name.into()).spawn(run))
            .map_err(|e| {
            let errno = Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO));
            Error::system("starting a thread", errno)
        })?;
        Ok(Thread {
            handle: Some(handle),
            pid: std::process::id(),
        })
    }

    /// Stands for one where the owner does its work itself.
    pub fn none() -> Thread {
        Thread {
            handle: None,
            pid: std::process::id(),
        }
    }

    /// The process whose it is.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Has it end, for which `tell` tells it, and waits for that; says whether it was this process's.
    pub fn end(&mut self, tell: impl FnOnce()) -> bool {
        let ours = self.pid == std::process::id();
        match self.handle.take() {
            // A fork: the thread is the parent's.
            Some(h) if !ours => std::mem::forget(h),
            Some(h) => {
                tell();
                let _ = h.join();
            }
            None => {}
        }
        ours
    }
}

/// Runs `f` with all signals blocked, so that a thread it starts takes none of the program's.
fn without_signals<T>(f: impl FnOnce() -> T) -> T {
    let mut old = SigSet::empty();
    let all = SigSet::all();
    let blocked = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&all), Some(&mut old)).is_ok();
    let r = f();
    if blocked {
        let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&old), None);
    }
    r
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn it_ends_when_told_and_takes_no_signals() {
        let (tell, told) = channel::<()>();
        let (say, said) = channel();
        let mut t = Thread::start("vccl-test", move || {
            let mut now = SigSet::empty();
            let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, None, Some(&mut now));
            let _ = say.send((
                now.contains(nix::sys::signal::SIGTERM),
                std::thread::current().name().map(String::from),
            ));
            let _ = told.recv();
            let _ = say.send((false, None));
        })
        .unwrap();
        assert_eq!(said.recv().unwrap(), (true, Some("vccl-test".into())));
        assert!(t.end(|| tell.send(()).unwrap()));
        assert_eq!(said.try_recv(), Ok((false, None)));
        assert!(t.end(|| panic!("it is over")));
        let mut now = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_SETMASK, None, Some(&mut now)).unwrap();
        assert!(!now.contains(nix::sys::signal::SIGTERM));
    }
}
