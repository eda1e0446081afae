//! Threads with a role. NCCL calls a plugin from an init thread, a proxy service thread and a proxy
//! progress thread; a [`Worker`] is one of them, and a case sends it what to call.

use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::mpsc;
use std::thread::JoinHandle;

use crate::cuda;
use crate::error::{Error, Result};

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs what it is given, in order.
pub struct Worker {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// The result of [`Worker::start`], to come.
pub struct Pending<R>(mpsc::Receiver<std::thread::Result<R>>);

impl<R> Pending<R> {
    /// Waits for the result.
    pub fn wait(self) -> R {
        match self.0.recv() {
            Ok(Ok(r)) => r,
            Ok(Err(panic)) => resume_unwind(panic),
            Err(_) => panic!("a worker thread ended before its work"),
        }
    }
}

impl Worker {
    /// Starts the thread; with a GPU, that GPU's primary context is current in it.
    pub fn new(name: &str, gpu: Option<usize>) -> Result<Worker> {
        let (tx, rx) = mpsc::channel::<Job>();
        let (ready_tx, ready_rx) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name(name.to_string())
            .spawn(move || {
                let bound = gpu.map_or(Ok(()), |g| cuda::get().and_then(|c| c.bind(g)));
                let _ = ready_tx.send(bound);
                for job in rx {
                    job();
                }
            })?;
        ready_rx
            .recv()
            .map_err(|_| Error::new("a worker thread did not start"))??;
        Ok(Worker {
            jobs: Some(tx),
            thread: Some(thread),
        })
    }

    fn submit(&self, job: Job) {
        let jobs = self
            .jobs
            .as_ref()
            .expect("a worker has its channel until it is dropped");
        assert!(
            jobs.send(job).is_ok(),
            "a worker thread ended before its worker"
        );
    }

    /// Runs `f` on the thread and does not wait.
    pub fn start<R: Send + 'static>(&self, f: impl FnOnce() -> R + Send + 'static) -> Pending<R> {
        let (tx, rx) = mpsc::sync_channel(1);
        self.submit(Box::new(move || {
            let _ = tx.send(catch_unwind(AssertUnwindSafe(f)));
        }));
        Pending(rx)
    }

    /// Runs `f` on the thread and waits for its result.
    pub fn call<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        let (tx, rx) = mpsc::sync_channel(1);
        let job: Box<dyn FnOnce() + Send + '_> = Box::new(move || {
            let _ = tx.send(catch_unwind(AssertUnwindSafe(f)));
        });
        // SAFETY: only the lifetime changes. What `f` borrows stays borrowed until this function
        // returns, and it returns only after the result has been received, which is sent after `f`
        // was consumed, or after the job was dropped (then the channel is closed).
        let job: Job = unsafe { std::mem::transmute::<Box<dyn FnOnce() + Send + '_>, Job>(job) };
        self.submit(job);
        Pending(rx).wait()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

/// What a thread does while nothing happens: spins for a while, then lets others run. On a machine
/// with fewer cores than threads, spinning on would only delay the thread that is waited for.
pub struct Idle {
    rounds: u32,
    patient: bool,
    yields: bool,
}

impl Idle {
    /// Spins, then yields, then sleeps: for tests that share a small machine with others.
    pub fn patient() -> Idle {
        Idle {
            rounds: 0,
            patient: true,
            yields: true,
        }
    }

    /// Spins; with `yields`, lets other threads run after a while: for measuring.
    pub fn eager(yields: bool) -> Idle {
        Idle {
            rounds: 0,
            patient: false,
            yields,
        }
    }

    /// Something happened.
    pub fn reset(&mut self) {
        self.rounds = 0;
    }

    /// Nothing happened.
    pub fn wait(&mut self) {
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds < 64 || !self.yields {
            std::hint::spin_loop();
        } else if !self.patient || self.rounds < 2_000 {
            std::thread::yield_now();
        } else {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_borrow_and_return() {
        let w = Worker::new("test", None).unwrap();
        let mut data = vec![1, 2, 3];
        let sum: i32 = w.call(|| {
            data.push(4);
            data.iter().sum()
        });
        assert_eq!((sum, data.len()), (10, 4));
        let pending = w.start(|| 7);
        assert_eq!(w.call(|| 8), 8);
        assert_eq!(pending.wait(), 7);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_thread_lives_on() {
        let w = Worker::new("test", None).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| w.call(|| panic!("expected"))));
        assert!(caught.is_err());
        assert_eq!(w.call(|| 1), 1);
    }
}
