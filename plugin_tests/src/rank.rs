//! A rank: a plugin, three threads with NCCL's roles, and a way to talk to the other ranks.

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::cuda;
use crate::error::{Context, Error, Result};
use crate::launch::RANK_VAR;
use crate::logs;
use crate::memory::{Buffer, Kind};
use crate::net::{Comm, Handle, ListenComm, Plugin, Progress, Registered, Session};
use crate::nodes::{stand_in, AGENT_VAR};
use crate::oob::{read_frame, Oob, Post};
use crate::params::Params;
use crate::worker::{Pending, Worker};
use crate::{ensure, fail};

/// What ranks run: every rank of a run calls the same function.
pub type Entry = fn(&mut Ctx) -> Result<()>;

/// How long connections may take to come about in a run that expects them to.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// How long close and deregMr may take, whatever is in flight: a second, or `VCCL_DRIVER_SLOW` seconds where the
/// machine may stand still for one (an emulated one).
pub fn close_limit() -> Duration {
    static LIMIT: OnceLock<Duration> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let seconds = match std::env::var("VCCL_DRIVER_SLOW") {
            Ok(text) => text
                .parse()
                .unwrap_or_else(|_| panic!("VCCL_DRIVER_SLOW={text} is no number of seconds")),
            Err(_) => 1,
        };
        Duration::from_secs(seconds)
    })
}

/// One rank, as its entry sees it. The thread that runs the entry is NCCL's init thread.
pub struct Ctx {
    /// This rank's number.
    pub rank: usize,
    /// How many ranks there are.
    pub nranks: usize,
    /// The run's parameters.
    pub params: Params,
    /// The way to the other ranks.
    pub oob: Oob,
    /// The loaded plugin.
    pub plugin: Plugin,
    /// What `init` returned.
    pub session: Session,
    /// The net device in use.
    pub dev: i32,
    /// The GPU whose context is current in this rank's threads.
    pub gpu: usize,
    entry: String,
    double: Option<cuda::DoubleHooks>,
    service: Worker,
    progress: Worker,
    io: Progress,
    connections: usize,
}

/// One end of an open connection.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// The connection's number: the same at both ends.
    pub id: usize,
    /// The rank at the other end.
    pub peer: usize,
    /// The plugin's object.
    pub comm: Comm,
}

impl Link {
    /// Whether this is the end that sends.
    pub fn sends(&self) -> bool {
        matches!(self.comm, Comm::Send(_))
    }
}

/// If this process was started to host ranks, hosts them and exits; otherwise returns at once.
/// `find` knows the entries by name.
pub fn enter_if_rank(find: impl Fn(&str) -> Option<Entry>) {
    if std::env::var_os(RANK_VAR).is_none() {
        return;
    }
    let hosted = match std::env::var(AGENT_VAR) {
        Ok(agent) => stand_in(&agent).map(|never| match never {}),
        Err(_) => host(find),
    };
    let code = match hosted {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("{e}");
            97
        }
    };
    std::process::exit(code);
}

fn host(find: impl Fn(&str) -> Option<Entry>) -> Result<()> {
    // The socket is standard input; it moves away from there so that no child of a plugin gets it.
    let stdin = std::io::stdin();
    let mut stream = UnixStream::from(stdin.as_fd().try_clone_to_owned()?);
    let null = std::fs::File::open("/dev/null")?;
    // SAFETY: both descriptors are open; dup2 replaces standard input.
    if unsafe { libc::dup2(null.as_raw_fd(), 0) } < 0 {
        fail!("dup2: {}", std::io::Error::last_os_error());
    }
    // Ctrl-C reaches the whole foreground group; the parent decides what becomes of its ranks.
    // SAFETY: ignoring a signal installs no handler.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
    let spec = read_frame(&mut stream)?.ok_or_else(|| Error::new("no word from the parent"))?;
    let params = Params::decode(&String::from_utf8_lossy(&spec.payload));
    if params.text("driver.nofile").is_some() {
        limit_files(params.get("driver.nofile")?)?;
    }
    let post = Post::start(stream)?;
    let name: String = params.get("driver.entry")?;
    let entry = find(&name);
    let nranks: usize = params.get("driver.nranks")?;
    let ranks: Vec<usize> = params
        .get::<String>("driver.ranks")?
        .split(',')
        .map(|r| r.parse().map_err(|_| Error::new("bad rank")))
        .collect::<Result<_>>()?;
    let plugin: Arc<std::sync::OnceLock<Result<Plugin>>> = Arc::default();
    let threads: Vec<_> = ranks
        .into_iter()
        .map(|rank| {
            let (params, post, plugin, name) =
                (params.clone(), post.clone(), plugin.clone(), name.clone());
            std::thread::Builder::new()
                .name(format!("init {rank}"))
                .spawn(move || {
                    let oob = Oob::new(post, rank, nranks);
                    let mark = logs::mark();
                    let result = match entry {
                        Some(entry) => run_rank(entry, &name, &oob, rank, nranks, params, &plugin),
                        None => Err(Error::new(format!("there is nothing called {name}"))),
                    };
                    let result = result.map_err(|e| with_log(e, mark));
                    let _ = oob.done(&result);
                })
        })
        .collect::<std::io::Result<_>>()?;
    for t in threads {
        let _ = t.join();
    }
    Ok(())
}

/// The last warnings of the plugin often say more than the error does.
fn with_log(e: Error, mark: usize) -> Error {
    if e.is_skip() {
        return e;
    }
    let warnings = logs::warnings_since(mark);
    let from = warnings.len().saturating_sub(5);
    if warnings.is_empty() {
        return e;
    }
    let list: Vec<String> = warnings[from..]
        .iter()
        .map(|w| format!("    WARN {w}"))
        .collect();
    Error::new(format!(
        "{e}\n  the plugin's last warnings:\n{}",
        list.join("\n")
    ))
}

fn limit_files(soft: u64) -> Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a place for the limits.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        fail!("getrlimit: {}", std::io::Error::last_os_error());
    }
    limit.rlim_cur = soft.min(limit.rlim_max);
    // SAFETY: `limit` is a valid pair: the soft limit is not above the hard one.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } != 0 {
        fail!("setrlimit: {}", std::io::Error::last_os_error());
    }
    Ok(())
}

fn run_rank(
    entry: Entry,
    name: &str,
    oob: &Oob,
    rank: usize,
    nranks: usize,
    params: Params,
    plugin: &std::sync::OnceLock<Result<Plugin>>,
) -> Result<()> {
    oob.state("loading the plugin");
    let abi = params
        .text("driver.abi")
        .map(|_| params.get("driver.abi"))
        .transpose()?;
    let path: String = params.get("driver.plugin")?;
    let plugin = plugin.get_or_init(|| Plugin::load(&path, abi)).clone()?;
    let gpus = cuda::device_count();
    let (gpu, double) = if gpus > 0 {
        let c = cuda::get()?;
        let ranks = params.get::<String>("driver.ranks")?;
        let first = ranks.split(',').next().and_then(|r| r.parse().ok());
        let place = params.get::<usize>("driver.place")? + (rank - first.unwrap_or(rank));
        let gpu = place % gpus;
        c.bind(gpu)?;
        (Some(gpu), c.double())
    } else {
        (None, None)
    };
    oob.state("init");
    let session = plugin.init()?;
    let devices = session.devices()?;
    ensure!(devices > 0, "the plugin declines: devices() gave {devices}");
    let dev = match params.text("driver.join") {
        Some(_) => {
            let n = params.get("driver.join")?;
            ensure!(devices >= n, "{devices} devices, and {n} are to be joined");
            session.make_v_device(n, &(0..n).collect::<Vec<i32>>())?
        }
        None => (gpu.unwrap_or(rank) as i32) % devices,
    };
    let mut ctx = Ctx {
        rank,
        nranks,
        params,
        oob: oob.clone(),
        io: Progress::new(session.clone(), double),
        session: session.clone(),
        plugin,
        dev,
        gpu: gpu.unwrap_or(0),
        entry: name.to_string(),
        double,
        service: Worker::new(&format!("service {rank}"), gpu)?,
        progress: Worker::new(&format!("progress {rank}"), gpu)?,
        connections: 0,
    };
    ctx.state("running");
    let result = match catch_unwind(AssertUnwindSafe(|| entry(&mut ctx))) {
        Ok(r) => r,
        Err(panic) => Err(Error::new(format!("panic: {}", panic_text(&*panic)))),
    };
    result?;
    ctx.state("finalize");
    let Ctx {
        service,
        progress,
        io,
        session: own,
        double,
        params,
        ..
    } = ctx;
    drop((service, progress, io, own));
    session.finalize()?;
    if let Some(d) = double {
        let (n, text) = d.violations();
        let expected: usize = params
            .text("violations")
            .map_or(Ok(0), str::parse)
            .unwrap_or(0);
        ensure!(
            n == expected,
            "{n} rules of the CUDA driver were broken: {text}"
        );
    }
    Ok(())
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()))
        .unwrap_or_else(|| "with no text".to_string())
}

impl Ctx {
    /// Tells where the rank is, for the report of a hang.
    pub fn state(&self, text: impl std::fmt::Display) {
        self.oob.state(format!("{}: {text}", self.entry));
    }

    /// Runs `f` on the service thread and waits.
    pub fn service<R: Send>(&self, f: impl FnOnce(&Session) -> R + Send) -> R {
        self.service.call(|| f(&self.session))
    }

    /// Runs `f` on the progress thread and waits.
    pub fn progress<R: Send>(&self, f: impl FnOnce(&Progress) -> R + Send) -> R {
        self.progress.call(|| f(&self.io))
    }

    /// Runs `f` on the progress thread and does not wait.
    pub fn start_progress<R: Send + 'static>(
        &self,
        f: impl FnOnce(&Progress) -> R + Send + 'static,
    ) -> Pending<R> {
        let io = self.io.clone();
        self.progress.start(move || f(&io))
    }

    /// The progress functions, for a case that calls them from elsewhere.
    pub fn io(&self) -> &Progress {
        &self.io
    }

    /// The marks of the CUDA double, if it is there.
    pub fn double(&self) -> Option<cuda::DoubleHooks> {
        self.double
    }

    /// The GPU, if there is one.
    pub fn gpu(&self) -> Option<usize> {
        (cuda::device_count() > 0).then_some(self.gpu)
    }

    fn kind(&self, name: &str) -> Result<Kind> {
        self.params.text(name).map_or(Ok(Kind::Malloc), Kind::parse)
    }

    /// The kind of memory that is sent from.
    pub fn send_kind(&self) -> Result<Kind> {
        self.kind("send")
    }

    /// The kind of memory that is received into.
    pub fn recv_kind(&self) -> Result<Kind> {
        self.kind("recv")
    }

    /// Allocates memory for that end of a connection.
    pub fn buffer(&self, link: &Link, len: usize) -> Result<Arc<Buffer>> {
        self.buffer_at(link, len, 0)
    }

    /// Allocates memory for that end of a connection, at an address if that is possible.
    pub fn buffer_at(&self, link: &Link, len: usize, address: usize) -> Result<Arc<Buffer>> {
        let kind = if link.sends() {
            self.send_kind()?
        } else {
            self.recv_kind()?
        };
        Ok(Arc::new(Buffer::at(kind, len, self.gpu, address)?))
    }

    /// Registers all of a buffer on the service thread.
    pub fn register(&self, link: &Link, buffer: &Arc<Buffer>) -> Result<Registered> {
        self.service(|net| net.reg_mr(link.comm, buffer, 0, buffer.len()))
            .context(|| format!("connection {}", link.id))
    }

    /// Opens connections, each from a rank to a rank; every rank passes the same list, and gets its
    /// own ends in the list's order. A connection of a rank to itself gives the sending end first.
    pub fn connect(&mut self, pairs: &[(usize, usize)]) -> Result<Vec<Link>> {
        let first = self.connections;
        self.connections += pairs.len();
        let me = self.rank;
        self.state(format!("listening for connections from number {first} on"));
        let mut listeners: Vec<(usize, ListenComm)> = Vec::new();
        for (i, (from, to)) in pairs.iter().enumerate() {
            if *to == me {
                let dev = self.dev;
                let (handle, listener) = self.service(|net| net.listen(dev))?;
                listeners.push((i, listener));
                self.oob.send(*from, handle.0)?;
            }
        }
        let mut outgoing: Vec<(usize, Handle)> = Vec::new();
        for (i, (from, to)) in pairs.iter().enumerate() {
            if *from == me {
                outgoing.push((i, self.recv_handle(*to)?));
            }
        }
        self.state(format!("connecting, from connection {first} on"));
        let dev = self.dev;
        let oob = self.oob.clone();
        let entry = self.entry.clone();
        let mut links: Vec<(usize, bool, Comm)> = self.service(|net| -> Result<_> {
            let mut done: Vec<(usize, bool, Comm)> = Vec::new();
            let mut pending_out = outgoing;
            let mut pending_in = listeners.clone();
            let until = Instant::now() + CONNECT_LIMIT;
            let mut idle = crate::worker::Idle::patient();
            while !pending_out.is_empty() || !pending_in.is_empty() {
                let before = done.len();
                let mut i = 0;
                while i < pending_out.len() {
                    let (n, handle) = &mut pending_out[i];
                    match net
                        .connect(dev, handle)
                        .context(|| format!("connection {}", first + *n))?
                    {
                        Some(c) => {
                            done.push((*n, false, Comm::Send(c)));
                            pending_out.swap_remove(i);
                        }
                        None => i += 1,
                    }
                }
                let mut i = 0;
                while i < pending_in.len() {
                    let (n, l) = pending_in[i];
                    match net
                        .accept(l)
                        .context(|| format!("connection {}", first + n))?
                    {
                        Some(c) => {
                            done.push((n, true, Comm::Recv(c)));
                            pending_in.swap_remove(i);
                        }
                        None => i += 1,
                    }
                }
                if done.len() == before {
                    if Instant::now() > until {
                        let out: Vec<usize> = pending_out.iter().map(|p| first + p.0).collect();
                        let inn: Vec<usize> = pending_in.iter().map(|p| first + p.0).collect();
                        oob.state(format!("{entry}: gave up connecting"));
                        fail!(
                            "not connected after {CONNECT_LIMIT:?}: connect still gives NULL for \
                             connections {out:?}, accept for {inn:?}"
                        );
                    }
                    idle.wait();
                } else {
                    idle.reset();
                }
            }
            for (_, l) in listeners {
                net.close_listen(l)?;
            }
            Ok(done)
        })?;
        links.sort_by_key(|l| (l.0, l.1));
        self.state("connected");
        Ok(links
            .into_iter()
            .map(|(i, _, comm)| {
                let (from, to) = pairs[i];
                let peer = if matches!(comm, Comm::Send(_)) {
                    to
                } else {
                    from
                };
                Link {
                    id: first + i,
                    peer,
                    comm,
                }
            })
            .collect())
    }

    /// Receives a handle from another rank.
    pub fn recv_handle(&self, from: usize) -> Result<Handle> {
        let bytes = self.oob.recv(from)?;
        let bytes: [u8; 128] = bytes
            .try_into()
            .map_err(|_| Error::new("that is not a handle's length"))?;
        Ok(Handle(bytes))
    }

    /// A number for a connection that a case opens by itself.
    pub fn next_connection(&mut self) -> usize {
        self.connections += 1;
        self.connections - 1
    }

    /// Runs `f` on the service thread; it is an error if that takes longer than `limit`.
    pub fn bounded<R: Send>(
        &self,
        what: impl std::fmt::Display,
        limit: Duration,
        f: impl FnOnce(&Session) -> R + Send,
    ) -> Result<R> {
        self.state(&what);
        let (result, took) = self.service(|net| {
            let start = Instant::now();
            let result = f(net);
            (result, start.elapsed())
        });
        ensure!(took <= limit, "{what} took {took:?} and may take {limit:?}");
        Ok(result)
    }

    /// Closes ends of connections; each within [`close_limit`].
    pub fn close(&self, links: &[Link]) -> Result<()> {
        for l in links {
            let what = format!("close of connection {}", l.id);
            self.bounded(&what, close_limit(), |net| net.close(l.comm))?
                .context(|| &what)?;
        }
        Ok(())
    }

    /// Ends registrations; each within [`close_limit`].
    pub fn deregister(&self, all: Vec<Registered>) -> Result<()> {
        for r in all {
            self.bounded("deregMr", close_limit(), |net| net.dereg_mr(r))??;
        }
        Ok(())
    }
}
