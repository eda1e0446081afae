//! Starts the ranks of a run, carries their messages, and notices every way in which one can fail:
//! an error, a crash, a hang.

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::nodes::{Node, AGENT_VAR};
use crate::oob::{self, Frame, Kind};
use crate::params::Params;
use crate::surroundings::Surroundings;

/// Set in the environment of a process that hosts ranks.
pub const RANK_VAR: &str = "VCCL_DRIVER_RANK";

/// How long the other ranks may go on after one has failed.
const GRACE: Duration = Duration::from_secs(5);

/// How ranks are spread over processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One process for each rank.
    Processes,
    /// All ranks are threads of one process.
    Threads,
}

/// A run to start.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The program that hosts ranks; it calls [`crate::rank::enter_if_rank`] first thing.
    pub exe: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// The plugin's library.
    pub plugin: PathBuf,
    /// The ABI version, or the newest.
    pub abi: Option<u32>,
    /// The name of what the ranks run.
    pub entry: String,
    /// Parameters for it.
    pub params: Params,
    /// How many ranks.
    pub nranks: usize,
    /// How they are spread.
    pub layout: Layout,
    /// Environment variables for the ranks; `NAME@1` is for the process of that number alone.
    pub env: Vec<(String, String)>,
    /// Join that many of the plugin's devices, the first ones, into one, as NCCL joins a NIC's ports.
    pub join: Option<i32>,
    /// Where the processes run, in turn; without any, here.
    pub nodes: Vec<Node>,
    /// What is special around each process, in order; the processes beyond have nothing special.
    pub surroundings: Vec<Surroundings>,
    /// A folder that the ranks' loader searches first, for a stand-in of the CUDA driver.
    pub library_dir: Option<PathBuf>,
    /// The soft limit of open files in each process.
    pub nofile: Option<u64>,
    /// Ranks that kill themselves in the course of the run.
    pub victims: Vec<usize>,
    /// How long the run may take.
    pub timeout: Duration,
    /// Whether files, sockets or shared memory that the ranks leave behind are an error.
    pub tidy: bool,
    /// Once true, the run is stopped.
    pub interrupt: Option<&'static AtomicBool>,
}

impl Launch {
    /// A run of `nranks` processes that takes at most a minute.
    pub fn new(exe: PathBuf, plugin: PathBuf, entry: &str, nranks: usize) -> Launch {
        Launch {
            exe,
            args: Vec::new(),
            plugin,
            abi: None,
            entry: entry.to_string(),
            params: Params::new(),
            nranks,
            layout: Layout::Processes,
            env: Vec::new(),
            join: None,
            nodes: Vec::new(),
            surroundings: Vec::new(),
            library_dir: None,
            nofile: None,
            victims: Vec::new(),
            timeout: Duration::from_secs(60),
            tidy: true,
            interrupt: None,
        }
    }

    fn spec(&self, ranks: &[usize]) -> String {
        let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        let mut p = self.params.clone();
        p.set("driver.plugin", self.plugin.display());
        p.set("driver.entry", &self.entry);
        p.set("driver.nranks", self.nranks);
        p.set("driver.ranks", list.join(","));
        if let Some(v) = self.abi {
            p.set("driver.abi", v);
        }
        if let Some(n) = self.join {
            p.set("driver.join", n);
        }
        if let Some(n) = self.nofile {
            p.set("driver.nofile", n);
        }
        if let Some(r) = ranks.first() {
            p.set("driver.place", self.place(*r));
        }
        p.encode()
    }

    /// How many ranks before this one are on its machine.
    fn place(&self, rank: usize) -> usize {
        let machine = |r: usize| match self.nodes.iter().cycle().nth(r) {
            Some(Node::Agent(a)) => a.rsplit_once(':').map(|(host, _)| host),
            _ => None,
        };
        (0..rank).filter(|r| machine(*r) == machine(rank)).count()
    }

    /// Starts the ranks and waits for them. `up` gets what they report while they run.
    pub fn run(&self, up: &mut dyn FnMut(usize, Vec<u8>)) -> Result<()> {
        if !self.tidy {
            return self.run_in(None, up);
        }
        let scratch = Scratch::new()?;
        let before = Leftovers::look();
        let result = self.run_in(Some(&scratch), up);
        let left = scratch.close();
        result?;
        if let Some(text) = left {
            return Err(Error::new(text));
        }
        match before.what_is_new() {
            Some(text) => Err(Error::new(text)),
            None => Ok(()),
        }
    }

    fn run_in(&self, scratch: Option<&Scratch>, up: &mut dyn FnMut(usize, Vec<u8>)) -> Result<()> {
        let groups: Vec<Vec<usize>> = match self.layout {
            Layout::Processes => (0..self.nranks).map(|r| vec![r]).collect(),
            Layout::Threads => vec![(0..self.nranks).collect()],
        };
        let (events_tx, events) = mpsc::channel();
        let mut run = Run {
            processes: Vec::new(),
            ranks: (0..self.nranks).map(|_| RankState::default()).collect(),
            victims: self.victims.clone(),
        };
        for (i, ranks) in groups.into_iter().enumerate() {
            let p = self.spawn(i, ranks, scratch, events_tx.clone())?;
            run.processes.push(p);
        }
        drop(events_tx);
        run.supervise(events, self, up);
        run.verdict()
    }

    fn spawn(
        &self,
        index: usize,
        ranks: Vec<usize>,
        scratch: Option<&Scratch>,
        events: mpsc::Sender<Event>,
    ) -> Result<Process> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(&self.exe);
        command
            .args(&self.args)
            .env(RANK_VAR, "1")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        if let Some(s) = scratch {
            command.env("TMPDIR", &s.path);
        }
        for (k, v) in &self.env {
            match k.split_once('@') {
                None => drop(command.env(k, v)),
                Some((k, only)) if only == index.to_string() => drop(command.env(k, v)),
                Some(_) => {}
            }
        }
        if let Some(dir) = &self.library_dir {
            let mut path = dir.clone().into_os_string();
            if let Some(old) = std::env::var_os("LD_LIBRARY_PATH") {
                path.push(":");
                path.push(old);
            }
            command.env("LD_LIBRARY_PATH", path);
        }
        let mut around = self.surroundings.get(index).cloned().unwrap_or_default();
        match self.nodes.iter().cycle().nth(index) {
            None | Some(Node::Here) => {}
            Some(Node::Namespace(name)) => around.network = Some(name.clone()),
            Some(Node::Agent(address)) => {
                command.env(AGENT_VAR, address);
            }
        }
        let mut child = around
            .spawn(&mut command)
            .context(|| format!("cannot start a rank as {}", self.exe.display()))?;
        drop(command);
        let mut writer = ours.try_clone()?;
        let spec = Frame {
            kind: Kind::Spec,
            from: oob::PARENT,
            to: oob::PARENT,
            payload: self.spec(&ranks).into_bytes(),
        };
        oob::write_frame(&mut writer, &spec).context(|| "a rank ended before it began")?;

        let mut reader = ours;
        let frames = events.clone();
        std::thread::spawn(move || {
            while let Ok(Some(f)) = oob::read_frame(&mut reader) {
                if frames.send(Event::Frame(f)).is_err() {
                    return;
                }
            }
            let _ = frames.send(Event::End(index));
        });
        let stderr = Arc::new(Mutex::new(Vec::new()));
        if let Some(mut pipe) = child.stderr.take() {
            let keep = stderr.clone();
            let show = std::env::var_os("VCCL_DRIVER_LOG").is_some();
            std::thread::spawn(move || {
                let mut piece = [0u8; 4096];
                while let Ok(n) = pipe.read(&mut piece) {
                    if n == 0 {
                        break;
                    }
                    if show {
                        eprint!("{}", String::from_utf8_lossy(&piece[..n]));
                    }
                    let mut kept = keep.lock().unwrap_or_else(|e| e.into_inner());
                    kept.extend_from_slice(&piece[..n]);
                    if kept.len() > 64 * 1024 {
                        let surplus = kept.len() - 32 * 1024;
                        kept.drain(..surplus);
                    }
                }
            });
        }
        Ok(Process {
            child,
            writer,
            ranks,
            stderr,
            status: None,
            hung: false,
        })
    }
}

enum Event {
    Frame(Frame),
    End(usize),
}

struct Process {
    child: Child,
    writer: UnixStream,
    ranks: Vec<usize>,
    stderr: Arc<Mutex<Vec<u8>>>,
    status: Option<ExitStatus>,
    hung: bool,
}

#[derive(Default)]
struct RankState {
    last: String,
    result: Option<Result<()>>,
}

struct Run {
    processes: Vec<Process>,
    ranks: Vec<RankState>,
    victims: Vec<usize>,
}

impl Drop for Run {
    fn drop(&mut self) {
        for p in &mut self.processes {
            if p.status.is_none() {
                let _ = p.child.kill();
                let _ = p.child.wait();
            }
        }
    }
}

impl Run {
    fn supervise(
        &mut self,
        events: mpsc::Receiver<Event>,
        launch: &Launch,
        up: &mut dyn FnMut(usize, Vec<u8>),
    ) {
        let mut failed = false;
        let mut deadline = Instant::now() + launch.timeout;
        while self.processes.iter().any(|p| p.status.is_none()) {
            let left = deadline.saturating_duration_since(Instant::now());
            match events.recv_timeout(left.min(Duration::from_millis(100))) {
                Ok(Event::Frame(f)) => self.frame(f, up),
                Ok(Event::End(i)) => self.reap(i),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    for i in 0..self.processes.len() {
                        self.reap(i);
                    }
                }
            }
            if !failed && self.any_failed() {
                failed = true;
                deadline = deadline.min(Instant::now() + GRACE);
            }
            let interrupted = launch.interrupt.is_some_and(|i| i.load(Ordering::Relaxed));
            if Instant::now() >= deadline || interrupted {
                self.stop(&if interrupted {
                    "was interrupted".to_string()
                } else if failed {
                    "was stopped because another rank had failed".to_string()
                } else {
                    format!("did not end within {:?} and was killed", launch.timeout)
                });
                return;
            }
        }
        // What was still on the way when the last process ended.
        while let Ok(Event::Frame(f)) = events.recv_timeout(Duration::from_millis(20)) {
            self.frame(f, up);
        }
    }

    fn any_failed(&self) -> bool {
        let by_word = |r: &RankState| matches!(&r.result, Some(Err(e)) if !e.is_skip());
        self.ranks.iter().any(by_word)
            || self.processes.iter().any(|p| {
                p.status.is_some_and(|s| !s.success())
                    && !p.ranks.iter().any(|r| self.victims.contains(r))
            })
    }

    fn frame(&mut self, f: Frame, up: &mut dyn FnMut(usize, Vec<u8>)) {
        let from = f.from as usize;
        match f.kind {
            Kind::Data => {
                let to = f.to as usize;
                if let Some(p) = self.processes.iter_mut().find(|p| p.ranks.contains(&to)) {
                    // A rank that is gone reads no more; the sender learns of that by itself.
                    let _ = oob::write_frame(&mut p.writer, &f);
                }
            }
            Kind::State => {
                if let Some(r) = self.ranks.get_mut(from) {
                    r.last = String::from_utf8_lossy(&f.payload).into_owned();
                }
            }
            Kind::Done => {
                let text = String::from_utf8_lossy(f.payload.get(1..).unwrap_or(&[])).into_owned();
                if let Some(r) = self.ranks.get_mut(from) {
                    r.result = Some(match f.payload.first() {
                        Some(0) => Ok(()),
                        Some(2) => Err(Error::skip(text)),
                        _ => Err(Error::new(text)),
                    });
                }
            }
            Kind::Up => up(from, f.payload),
            Kind::Spec | Kind::Gone => {}
            Kind::Start | Kind::Stderr | Kind::Exit | Kind::Stop => {}
        }
    }

    fn reap(&mut self, index: usize) {
        let p = &mut self.processes[index];
        if p.status.is_some() {
            return;
        }
        p.status = p.child.wait().ok();
        let gone = p.ranks.clone();
        for rank in gone {
            for (i, other) in self.processes.iter_mut().enumerate() {
                if i != index && other.status.is_none() {
                    let f = Frame {
                        kind: Kind::Gone,
                        from: rank as u32,
                        to: oob::PARENT,
                        payload: Vec::new(),
                    };
                    let _ = oob::write_frame(&mut other.writer, &f);
                }
            }
        }
    }

    fn stop(&mut self, why: &str) {
        for i in 0..self.processes.len() {
            let p = &mut self.processes[i];
            if p.status.is_some() {
                continue;
            }
            let threads = thread_report(p.child.id());
            p.hung = true;
            let _ = p.child.kill();
            p.status = p.child.wait().ok();
            for rank in p.ranks.clone() {
                let r = &mut self.ranks[rank];
                if r.result.is_none() {
                    let last = if r.last.is_empty() {
                        "nothing reported"
                    } else {
                        &r.last
                    };
                    r.result = Some(Err(Error::new(format!(
                        "{why}; last state: {last}; threads: {threads}"
                    ))));
                }
            }
        }
    }

    fn verdict(&self) -> Result<()> {
        let mut failures = Vec::new();
        let mut skipped = None;
        for p in &self.processes {
            let Some(status) = p.status else {
                failures.push(format!("rank {:?}: its end was not seen", p.ranks));
                continue;
            };
            let victim = p.ranks.iter().any(|r| self.victims.contains(r));
            let mut told = false;
            for rank in &p.ranks {
                match &self.ranks[*rank].result {
                    Some(Err(e)) if e.is_skip() => skipped = Some(e.clone()),
                    Some(Err(e)) => {
                        told = true;
                        failures.push(format!("rank {rank}: {e}"));
                    }
                    Some(Ok(())) if victim => {
                        told = true;
                        failures.push(format!("rank {rank} should have died and did not"));
                    }
                    Some(Ok(())) | None => {}
                }
            }
            let expected = if victim {
                status.signal() == Some(libc::SIGKILL)
            } else {
                status.success()
            };
            if !expected && !told && !p.hung {
                let last: Vec<&str> = p
                    .ranks
                    .iter()
                    .map(|r| self.ranks[*r].last.as_str())
                    .collect();
                failures.push(format!(
                    "rank {:?} ended with {}; last state: {}",
                    p.ranks,
                    describe(status),
                    last.join(" / ")
                ));
            }
            if !expected || told {
                let kept = p.stderr.lock().unwrap_or_else(|e| e.into_inner());
                let text = String::from_utf8_lossy(&kept);
                let lines: Vec<&str> = text.lines().collect();
                for l in &lines[lines.len().saturating_sub(12)..] {
                    failures.push(format!("  stderr of rank {:?}: {l}", p.ranks));
                }
            }
            if status.success() && p.ranks.iter().any(|r| self.ranks[*r].result.is_none()) {
                failures.push(format!("rank {:?} ended without a result", p.ranks));
            }
        }
        if !failures.is_empty() {
            return Err(Error::new(failures.join("\n")));
        }
        match skipped {
            Some(e) => Err(e),
            None => Ok(()),
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(s) => {
            let name = match s {
                libc::SIGSEGV => "SIGSEGV",
                libc::SIGABRT => "SIGABRT",
                libc::SIGBUS => "SIGBUS",
                libc::SIGILL => "SIGILL",
                libc::SIGFPE => "SIGFPE",
                libc::SIGKILL => "SIGKILL",
                libc::SIGTERM => "SIGTERM",
                libc::SIGINT => "SIGINT",
                libc::SIGPIPE => "SIGPIPE",
                _ => return format!("signal {s}"),
            };
            format!("signal {name}")
        }
        None => format!("exit status {}", status.code().unwrap_or(-1)),
    }
}

/// What the threads of a process are doing, as far as the kernel tells.
fn thread_report(pid: u32) -> String {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return "unknown".into();
    };
    let read = |p: &std::path::Path, f: &str| {
        std::fs::read_to_string(p.join(f))
            .unwrap_or_default()
            .trim()
            .to_string()
    };
    let mut out: Vec<String> = tasks
        .flatten()
        .map(|t| {
            let p = t.path();
            let state = read(&p, "stat");
            let state = state
                .rsplit(')')
                .next()
                .unwrap_or("")
                .split_whitespace()
                .next()
                .map_or(String::new(), |s| match s {
                    "R" => "running".into(),
                    "S" => "sleeping".into(),
                    other => other.to_string(),
                });
            let wchan = read(&p, "wchan");
            let wchan = if wchan == "0" || wchan.is_empty() {
                String::new()
            } else {
                format!(" in {wchan}")
            };
            format!("{} {state}{wchan}", read(&p, "comm"))
        })
        .collect();
    out.sort();
    out.dedup();
    out.join(", ")
}

/// A folder for the ranks' temporary files, which must be empty when they are gone.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn new() -> Result<Scratch> {
        use std::sync::atomic::AtomicU32;
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("vccl-run-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&path).context(|| format!("cannot make {}", path.display()))?;
        Ok(Scratch { path })
    }

    fn close(&self) -> Option<String> {
        let names: Vec<String> = std::fs::read_dir(&self.path)
            .map(|d| {
                d.flatten()
                    .map(|e| e.file_name().to_string_lossy().into_owned())
                    .collect()
            })
            .unwrap_or_default();
        let _ = std::fs::remove_dir_all(&self.path);
        (!names.is_empty())
            .then(|| format!("the ranks left files in their TMPDIR: {}", names.join(", ")))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Names that outlive a process: files in /dev/shm, and unix sockets.
struct Leftovers {
    shm: Vec<String>,
    sockets: HashMap<String, Vec<u64>>,
}

impl Leftovers {
    fn look() -> Leftovers {
        Leftovers {
            shm: shm_names(),
            sockets: named_sockets(),
        }
    }

    /// What is there now and was not before, and belongs to no living process. Other programs use
    /// both places too: what one of them holds open is no leftover, and what goes away within a
    /// moment is none either.
    fn what_is_new(&self) -> Option<String> {
        let mut text = None;
        for attempt in 0..12 {
            if attempt > 0 {
                std::thread::sleep(Duration::from_millis(250));
            }
            let mut new: Vec<String> = shm_names()
                .into_iter()
                .filter(|n| !self.shm.contains(n) && !held(&format!("/dev/shm/{n}")))
                .map(|n| format!("/dev/shm/{n}"))
                .collect();
            for (name, inodes) in named_sockets() {
                let alive = || inodes.iter().any(|i| held(&format!("socket:[{i}]")));
                if !self.sockets.contains_key(&name) && !alive() {
                    new.push(format!("unix socket {name}"));
                }
            }
            if new.is_empty() {
                return None;
            }
            new.sort();
            text = Some(format!("the run left behind: {}", new.join(", ")));
        }
        text
    }
}

fn shm_names() -> Vec<String> {
    std::fs::read_dir("/dev/shm")
        .map(|d| {
            d.flatten()
                .map(|e| e.file_name().to_string_lossy().into_owned())
                .collect()
        })
        .unwrap_or_default()
}

/// The inodes of every named socket: a listener's connections have its name too, and those that it has
/// not accepted yet belong to nobody.
fn named_sockets() -> HashMap<String, Vec<u64>> {
    let text = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let mut sockets: HashMap<String, Vec<u64>> = HashMap::new();
    for l in text.lines().skip(1) {
        let mut fields = l.split_whitespace();
        if let (Some(Ok(inode)), Some(name)) = (fields.nth(6).map(str::parse), fields.next()) {
            sockets.entry(name.to_string()).or_default().push(inode);
        }
    }
    sockets
}

/// Whether a living process has that file open or mapped.
fn held(target: &str) -> bool {
    let Ok(all) = std::fs::read_dir("/proc") else {
        return false;
    };
    for p in all.flatten() {
        let path = p.path();
        if !p
            .file_name()
            .to_string_lossy()
            .bytes()
            .all(|b| b.is_ascii_digit())
        {
            continue;
        }
        let open = std::fs::read_dir(path.join("fd")).is_ok_and(|fds| {
            fds.flatten()
                .any(|f| std::fs::read_link(f.path()).is_ok_and(|l| l.to_string_lossy() == target))
        });
        if open
            || std::fs::read_to_string(path.join("maps"))
                .is_ok_and(|m| m.lines().any(|l| l.ends_with(target)))
        {
            return true;
        }
    }
    false
}
