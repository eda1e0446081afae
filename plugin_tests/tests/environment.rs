//! The plugin in the surroundings that jobs give to ranks: containers with namespaces of their own,
//! small limits, permuted or missing GPUs, peers that are stopped or that leave children behind.

mod support;

use std::io::Write;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use plugin_tests::conformance;
use plugin_tests::conformance::util::{
    close_listen, connect_within, error_within, is_remote, listen, memory, recv, remote_error_of,
    remote_error_of_send, NOBODY_LIMIT, REMOTE_LIMIT,
};
use plugin_tests::error::{Context, Result};
use plugin_tests::exchange::simple;
use plugin_tests::launch::Launch;
use plugin_tests::memory::Kind;
use plugin_tests::rank::{close_limit, enter_if_rank, Ctx, Entry, Link};
use plugin_tests::surroundings::{Mount, Namespace, Surroundings, CAP_IPC_LOCK};
use plugin_tests::{ensure, fail, logs};
use vccl::abi::types::{NCCL_PTR_CUDA, NCCL_PTR_HOST};

use support::{launch, log_of, must_pass, named, not_run, on_double, report_log, reported, run};

fn find(name: &str) -> Option<Entry> {
    Some(match name {
        "unreachable" => unreachable_listener,
        "dead_listener" => dead_listener,
        "move_data" => move_data,
        "no_driver" => no_driver,
        "fork_and_die" => fork_and_die,
        "stopped_peer" => stopped_peer,
        _ => return conformance::find(name),
    })
}

/// Cases of the conformance groups `setup` and `data`, in little time.
const CASES: [&str; 6] = [
    "properties",
    "connect_before_accept",
    "unused_listeners",
    "many_listeners",
    "send_smaller",
    "bidirectional",
];

/// Host memory, and GPU memory on the double.
const KINDS: [Kind; 2] = [Kind::Malloc, Kind::Vmm];

fn case(name: &str) -> &'static conformance::Case {
    conformance::cases()
        .find(|c| c.name == name)
        .expect("a case of that name")
}

fn cases_pass(change: impl Fn(&mut Launch)) {
    for kind in KINDS {
        for name in CASES {
            let mut l = launch(name, case(name).nranks, kind, kind);
            change(&mut l);
            must_pass(&l);
        }
    }
}

fn cases_pass_in(each: &[Surroundings]) {
    cases_pass(|l| l.surroundings = each.to_vec());
}

fn pid_namespaces_of_their_own() {
    let own = Surroundings::with_namespaces(&[Namespace::Pid]);
    // Both ranks are process 1 of their namespaces.
    cases_pass_in(&[own.clone(), own.clone()]);
    // One of them sees the other, and not the reverse.
    for around in [
        vec![own.clone(), Surroundings::default()],
        vec![Surroundings::default(), own],
    ] {
        let mut l = launch("bidirectional", 2, Kind::Vmm, Kind::Vmm);
        l.surroundings = around;
        must_pass(&l);
    }
}

fn ipc_namespaces_of_their_own() {
    let own = Surroundings::with_namespaces(&[Namespace::Ipc]);
    cases_pass_in(&[own.clone(), own]);
}

fn dev_shm_of_one_mib_each() {
    let own = Surroundings {
        mounts: vec![Mount::Tmpfs("/dev/shm".into(), 1 << 20)],
        ..Surroundings::with_namespaces(&[Namespace::Mount])
    };
    cases_pass_in(&[own.clone(), own]);
}

/// As in containers that share nothing but the network.
fn all_namespaces_but_the_network_of_their_own() {
    let own = Surroundings {
        host_name: Some("node".into()),
        mounts: vec![Mount::Tmpfs("/dev/shm".into(), 1 << 20)],
        ..Surroundings::with_namespaces(&[
            Namespace::Pid,
            Namespace::Ipc,
            Namespace::Uts,
            Namespace::Mount,
        ])
    };
    let other = Surroundings {
        host_name: Some("another".into()),
        ..own.clone()
    };
    // Equal names and different ones: names decide nothing.
    cases_pass_in(&[own.clone(), own.clone()]);
    cases_pass_in(&[own, other]);
}

/// Rank 1 listens where rank 0 cannot reach it.
fn unreachable_listener(ctx: &mut Ctx) -> Result<()> {
    if ctx.rank == 1 {
        let (handle, l) = listen(ctx)?;
        ctx.oob.send(0, handle.0)?;
        ensure!(ctx.oob.recv(0)? == b"over", "out of step");
        let nobody = ctx.service(|net| net.accept(l))?;
        ensure!(nobody.is_none(), "accept gave a comm");
        return close_listen(ctx, l);
    }
    let mut handle = ctx.recv_handle(1)?;
    let mark = logs::mark();
    let start = Instant::now();
    let e = match connect_within(ctx, &mut handle, NOBODY_LIMIT) {
        Err(e) => e,
        Ok(Some(_)) => fail!("connect reached a listener of another network namespace"),
        Ok(None) => fail!("connect still gives NULL after {NOBODY_LIMIT:?}"),
    };
    is_remote("connect", &e)?;
    ctx.oob
        .up(format!("took {}", start.elapsed().as_millis()))?;
    report_log(ctx, mark)?;
    ctx.oob.send(1, b"over".to_vec())
}

fn refusal_names_the_network(each: &[Surroundings]) {
    for kind in KINDS {
        let mut l = launch("unreachable", 2, kind, kind);
        l.surroundings = each.to_vec();
        let reports = must_pass(&l);
        let warnings = log_of(&reports, Some(0), true);
        assert_eq!(warnings.len(), 1, "one warning for one error: {warnings:?}");
        assert!(
            warnings[0].contains("network namespace") && warnings[0].contains("--network=host"),
            "it names neither cause nor cure: {warnings:?}"
        );
    }
}

fn network_namespaces_give_a_clear_error() {
    let own = Surroundings::with_namespaces(&[Namespace::Net]);
    refusal_names_the_network(&[own.clone(), own.clone()]);
    refusal_names_the_network(&[own]);
}

/// Two hosts of one name, as far as one machine can play them.
fn equal_host_names_make_no_common_host() {
    let own = Surroundings {
        host_name: Some("node".into()),
        ..Surroundings::with_namespaces(&[Namespace::Uts, Namespace::Net, Namespace::Ipc])
    };
    refusal_names_the_network(&[own.clone(), own]);
}

/// Rank 1 listens, and its listener is closed, or all of it dies, before rank 0 connects.
fn dead_listener(ctx: &mut Ctx) -> Result<()> {
    if ctx.rank == 1 {
        let (handle, l) = listen(ctx)?;
        let (other, other_listener) = listen(ctx)?;
        close_listen(ctx, l)?;
        ctx.oob.send(0, handle.0)?;
        ctx.oob.send(0, other.0)?;
        ensure!(ctx.oob.recv(0)? == b"first", "out of step");
        let _kept_until_death = other_listener;
        die();
    }
    for which in ["closed", "dead"] {
        let mut handle = ctx.recv_handle(1)?;
        if which == "dead" {
            ctx.oob.wait_gone(1)?;
        }
        let mark = logs::mark();
        let e = match connect_within(ctx, &mut handle, NOBODY_LIMIT) {
            Err(e) => e,
            Ok(c) => fail!("connect to a {which} listener gave {c:?}"),
        };
        is_remote("connect", &e)?;
        let n = logs::warnings_since(mark).len();
        ensure!(n == 1, "{n} warnings for one error");
        ctx.oob.up(format!("{which} {e}"))?;
        if which == "closed" {
            // The second handle was sent before the death, and is in the box.
            ctx.oob.send(1, b"first".to_vec())?;
        }
    }
    Ok(())
}

fn die() -> ! {
    // SAFETY: the signal goes to this very process.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn a_listener_that_is_gone_gives_a_clear_error() {
    for kind in KINDS {
        let mut l = launch("dead_listener", 2, kind, kind);
        l.victims = vec![1];
        let reports = must_pass(&l);
        let closed = reported(&reports, 0, "closed").expect("a report");
        assert!(closed.contains("was closed"), "{closed}");
        let dead = reported(&reports, 0, "dead").expect("a report");
        assert!(
            dead.contains("cannot be reached") || dead.contains("is gone"),
            "{dead}"
        );
    }
}

/// Data both ways in several sizes, with the log for the caller.
fn move_data(ctx: &mut Ctx) -> Result<()> {
    let mark = logs::mark();
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    for (i, size) in [1, 70_000, 300_001].into_iter().enumerate() {
        simple(ctx, &links, 10, size, i as u64)?;
    }
    ctx.close(&links)?;
    if let Ok(double) = cuda_double::control::Control::find() {
        let local = double.counter("local_copies");
        ctx.oob.up(format!("local {local}"))?;
    }
    report_log(ctx, mark)
}

/// What each rank sees, how many devices there are, and whether the ranks end up on one of them. Rank
/// 1 uses the second device that it sees, if there is one.
const VISIBLE: [([&str; 2], usize, bool); 7] = [
    (["1,0", "1,0"], 2, false),
    (["0", "1"], 2, false),
    (["1", "0"], 2, false),
    (["1,0", "0,1"], 2, true),
    (["3,1,0,2", "0,2,3,1"], 4, false),
    (["2,0,1", "1,0"], 3, false),
    (["3,2", "0,3"], 4, true),
];

fn permuted_visible_devices() {
    for (visible, devices, same) in VISIBLE {
        for kind in [Kind::Vmm, Kind::Cuda] {
            let mut l = launch("move_data", 2, kind, kind);
            l.env.clear();
            on_double(&mut l, devices);
            if same {
                l.env.push(("VCCL_DOUBLE_ALLOW_LOCAL".into(), "1".into()));
            }
            l.surroundings = visible
                .iter()
                .map(|v| Surroundings::default().with_env("CUDA_VISIBLE_DEVICES", v))
                .collect();
            // That no rule was broken, and no copy was local among them, is checked by each rank.
            let reports = must_pass(&l);
            let warned = log_of(&reports, None, true)
                .iter()
                .any(|w| w.contains("both ranks use GPU"));
            assert_eq!(warned, same, "{visible:?}: {reports:?}");
            for rank in 0..2 {
                let local: u64 = reported(&reports, rank, "local")
                    .and_then(|n| n.parse().ok())
                    .expect("a count");
                assert_eq!(
                    local > 0,
                    same,
                    "{visible:?}, rank {rank}: {local} local copies"
                );
            }
            assert!(
                log_of(&reports, None, false)
                    .iter()
                    .any(|w| w.contains("pushed straight")),
                "{visible:?}: {reports:?}"
            );
        }
    }
}

fn limits_of_open_files() {
    cases_pass(|l| l.nofile = Some(1024));
    for name in CASES {
        let case = case(name);
        for kind in KINDS {
            // There the application's own buffers on the double, a descriptor each, are too many.
            if kind == Kind::Malloc || name != "many_listeners" {
                let mut l = launch(name, case.nranks, kind, kind);
                l.nofile = Some(64);
                must_pass(&l);
            }
        }
    }
}

/// So few that the plugin cannot get what it needs: an error that says so, and no hang.
fn too_few_open_files_are_named() {
    let mut named = 0;
    for soft in 7..24 {
        let mut l = launch("move_data", 2, Kind::Malloc, Kind::Malloc);
        // The limit is in force from before the plugin's first call.
        l.nofile = Some(soft);
        l.timeout = Duration::from_secs(20);
        let start = Instant::now();
        let (result, _) = run(&l);
        assert!(start.elapsed() < Duration::from_secs(10), "limit {soft}");
        if let Err(e) = result {
            let text = e.to_string();
            // What fails before the plugin is there is no matter of the plugin's.
            if text.contains("vccl:") {
                assert!(
                    text.contains("EMFILE") || text.contains("ulimit -n"),
                    "limit {soft}: {text}"
                );
                assert!(
                    !text.contains("another host") && !text.contains("another network namespace"),
                    "limit {soft} is blamed on where the other rank is: {text}"
                );
                named += 1;
            }
        }
    }
    assert!(named > 0, "no limit made the plugin say anything");
}

fn little_locked_memory() {
    let small = Surroundings {
        limits: vec![(libc::RLIMIT_MEMLOCK, 4096)],
        without_capabilities: if nix::unistd::geteuid().is_root() {
            vec![CAP_IPC_LOCK]
        } else {
            Vec::new()
        },
        ..Surroundings::default()
    };
    cases_pass(|l| l.surroundings = vec![small.clone(); 2]);
}

fn a_read_only_tmp() {
    let tmp = std::env::temp_dir();
    let own = Surroundings {
        mounts: vec![Mount::ReadOnly(tmp.clone()), Mount::ReadOnly("/tmp".into())],
        ..Surroundings::with_namespaces(&[Namespace::Mount])
    }
    .with_env("TMPDIR", "/tmp");
    cases_pass_in(&[own.clone(), own]);
}

fn a_full_tmp() {
    // In place of the folder for temporary files.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().to_path_buf();
    let own = Surroundings {
        mounts: vec![Mount::Full(path.clone())],
        ..Surroundings::with_namespaces(&[Namespace::Mount])
    }
    .with_env("TMPDIR", path.to_str().expect("a plain path"));
    cases_pass_in(&[own.clone(), own]);
}

fn no_home_and_an_odd_locale() {
    let odd = |locale: &str| {
        let mut s = Surroundings::default()
            .with_env("LC_ALL", locale)
            .with_env("LANG", locale)
            .with_env("TZ", "no such zone");
        for gone in ["HOME", "USER", "LOGNAME", "PATH", "TERM"] {
            s.env.push((gone.into(), None));
        }
        s
    };
    cases_pass(|l| l.surroundings = vec![odd("tr_TR.ISO-8859-9"), odd("\u{1f980}")]);
}

/// No GPU: host memory goes, GPU memory is refused with a reason.
fn no_driver(ctx: &mut Ctx) -> Result<()> {
    let p = ctx.session.properties(ctx.dev)?;
    ensure!(
        p.ptr_support & NCCL_PTR_HOST != 0 && p.ptr_support & NCCL_PTR_CUDA == 0,
        "without a driver ptrSupport is {}",
        p.ptr_support
    );
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    simple(ctx, &links, 10, 100_000, 0)?;
    for link in &links {
        let buffer = ctx.buffer(link, 4096)?;
        let mark = logs::mark();
        let e = match ctx.service(|net| net.reg_mr_as(link.comm, &buffer, 0, 4096, NCCL_PTR_CUDA)) {
            Ok(_) => fail!("GPU memory was registered without a driver"),
            Err(e) => e,
        };
        ensure!(e.code().is_some(), "{e}");
        let n = logs::warnings_since(mark).len();
        ensure!(n == 1, "{n} warnings for one error");
        ctx.oob.up(format!("refused {e}"))?;
    }
    simple(ctx, &links, 10, 5_000, 1).context(|| "after the refused registration")?;
    ctx.close(&links)
}

fn no_driver_at_all() {
    // A file that is no library: also where a driver is installed, the loader finds this one first.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut f = std::fs::File::create(folder.path().join("libcuda.so.1")).expect("a file");
    f.write_all(&[b'x'; 4096]).expect("written");
    drop(f);
    let mut l = launch("no_driver", 2, Kind::Malloc, Kind::Malloc);
    l.library_dir = Some(folder.path().to_path_buf());
    without_driver(&l, "no CUDA driver (libcuda.so.1)");
}

fn a_driver_that_cannot_start() {
    for (code, name) in [(100, "CUDA_ERROR_NO_DEVICE"), (999, "CUDA_ERROR_UNKNOWN")] {
        let mut l = launch("no_driver", 2, Kind::Malloc, Kind::Malloc);
        on_double(&mut l, 2);
        l.env
            .push(("VCCL_DOUBLE_FAIL".into(), format!("cuInit:*:{code}")));
        without_driver(&l, name);
    }
    let mut l = launch("no_driver", 2, Kind::Malloc, Kind::Malloc);
    on_double(&mut l, 2);
    l.env.push(("CUDA_VISIBLE_DEVICES".into(), String::new()));
    without_driver(&l, "");
}

fn without_driver(l: &Launch, why: &str) {
    let reports = must_pass(l);
    for rank in 0..2 {
        let text = reported(&reports, rank, "refused").expect("a refusal");
        assert!(
            text.contains("registered as GPU memory") && text.contains(why),
            "{text}"
        );
    }
}

/// Rank 1 leaves a child with all its descriptors behind when it is killed.
fn fork_and_die(ctx: &mut Ctx) -> Result<()> {
    let mut links = ctx.connect(&[(0, 1), (1, 0)])?;
    simple(ctx, &links, 4, 10_000, 0)?;
    links.sort_by_key(|l| !l.sends());
    let (out, inn) = (links[0], links[1]);
    let (_a, out_reg) = memory(ctx, &out, 4_096)?;
    let (_b, in_reg) = memory(ctx, &inn, 4_096)?;
    let posted = recv(ctx, &inn, &in_reg, 0, 4_096, 0)?;
    if ctx.rank == 1 {
        let word = ctx.oob.recv(0)?;
        let survivor: i32 = String::from_utf8_lossy(&word)
            .parse()
            .map_err(|_| plugin_tests::error::Error::new("not a process number"))?;
        leave_child(survivor)?;
        die();
    }
    ctx.oob.send(1, std::process::id().to_string())?;
    ctx.oob.wait_gone(1)?;
    ensure!(
        remote_error_of(ctx, "a receive from a rank whose child lives on", posted)?,
        "it completed"
    );
    remote_error_of_send(ctx, &out, &out_reg)?;
    ctx.deregister(vec![out_reg, in_reg])?;
    ctx.close(&[out, inn])
}

/// Forks a child that holds this process's descriptors until `survivor` is gone, all but those by
/// which the run itself notices that this process has ended.
fn leave_child(survivor: i32) -> Result<()> {
    // SAFETY: the child makes system calls only, and never returns.
    match unsafe { libc::fork() } {
        -1 => fail!("fork: {}", std::io::Error::last_os_error()),
        0 => loop {
            for fd in 0..256 {
                let is = |what: libc::c_int, value: libc::c_int| {
                    let mut found: libc::c_int = 0;
                    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
                    let place = (&raw mut found).cast();
                    // SAFETY: both places live through the call; it fails for what is no socket.
                    let r =
                        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, what, place, &mut len) };
                    r == 0 && found == value
                };
                let run =
                    is(libc::SO_TYPE, libc::SOCK_STREAM) && is(libc::SO_DOMAIN, libc::AF_UNIX);
                if run || fd <= 2 {
                    // SAFETY: the child owns all of its descriptors, and uses none.
                    unsafe { libc::close(fd) };
                }
            }
            // SAFETY: asks whether the process exists; ends only this process.
            unsafe {
                libc::usleep(20_000);
                if libc::kill(survivor, 0) != 0 {
                    libc::_exit(0);
                }
            }
        },
        _ => Ok(()),
    }
}

fn a_child_that_outlives_its_rank_hides_no_death() {
    for kind in KINDS {
        for transport in ["copy_engine", "tcp"] {
            let mut l = launch("fork_and_die", 2, kind, kind);
            l.victims = vec![1];
            l.env.push(("VCCL_TRANSPORT".into(), transport.into()));
            must_pass(&l);
        }
    }
}

/// Stops rank 1's process, or lets it go on.
fn signal(pid: i32, signal: nix::sys::signal::Signal) -> Result<()> {
    Ok(nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid),
        signal,
    )?)
}

/// Ends a stopped peer's stop, whatever happens.
struct Stopped(i32);

impl Stopped {
    fn new(pid: i32) -> Result<Stopped> {
        signal(pid, nix::sys::signal::Signal::SIGSTOP)?;
        // All of its threads, one after the other.
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))?;
            let running = tasks.flatten().any(|t| {
                std::fs::read_to_string(t.path().join("stat"))
                    .is_ok_and(|s| s.rsplit(')').next().is_some_and(|s| !s.starts_with(" T")))
            });
            if !running {
                return Ok(Stopped(pid));
            }
            ensure!(Instant::now() < end, "the peer does not stop");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = signal(self.0, nix::sys::signal::Signal::SIGCONT);
    }
}

/// Rank 1 is stopped while rank 0 closes one pair of connections with receives posted; rank 2 looks on.
fn stopped_peer(ctx: &mut Ctx) -> Result<()> {
    let links = ctx.connect(&[(0, 1), (1, 0), (0, 1), (1, 0), (0, 2), (2, 0)])?;
    simple(ctx, &links, 8, 20_000, 0)?;
    ctx.oob.barrier()?;
    let mut closing: Vec<Link> = links.iter().filter(|l| l.id < 2).copied().collect();
    closing.sort_by_key(|l| !l.sends());
    let with_1: Vec<Link> = links
        .iter()
        .filter(|l| l.id < 4 && l.id >= 2)
        .copied()
        .collect();
    let with_2: Vec<Link> = links.iter().filter(|l| l.id >= 4).copied().collect();
    match ctx.rank {
        0 => {
            let pid: i32 = String::from_utf8_lossy(&ctx.oob.recv(1)?)
                .parse()
                .map_err(|_| plugin_tests::error::Error::new("not a process number"))?;
            let (_a, out_reg) = memory(ctx, &closing[0], 300_000)?;
            let (_b, in_reg) = memory(ctx, &closing[1], 300_000)?;
            let (_c, idle_reg) = memory(ctx, &closing[1], 300_000)?;
            recv(ctx, &closing[1], &in_reg, 0, 300_000, 0)?;
            ctx.oob.send(1, b"stop me".to_vec())?;
            ensure!(ctx.oob.recv(1)? == b"ready", "out of step");
            let mark = logs::mark();
            let stop = Stopped::new(pid)?;
            // Within `CLOSE_LIMIT` each, or these fail.
            let start = Instant::now();
            ctx.deregister(vec![idle_reg])?;
            let first = logs::warnings_since(mark);
            ensure!(
                first.len() == 1 && first[0].contains("is it stopped"),
                "deregMr with a stopped peer gave these warnings: {first:?}"
            );
            ctx.deregister(vec![out_reg, in_reg])?;
            let mark = logs::mark();
            ctx.close(&closing)?;
            let last = logs::warnings_since(mark);
            ensure!(
                last.iter().filter(|w| w.contains("is it stopped")).count() == 1,
                "close with a stopped peer gave these warnings: {last:?}"
            );
            ensure!(
                start.elapsed() < 5 * close_limit(),
                "all in all {:?}",
                start.elapsed()
            );
            simple(ctx, &with_2, 8, 20_000, 1).context(|| "another peer meanwhile")?;
            drop(stop);
            ctx.oob.send(1, b"go on".to_vec())?;
            simple(ctx, &with_1, 8, 20_000, 2).context(|| "the peer's other connections")?;
            simple(ctx, &with_2, 8, 20_000, 3)?;
            // And new ones.
            let fresh = ctx.connect(&[(0, 1), (1, 0)])?;
            simple(ctx, &fresh, 8, 20_000, 4).context(|| "new connections")?;
            ctx.close(&fresh)?;
        }
        1 => {
            ctx.oob.send(0, std::process::id().to_string())?;
            let (_a, out_reg) = memory(ctx, &closing[0], 300_000)?;
            let (_b, in_reg) = memory(ctx, &closing[1], 300_000)?;
            let posted = recv(ctx, &closing[1], &in_reg, 0, 300_000, 0)?;
            ensure!(ctx.oob.recv(0)? == b"stop me", "out of step");
            ctx.oob.send(0, b"ready".to_vec())?;
            ensure!(ctx.oob.recv(0)? == b"go on", "out of step");
            remote_error_of(
                ctx,
                "a receive on a connection that the peer closed",
                posted,
            )?;
            let what = "a send on a connection that the peer closed";
            let c = plugin_tests::conformance::util::sender(&closing[0])?;
            let e = error_within(ctx, what, REMOTE_LIMIT, |io| {
                io.isend(c, &out_reg, 0, 300_000, 0).map(|_| ())
            })?;
            is_remote(what, &e)?;
            simple(ctx, &with_1, 8, 20_000, 2)?;
            let fresh = ctx.connect(&[(0, 1), (1, 0)])?;
            simple(ctx, &fresh, 8, 20_000, 4)?;
            ctx.close(&fresh)?;
            ctx.deregister(vec![out_reg, in_reg])?;
            ctx.close(&closing)?;
        }
        _ => {
            simple(ctx, &with_2, 8, 20_000, 1)?;
            simple(ctx, &with_2, 8, 20_000, 3)?;
            ctx.connect(&[(0, 1), (1, 0)])?;
        }
    }
    ctx.close(&with_1)?;
    ctx.close(&with_2)
}

fn a_stopped_peer_holds_nobody_up() {
    for kind in KINDS {
        must_pass(&launch("stopped_peer", 3, kind, kind));
    }
}

/// Both in the order of this file.
const TESTS: [(&str, fn()); 10] = named![
    a_listener_that_is_gone_gives_a_clear_error,
    permuted_visible_devices,
    limits_of_open_files,
    too_few_open_files_are_named,
    little_locked_memory,
    no_home_and_an_odd_locale,
    no_driver_at_all,
    a_driver_that_cannot_start,
    a_child_that_outlives_its_rank_hides_no_death,
    a_stopped_peer_holds_nobody_up,
];
const TESTS_IN_NAMESPACES: [(&str, fn()); 8] = named![
    pid_namespaces_of_their_own,
    ipc_namespaces_of_their_own,
    dev_shm_of_one_mib_each,
    all_namespaces_but_the_network_of_their_own,
    network_namespaces_give_a_clear_error,
    equal_host_names_make_no_common_host,
    a_read_only_tmp,
    a_full_tmp,
];

fn main() {
    enter_if_rank(find);
    let args = Arguments::from_args();
    let namespaces = Surroundings::with_namespaces(&[
        Namespace::Pid,
        Namespace::Ipc,
        Namespace::Uts,
        Namespace::Mount,
        Namespace::Net,
    ])
    .possible();
    if let Err(e) = &namespaces {
        assert!(!nix::unistd::geteuid().is_root(), "{e}");
        not_run(&args, e);
    }
    let trial = |(name, f): (&str, fn()), can: bool| {
        Trial::test(name, move || {
            f();
            Ok(())
        })
        .with_ignored_flag(!can)
    };
    let in_namespaces = TESTS_IN_NAMESPACES.map(|t| trial(t, namespaces.is_ok()));
    let tests = TESTS
        .map(|t| trial(t, true))
        .into_iter()
        .chain(in_namespaces);
    libtest_mimic::run(&args, tests.collect()).exit();
}
