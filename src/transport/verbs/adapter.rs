//! Open RDMA devices of this process: one protection domain each, a thread that reads the device's events, and
//! the memory that is registered.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::gpu::{self, How};
use crate::config::Ib;
use crate::error::{Error, Result};
use crate::ibverbs::devices::Port;
use crate::ibverbs::{sys, verbs, About, Context, Event, Mr, Pd};
use crate::sync::lock;
use crate::thread::Thread;

/// What can end a connection from outside its data path.
#[derive(Debug, Default)]
pub struct Health {
    bad: AtomicBool,
    why: Mutex<Option<Error>>,
}

impl Health {
    /// Whether something has happened.
    #[inline]
    pub fn is_bad(&self) -> bool {
        self.bad.load(Ordering::Acquire)
    }

    /// What has happened first.
    #[cold]
    pub fn why(&self) -> Option<Error> {
        lock(&self.why).clone()
    }

    #[cold]
    fn fail(&self, e: Error) {
        lock(&self.why).get_or_insert(e);
        self.bad.store(true, Ordering::Release);
    }
}

/// Who must hear of a port's or a queue pair's end.
#[derive(Debug)]
struct Watch {
    health: Weak<Health>,
    port: u8,
    cq: usize,
    qps: Vec<u32>,
}

type Watches = Arc<Mutex<Vec<Watch>>>;

/// An open device.
#[derive(Debug)]
pub struct Adapter {
    // Before the context, which the thread reads.
    events: Events,
    watches: Watches,
    /// By first and last page, and access.
    regions: Mutex<HashMap<(u64, u64, u32), Weak<Mr>>>,
    gpus: Mutex<HashMap<i32, std::result::Result<How, String>>>,
    pd: Arc<Pd>,
    context: Arc<Context>,
    /// The device's limits.
    pub attr: sys::DeviceAttr,
}

static ADAPTERS: Mutex<Option<HashMap<String, Weak<Adapter>>>> = Mutex::new(None);

impl Adapter {
    /// The device of that name, opened if nobody uses it yet.
    pub fn get(name: &str) -> Result<Arc<Adapter>> {
        let mut all = lock(&ADAPTERS);
        let all = all.get_or_insert_default();
        if let Some(a) = all.get(name).and_then(Weak::upgrade) {
            if a.events.thread.pid() == std::process::id() {
                return Ok(a);
            }
            // A fork's copy: the device and the thread are the parent's.
            std::mem::forget(a);
        }
        let a = Arc::new(Adapter::open(name)?);
        all.insert(name.to_string(), Arc::downgrade(&a));
        Ok(a)
    }

    fn open(name: &str) -> Result<Adapter> {
        let verbs = verbs().map_err(Error::invalid_usage)?;
        let context = Arc::new(verbs.open(name)?);
        let attr = context.query_device()?;
        let pd = Arc::new(context.alloc_pd()?);
        let watches = Watches::default();
        Ok(Adapter {
            events: Events::start(context.clone(), watches.clone())?,
            watches,
            regions: Mutex::default(),
            gpus: Mutex::default(),
            pd,
            context,
            attr,
        })
    }

    /// The open device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// From now on `health` hears of the end of that port and of these queues.
    pub fn watch(&self, health: &Arc<Health>, port: u8, cq: usize, qps: Vec<u32>) {
        let mut watches = lock(&self.watches);
        watches.retain(|w| w.health.strong_count() > 0);
        watches.push(Watch {
            health: Arc::downgrade(health),
            port,
            cq,
            qps,
        });
    }

    /// Registers the pages of `[addr, addr + len)` for that `sys::ACCESS_*`, once for all who ask.
    ///
    /// # Safety
    /// As for [`Pd::reg_mr`], as long as anybody holds the region.
    pub unsafe fn register(&self, addr: u64, len: u64, access: u32) -> Result<Arc<Mr>> {
        let by_address = |from: u64, len: u64| {
            let pd = &self.pd;
            // SAFETY: the caller's promise; the rest of the first and last page is only in reach of peers that
            // prove to hold a handle of ours, and they write where they were told to.
            unsafe { pd.reg_mr(from as *mut u8, len as usize, access) }
        };
        // SAFETY: as above.
        unsafe { self.register_by(addr, len, access, by_address) }
    }

    /// The same, where `by` registers pages: from, length.
    ///
    /// # Safety
    /// As for [`Pd::reg_mr`], as long as anybody holds the region.
    pub unsafe fn register_by(
        &self,
        addr: u64,
        len: u64,
        access: u32,
        by: impl FnOnce(u64, u64) -> Result<Mr>,
    ) -> Result<Arc<Mr>> {
        const PAGE: u64 = 4096;
        let from = addr & !(PAGE - 1);
        let to = addr
            .checked_add(len.max(1))
            .and_then(|end| end.checked_next_multiple_of(PAGE))
            .ok_or_else(|| {
                Error::invalid_argument(format!("{len} bytes at {addr:#x} are no region"))
            })?;
        let mut regions = lock(&self.regions);
        let key = (from, to, access);
        if let Some(mr) = regions.get(&key).and_then(Weak::upgrade) {
            return Ok(mr);
        }
        let mr = Arc::new(by(from, to - from)?);
        regions.retain(|_, m| m.strong_count() > 0);
        regions.insert(key, Arc::downgrade(&mr));
        Ok(mr)
    }

    /// How a port of this device gets at memory of GPU `ordinal`, found out once; the error says why it does not.
    pub fn reach(&self, port: &Port, ordinal: i32, ib: &Ib) -> std::result::Result<How, String> {
        let mut known = lock(&self.gpus);
        known
            .entry(ordinal)
            .or_insert_with(|| {
                let found = gpu::probe(self, port, ordinal, ib);
                match &found {
                    Ok(how) => log::info!(
                        "{} reads and writes memory of GPU {ordinal} itself ({how:?}): a test did",
                        self.context.name()
                    ),
                    Err(why) => log::info!(
                        "{} does not get at memory of GPU {ordinal}, copy engines move it through the host: {why}",
                        self.context.name()
                    ),
                }
                found
            })
            .clone()
    }
}

/// The thread that reads a device's events.
#[derive(Debug)]
struct Events {
    stop: Arc<EventFd>,
    thread: Thread,
}

impl Events {
    fn start(context: Arc<Context>, watches: Watches) -> Result<Events> {
        context.set_async_nonblocking()?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let stop = EventFd::from_value_and_flags(0, flags)
            .map_err(|e| Error::system("making an eventfd", e))?;
        let stop = Arc::new(stop);
        let theirs = stop.clone();
        let thread = Thread::start("vccl-ib-event", move || run(&context, &watches, &theirs))?;
        Ok(Events { stop, thread })
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let stop = &self.stop;
        self.thread.end(|| {
            let _ = stop.write(1);
        });
    }
}

fn run(context: &Context, watches: &Watches, stop: &EventFd) {
    loop {
        let mut fds = [
            PollFd::new(stop.as_fd(), PollFlags::POLLIN),
            PollFd::new(context.async_fd(), PollFlags::POLLIN),
        ];
        let polled = poll(&mut fds, PollTimeout::NONE);
        let stopped = fds[0].any().unwrap_or(false);
        if stopped {
            return;
        }
        match polled.and_then(|_| match fds[1].revents() {
            Some(r) if r.intersects(PollFlags::POLLERR | PollFlags::POLLNVAL) => {
                Err(nix::errno::Errno::EIO)
            }
            _ => Ok(()),
        }) {
            Ok(()) | Err(nix::errno::Errno::EINTR) => {}
            Err(e) => {
                return blind(context, watches, e.desc());
            }
        }
        loop {
            match context.async_event() {
                Ok(Some(event)) => handle(context, watches, event),
                Ok(None) => break,
                Err(e) => return blind(context, watches, e.text()),
            }
        }
    }
}

/// Nothing more can be known of the device: whoever uses it must not wait for it.
#[cold]
fn blind(context: &Context, watches: &Watches, why: &str) {
    let text = format!("{}: its events cannot be read: {why}", context.name());
    log::warn!("{text}");
    for w in lock(watches).iter() {
        if let Some(health) = w.health.upgrade() {
            health.fail(Error::new(crate::error::ResultCode::SYSTEM, text.clone()));
        }
    }
}

fn handle(context: &Context, watches: &Watches, event: Event) {
    let name = context.name();
    let text = context.verbs().event_type(event.kind);
    let of = |about: &About| match about {
        About::Device | About::Srq => name.to_string(),
        About::Port(p) => format!("{name}:{p}"),
        About::Qp(n) => format!("queue pair {n} of {name}"),
        About::Cq(_) => format!("a completion queue of {name}"),
    };
    let fatal = match event.kind {
        sys::EVENT_DEVICE_FATAL
        | sys::EVENT_PORT_ERR
        | sys::EVENT_QP_FATAL
        | sys::EVENT_QP_REQ_ERR
        | sys::EVENT_QP_ACCESS_ERR
        | sys::EVENT_CQ_ERR => true,
        // Each new connection has this one.
        sys::EVENT_COMM_EST => return,
        _ => false,
    };
    if !fatal {
        log::info!("{}: {text}", of(&event.about));
        return;
    }
    log::warn!("{}: {text}", of(&event.about));
    let cure = match event.kind {
        sys::EVENT_PORT_ERR => ": the port went down; check its link, cable and switch",
        sys::EVENT_DEVICE_FATAL => ": the device failed or was taken away",
        _ => "",
    };
    for w in lock(watches).iter() {
        let hit = match event.about {
            About::Port(p) => w.port == p,
            About::Qp(n) => w.qps.contains(&n),
            About::Cq(id) => w.cq == id,
            About::Device | About::Srq => true,
        };
        if let (true, Some(health)) = (hit, w.health.upgrade()) {
            health.fail(Error::new(
                crate::error::ResultCode::SYSTEM,
                format!("{}: {text}{cure}", of(&event.about)),
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_counts() {
        let h = Health::default();
        assert!(!h.is_bad() && h.why().is_none());
        h.fail(Error::remote("one"));
        h.fail(Error::remote("two"));
        assert!(h.is_bad());
        assert_eq!(h.why().unwrap().text(), "one");
    }
}
