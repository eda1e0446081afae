//! The one driver of the process: its state, and the way into every entry point.

use crate::abi::*;
use crate::config::{self, Settings};
use crate::context::Ctx;
use crate::event::Event;
use crate::host::HostReg;
use crate::ipc::Import;
use crate::memory::Block;
use crate::space::{Regions, VaSpace};
use crate::stream::Stream;
use crate::vmm::VmmHandle;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard};

/// Locks; what a panicking thread left is still used, as there is no better.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Things counted that no table holds.
#[derive(Default)]
pub struct Stats {
    pub local_copies: AtomicU64,
    pub peer_copies: AtomicU64,
    pub staged_peer_copies: AtomicU64,
    pub host_copies: AtomicU64,
    pub pageable_copies: AtomicU64,
    pub copies_done: AtomicU64,
    pub bytes_copied: AtomicU64,
    pub memsets: AtomicU64,
    pub value_writes: AtomicU64,
    pub freed_while_open: AtomicU64,
    pub left_in_context: AtomicU64,
    pub live_workers: AtomicU64,
    pub pending_ops: AtomicU64,
}

/// Adds one.
pub fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::AcqRel);
}

/// Everything that the calls make and destroy.
pub struct State {
    pub va: VaSpace,
    pub regions: Regions,
    pub contexts: HashMap<u64, Ctx>,
    pub streams: HashMap<u64, Arc<Stream>>,
    pub events: HashMap<u64, Arc<Event>>,
    pub handles: HashMap<u64, VmmHandle>,
    pub reservations: BTreeMap<u64, u64>,
    pub blocks: BTreeMap<u64, Block>,
    pub imports: HashMap<(u64, u64), Import>,
    /// Registered host memory by its host address.
    pub host: BTreeMap<u64, Arc<HostReg>>,
    pub used: HashMap<u32, u64>,
    next: u64,
    buffer_ids: u64,
}

impl State {
    /// A handle that no pointer has and that is never used again.
    pub fn new_handle(&mut self) -> u64 {
        self.next += 0x10;
        0x7cc1_0000_0000_0000 | self.next
    }

    /// A buffer id, unique in the process's life.
    pub fn new_buffer_id(&mut self) -> u64 {
        self.buffer_ids += 1;
        self.buffer_ids
    }

    /// Counts memory of a device; it has only so much.
    pub fn charge(&mut self, device: u32, size: u64, limit_mib: u64) -> Res {
        let used = self.used.entry(device).or_default();
        if used.saturating_add(size) > limit_mib << 20 {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        *used += size;
        Ok(())
    }

    pub fn uncharge(&mut self, device: u32, size: u64) {
        let used = self.used.entry(device).or_default();
        *used = used.saturating_sub(size);
    }
}

/// The driver.
pub struct Driver {
    /// The process that initialized it, 0 before.
    pid: AtomicU32,
    init: Mutex<()>,
    settings: Mutex<Settings>,
    /// A setting was made through the control interface.
    by_hand: AtomicBool,
    /// Told when a setting changes or everything is to be let go.
    pub changed: Condvar,
    state: Mutex<Option<State>>,
    /// The devices that this process sees: the machine's number of each.
    visible: Mutex<Vec<u32>>,
    pub stats: Stats,
    calls: Mutex<HashMap<&'static str, u64>>,
    violations: Mutex<Vec<String>>,
}

static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver {
    pid: AtomicU32::new(0),
    init: Mutex::new(()),
    settings: Mutex::new(Settings::from_env()),
    by_hand: AtomicBool::new(false),
    changed: Condvar::new(),
    state: Mutex::new(None),
    visible: Mutex::new(Vec::new()),
    stats: Stats::default(),
    calls: Mutex::new(HashMap::new()),
    violations: Mutex::new(Vec::new()),
});

/// The driver of this process.
pub fn driver() -> &'static Driver {
    &DRIVER
}

thread_local! {
    static PROGRESS: Cell<u32> = const { Cell::new(0) };
}

/// The state, locked.
pub struct StateGuard(MutexGuard<'static, Option<State>>);

impl std::ops::Deref for StateGuard {
    type Target = State;
    fn deref(&self) -> &State {
        self.0.as_ref().expect("only made when there is a state")
    }
}

impl std::ops::DerefMut for StateGuard {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().expect("only made when there is a state")
    }
}

impl Driver {
    /// The settings, locked: ask and let go.
    pub fn settings(&self) -> MutexGuard<'_, Settings> {
        lock(&self.settings)
    }

    /// The state, locked. Settings and violations may be locked after it, never before.
    pub fn state(&'static self) -> Res<StateGuard> {
        let guard = lock(&self.state);
        if guard.is_none() {
            return Err(ERROR_NOT_INITIALIZED);
        }
        Ok(StateGuard(guard))
    }

    /// `cuInit`.
    pub fn initialize(&self) -> Res {
        let _one = lock(&self.init);
        if self.pid.load(Ordering::Acquire) != 0 {
            return Ok(());
        }
        // What was set by hand before stays.
        if !self.by_hand.load(Ordering::Acquire) {
            *self.settings() = Settings::from_env();
        }
        let settings = self.settings().clone();
        let filter = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let visible = crate::device::visible(settings.devices, filter);
        if visible.is_empty() {
            return Err(ERROR_NO_DEVICE);
        }
        *lock(&self.visible) = visible;
        *lock(&self.state) = Some(State {
            va: VaSpace::reserve(settings.va_gib)?,
            regions: Regions::default(),
            contexts: HashMap::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            handles: HashMap::new(),
            reservations: BTreeMap::new(),
            blocks: BTreeMap::new(),
            imports: HashMap::new(),
            host: BTreeMap::new(),
            used: HashMap::new(),
            next: 0,
            buffer_ids: 0,
        });
        self.pid.store(std::process::id(), Ordering::Release);
        Ok(())
    }

    fn ready(&self) -> Res {
        // A forked child cannot use its parent's driver, as with the real one.
        if self.pid.load(Ordering::Acquire) == std::process::id() {
            Ok(())
        } else {
            Err(ERROR_NOT_INITIALIZED)
        }
    }

    /// The devices that this process sees.
    pub fn visible(&self) -> Vec<u32> {
        lock(&self.visible).clone()
    }

    /// The machine's number of a device.
    pub fn physical(&self, ordinal: i32) -> Res<u32> {
        let at = usize::try_from(ordinal).map_err(|_| ERROR_INVALID_DEVICE)?;
        lock(&self.visible)
            .get(at)
            .copied()
            .ok_or(ERROR_INVALID_DEVICE)
    }

    /// This process's number of a device.
    pub fn ordinal(&self, physical: u32) -> i32 {
        let at = lock(&self.visible).iter().position(|d| *d == physical);
        at.map_or(DEVICE_INVALID, |i| i as i32)
    }

    /// Records a violation.
    pub fn violation(&self, text: String) {
        let report = self.settings().report.clone();
        if !report.is_empty() {
            let line = format!("{} {text}\n", std::process::id());
            let file = std::fs::OpenOptions::new()
                .append(true)
                .create(true)
                .open(&report);
            if file.and_then(|mut f| f.write_all(line.as_bytes())).is_err() {
                eprintln!("cuda_double: {report}: cannot be written; {text}");
            }
        }
        lock(&self.violations).push(text);
    }

    /// Records a violation if the thread is on a progress path.
    pub fn progress_violation(&self, text: impl FnOnce() -> String) {
        if on_progress_path() && self.settings().progress_strict {
            self.violation(format!("progress path: {}", text()));
        }
    }

    /// What was recorded.
    pub fn violations(&self) -> Vec<String> {
        lock(&self.violations).clone()
    }

    /// Forgets violations and counts, takes the settings of the environment, and lets go what hangs.
    pub fn reset(&'static self) {
        *self.settings() = Settings::from_env();
        lock(&self.violations).clear();
        lock(&self.calls).clear();
        let s = &self.stats;
        for counter in [
            &s.local_copies,
            &s.peer_copies,
            &s.staged_peer_copies,
            &s.host_copies,
            &s.pageable_copies,
            &s.copies_done,
            &s.bytes_copied,
            &s.memsets,
            &s.value_writes,
            &s.freed_while_open,
            &s.left_in_context,
        ] {
            counter.store(0, Ordering::Release);
        }
        if let Ok(state) = self.state() {
            for ctx in state.contexts.values() {
                ctx.core.sticky.store(0, Ordering::Release);
            }
        }
        self.changed.notify_all();
    }

    /// Changes a setting.
    pub fn set(&self, key: &str, value: &str) -> Result<(), String> {
        self.settings().set(key, value)?;
        self.by_hand.store(true, Ordering::Release);
        self.changed.notify_all();
        Ok(())
    }

    /// The count with that name: an entry point's calls, or one of the double's own.
    pub fn counter(&'static self, name: &str) -> u64 {
        let s = &self.stats;
        let get = |c: &AtomicU64| c.load(Ordering::Acquire);
        match name {
            "local_copies" => return get(&s.local_copies),
            "peer_copies" => return get(&s.peer_copies),
            "staged_peer_copies" => return get(&s.staged_peer_copies),
            "host_copies" => return get(&s.host_copies),
            "pageable_copies" => return get(&s.pageable_copies),
            "copies_done" => return get(&s.copies_done),
            "bytes_copied" => return get(&s.bytes_copied),
            "memsets" => return get(&s.memsets),
            "value_writes" => return get(&s.value_writes),
            "freed_while_open" => return get(&s.freed_while_open),
            "left_in_context" => return get(&s.left_in_context),
            "live_workers" => return get(&s.live_workers),
            "pending_ops" => return get(&s.pending_ops),
            "violations" => return lock(&self.violations).len() as u64,
            "calls" => return lock(&self.calls).values().sum(),
            _ => {}
        }
        if let Some(live) = name.strip_prefix("live_") {
            return self.state().map_or(0, |state| live_count(&state, live));
        }
        let calls = lock(&self.calls);
        calls
            .iter()
            .filter(|(n, _)| config::same_entry(name, n))
            .map(|(_, c)| c)
            .sum()
    }
}

fn live_count(state: &State, what: &str) -> u64 {
    use crate::space::Region;
    let regions =
        |test: fn(&Region) -> bool| state.regions.iter().filter(|(_, r)| test(r)).count() as u64;
    match what {
        "allocations" => regions(|r| matches!(r, Region::Alloc(a) if a.opens.is_none())),
        "ipc_imports" => regions(|r| matches!(r, Region::Alloc(a) if a.opens.is_some())),
        "mappings" => regions(|r| matches!(r, Region::Mapping(_))),
        "reservations" => state.reservations.len() as u64,
        "handles" => state.handles.len() as u64,
        "imported_handles" => state.handles.values().filter(|h| h.imported).count() as u64,
        "registered" => state.host.len() as u64,
        "streams" => state.streams.len() as u64,
        "events" => state.events.len() as u64,
        "contexts" => state.contexts.len() as u64,
        _ => 0,
    }
}

/// The thread begins work that NCCL's proxy waits for.
pub fn progress_enter() {
    PROGRESS.with(|depth| depth.set(depth.get() + 1));
}

/// The thread ends what `progress_enter` began.
pub fn progress_leave() {
    PROGRESS.with(|depth| depth.set(depth.get().saturating_sub(1)));
}

/// Is the thread within such work?
pub fn on_progress_path() -> bool {
    PROGRESS.with(|depth| depth.get() > 0)
}

/// What must hold before an entry point runs.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// May be called before `cuInit`.
    Early,
    /// Needs `cuInit`.
    Plain,
    /// Needs `cuInit`, and has no place on a progress path: why.
    Slow(&'static str),
}

/// Runs an entry point: counts it, injects what failure is set, and keeps panics inside.
pub fn enter(
    name: &'static str,
    kind: Kind,
    body: impl FnOnce(&'static Driver) -> Res,
) -> CUresult {
    let run = AssertUnwindSafe(|| -> Res {
        let drv = driver();
        let forked = drv.pid.load(Ordering::Acquire);
        if forked != 0 && forked != std::process::id() {
            return Err(ERROR_NOT_INITIALIZED);
        }
        *lock(&drv.calls).entry(name).or_default() += 1;
        let mut injected = None;
        for rule in &mut drv.settings().fail {
            if rule.names(name) {
                rule.seen += 1;
                if rule.when.hits(rule.seen) && injected.is_none() {
                    injected = Some(rule.code);
                }
            }
        }
        if let Kind::Slow(why) = kind {
            drv.progress_violation(|| format!("{name} {why}"));
            if drv.settings().capture && !crate::stream::is_relaxed() {
                drv.violation(format!(
                    "breaks a graph capture: {name} {why}, and this thread is not relaxed"
                ));
            }
        }
        if let Some(code) = injected {
            return if code == 0 { Ok(()) } else { Err(code) };
        }
        if kind != Kind::Early {
            drv.ready()?;
        }
        body(drv)
    });
    match catch_unwind(run) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => ERROR_UNKNOWN,
    }
}

/// Declares an exported entry point.
macro_rules! entry {
    ($kind:expr, fn $name:ident($($arg:ident: $ty:ty),* $(,)?) |$drv:ident| $body:expr) => {
        #[no_mangle]
        pub extern "C" fn $name($($arg: $ty),*) -> $crate::abi::CUresult {
            $crate::driver::enter(stringify!($name), $kind, |$drv| $body)
        }
    };
}
pub(crate) use entry;
