//! What the plugin counts: messages and bytes by the path that they took, for each connection and
//! for the process; and warnings that are worth saying once.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// How bytes reach the receive buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// One copy by the sender's engine into the mapped receive buffer.
    Push,
    /// Through the ring of chunks in shared host memory.
    HostRing,
    /// Through the ring of chunks in the receiver's GPU, which costs the receiver SMs.
    DeviceRing,
}

const PATHS: usize = 3;

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Path::Push => "pushed straight into the receive buffer",
            Path::HostRing => "through shared host memory",
            Path::DeviceRing => "through chunks in the receiver's GPU",
        })
    }
}

#[derive(Debug)]
struct Totals {
    messages: [AtomicU64; PATHS],
    bytes: [AtomicU64; PATHS],
    regions: [AtomicU64; PATHS],
}

static PROCESS: Totals = Totals {
    messages: [const { AtomicU64::new(0) }; PATHS],
    bytes: [const { AtomicU64::new(0) }; PATHS],
    regions: [const { AtomicU64::new(0) }; PATHS],
};

/// Counts a region that the process can send to by this path.
pub fn region(path: Path) {
    PROCESS.regions[path as usize].fetch_add(1, Ordering::Relaxed);
}

/// Messages, bytes and regions of the process by this path. Connections add theirs when they close.
pub fn totals(path: Path) -> (u64, u64, u64) {
    let i = path as usize;
    let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
    (
        get(&PROCESS.messages[i]),
        get(&PROCESS.bytes[i]),
        get(&PROCESS.regions[i]),
    )
}

/// Time that messages spent in one stage, by quarters of a power of two of nanoseconds; one thread
/// adds.
#[derive(Debug)]
pub struct Stage {
    times: [AtomicU64; STAGE_BUCKETS],
}

const STAGE_BUCKETS: usize = 160;

impl Default for Stage {
    fn default() -> Self {
        Stage {
            times: [const { AtomicU64::new(0) }; STAGE_BUCKETS],
        }
    }
}

impl Stage {
    /// Adds the time since `start`.
    #[inline]
    pub fn since(&self, start: Instant) {
        self.add(start.elapsed().as_nanos() as u64);
    }

    #[inline]
    fn add(&self, ns: u64) {
        let i = ((ns.max(1) as f64).log2() * 4.0).round() as usize;
        let bucket = &self.times[i.min(STAGE_BUCKETS - 1)];
        bucket.store(bucket.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Microseconds that `share` (0 to 1) of the messages took at most, within a tenth.
    fn quantile_us(&self, share: f64) -> Option<f64> {
        let count = |b: &AtomicU64| b.load(Ordering::Relaxed);
        let n: u64 = self.times.iter().map(count).sum();
        let mut left = (n as f64 * share) as u64;
        for (i, b) in self.times.iter().enumerate() {
            if count(b) > left {
                return Some((i as f64 / 4.0).exp2() / 1e3);
            }
            left -= count(b);
        }
        None
    }

    fn show(&self) -> String {
        match (self.quantile_us(0.5), self.quantile_us(0.9)) {
            (Some(half), Some(most)) => format!("{half:.2} us (a tenth over {most:.2})"),
            _ => "-".into(),
        }
    }
}

/// Where a message's time goes, under `VCCL_TIMING=1`.
#[derive(Default, Debug)]
pub struct Timing {
    /// From the first isend that found no posted receive until one that did.
    pub descriptor: Stage,
    /// In the call that makes our context current.
    pub context: Stage,
    /// In the call that enqueues the copy.
    pub copy: Stage,
    /// In the calls that enqueue its step and restore the context.
    pub step: Stage,
    /// From there until the step was seen.
    pub completion: Stage,
}

/// One connection's counters. One thread at a time adds: the one inside the connection's gate.
#[derive(Default, Debug)]
pub struct Connection {
    messages: [AtomicU64; PATHS],
    bytes: [AtomicU64; PATHS],
    /// Stages, when they are measured.
    pub timing: Option<Box<Timing>>,
}

impl Connection {
    /// Counters; with stages if the setting says so.
    pub fn new(timing: bool) -> Connection {
        Connection {
            timing: timing.then(Box::default),
            ..Connection::default()
        }
    }

    /// Counts one message.
    #[inline]
    pub fn count(&self, path: Path, bytes: u64) {
        let i = path as usize;
        let add = |a: &AtomicU64, n| a.store(a.load(Ordering::Relaxed) + n, Ordering::Relaxed);
        add(&self.messages[i], 1);
        add(&self.bytes[i], bytes);
    }

    /// Adds to the process's totals, and logs one line for each path that was used.
    pub fn report(&self, who: &str) {
        for path in [Path::Push, Path::HostRing, Path::DeviceRing] {
            let i = path as usize;
            let messages = self.messages[i].swap(0, Ordering::Relaxed);
            let bytes = self.bytes[i].swap(0, Ordering::Relaxed);
            if messages > 0 {
                PROCESS.messages[i].fetch_add(messages, Ordering::Relaxed);
                PROCESS.bytes[i].fetch_add(bytes, Ordering::Relaxed);
                log::info!("{who}: sent {messages} messages, {bytes} bytes, {path}");
            }
        }
        if let Some(t) = &self.timing {
            log::info!(
                "{who}: timing of half of the messages, at most: waits for its receive {}, context in {}, \
                 copy enqueued in {}, step in {}, done after {}",
                t.descriptor.show(),
                t.context.show(),
                t.copy.show(),
                t.step.show(),
                t.completion.show()
            );
        }
    }
}

/// Said: both ranks of a connection use one GPU.
pub static SAME_GPU: AtomicBool = AtomicBool::new(false);
/// Said: memory goes through chunks in the receiver's GPU.
pub static DEVICE_RING: AtomicBool = AtomicBool::new(false);
/// Said: GPU memory goes through the host.
pub static GPU_THROUGH_HOST: AtomicBool = AtomicBool::new(false);

/// Said: copies out of cudaMalloc memory depend on the application's context.
pub static APPLICATION_MEMORY: AtomicBool = AtomicBool::new(false);
/// Said: there is no private context.
pub static NO_CONTEXT: AtomicBool = AtomicBool::new(false);

/// Warns, if `said` has not been said in this process.
pub fn warn_once(said: &AtomicBool, text: impl FnOnce() -> String) {
    if !said.swap(true, Ordering::Relaxed) {
        log::warn!("{}", text());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_near() {
        let s = Stage::default();
        assert_eq!(s.quantile_us(0.5), None);
        for _ in 0..90 {
            s.add(4_000);
        }
        for _ in 0..10 {
            s.add(1_000_000);
        }
        s.add(0);
        s.add(u64::MAX);
        let near = |got: Option<f64>, want: f64| (got.unwrap() / want - 1.0).abs() < 0.1;
        assert!(near(s.quantile_us(0.5), 4.0), "{:?}", s.quantile_us(0.5));
        assert!(
            near(s.quantile_us(0.95), 1000.0),
            "{:?}",
            s.quantile_us(0.95)
        );
    }
}
