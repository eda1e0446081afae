//! TCP over a network that fails: two ranks in two network namespaces, joined by a veth pair that goes down
//! or loses packets, and a peer that is stopped.
//!
//! Needs root and network namespaces. Where they cannot be made the tests are reported as ignored, not as
//! passed, and say why.

mod support;

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use plugin_tests::conformance::util::{is_remote, memory};
use plugin_tests::error::{Error, Result};
use plugin_tests::exchange::simple;
use plugin_tests::flow::{Flow, Message};
use plugin_tests::launch::Launch;
use plugin_tests::memory::Kind;
use plugin_tests::net::{Comm, Registered};
use plugin_tests::rank::{enter_if_rank, Ctx, Entry};
use plugin_tests::surroundings::Surroundings;
use plugin_tests::worker::Idle;
use plugin_tests::{ensure, fail};

/// What a dead host may take to be noticed: 30 s, and the time between two looks.
const DEAD: Duration = Duration::from_secs(50);

fn ip(args: &str) -> std::result::Result<(), String> {
    let out = Command::new("ip")
        .args(args.split(' '))
        .output()
        .map_err(|e| format!("ip: {e}"))?;
    match out.status.success() {
        true => Ok(()),
        false => Err(format!(
            "ip {args}: {}",
            String::from_utf8_lossy(&out.stderr).trim()
        )),
    }
}

/// Two network namespaces and a link between them, gone when dropped.
struct Net {
    names: [String; 2],
}

impl Net {
    fn new() -> std::result::Result<Net, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("vccl-test-{}-{n}-{side}", std::process::id());
        let net = Net {
            names: [name(0), name(1)],
        };
        let [a, b] = &net.names;
        ip(&format!("netns add {a}"))?;
        ip(&format!("netns add {b}"))?;
        ip(&format!(
            "link add veth0 netns {a} type veth peer name veth0 netns {b}"
        ))?;
        for (i, n) in net.names.iter().enumerate() {
            ip(&format!("-n {n} addr add 10.232.0.{}/24 dev veth0", i + 1))?;
            ip(&format!("-n {n} link set veth0 up"))?;
            ip(&format!("-n {n} link set lo up"))?;
        }
        // The kernel takes a moment to see that the link is up.
        std::thread::sleep(Duration::from_secs(2));
        Ok(net)
    }

    /// Takes the link down, or up again.
    fn set(&self, state: &str) {
        ip(&format!("-n {} link set veth0 {state}", self.names[0])).expect("the link changes");
    }

    /// Has every packet to the other side go to nobody, as where a firewall drops it, or no longer.
    fn vanish(&self, yes: bool) {
        for (i, n) in self.names.iter().enumerate() {
            let other = format!("10.232.0.{}", 2 - i);
            let how = match yes {
                true => format!(
                    "-n {n} neigh replace {other} lladdr 02:00:00:00:00:99 dev veth0 nud permanent"
                ),
                false => format!("-n {n} neigh del {other} dev veth0"),
            };
            ip(&how).expect("neighbours change");
        }
    }

    /// Has both sides lose, delay, reorder and duplicate packets.
    fn impair(&self) -> std::result::Result<(), String> {
        for n in &self.names {
            let done = Command::new("tc")
                .args(["-n", n, "qdisc", "add", "dev", "veth0", "root", "netem"])
                .args(["delay", "1ms", "1ms", "loss", "1%", "duplicate", "1%"])
                .args(["reorder", "25%"])
                .output()
                .map_err(|e| format!("tc: {e}"))?;
            if !done.status.success() {
                let why = String::from_utf8_lossy(&done.stderr);
                return Err(format!("this kernel has no netem: {}", why.trim()));
            }
        }
        Ok(())
    }

    fn launch(&self, entry: &str) -> Launch {
        let mut l = support::launch(entry, 2, Kind::Malloc, Kind::Malloc);
        l.args.clear();
        l.surroundings = self
            .names
            .iter()
            .map(|n| Surroundings::in_network(n))
            .collect();
        l.env = [
            ("VCCL_SOCKET_IFNAME", "=veth0"),
            ("VCCL_NSOCKS_PERTHREAD", "3"),
        ]
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .to_vec();
        l.timeout = Duration::from_secs(100);
        l
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for n in &self.names {
            let _ = ip(&format!("netns del {n}"));
        }
    }
}

const SIZE: usize = 1 << 20;
const SLOTS: usize = 8;

fn flow<'a>(name: &str, comm: Comm, count: usize, memory: &'a Registered) -> Flow<'a> {
    Flow::new(
        name.to_string(),
        comm,
        count,
        SLOTS,
        move |i| Message {
            memory,
            offset: (i % SLOTS) * SIZE,
            size: SIZE,
            tag: 0,
        },
        |_, _| Ok(()),
    )
}

/// Moves data both ways; reports `flowing` in the midst of it, and calls `midst` then. `None`: without end, until
/// each end has seen the error that a dead peer gives.
fn both_ways(
    ctx: &mut Ctx,
    count: Option<usize>,
    midst: impl FnOnce() -> Result<()> + Send,
) -> Result<()> {
    let mut links = ctx.connect(&[(0, 1), (1, 0)])?;
    links.sort_by_key(|l| !l.sends());
    simple(ctx, &links, 8, 300_000, 1)?;
    let (_a, out) = memory(ctx, &links[0], SLOTS * SIZE)?;
    let (_b, inn) = memory(ctx, &links[1], SLOTS * SIZE)?;
    let oob = ctx.oob.clone();
    let quiet = ctx.progress(|io| -> Result<Duration> {
        let most = count.unwrap_or(usize::MAX);
        let mut flows = [
            flow("send", links[0].comm, most, &out),
            flow("receive", links[1].comm, most, &inn),
        ];
        let mut over = [false, false];
        let (mut midst, mut last, mut longest) = (Some(midst), Instant::now(), Duration::ZERO);
        let mut idle = Idle::patient();
        while over != [true, true] {
            let mut any = false;
            for (f, over) in flows.iter_mut().zip(&mut over).filter(|(_, o)| !**o) {
                match f.poll(io) {
                    Ok(moved) => {
                        any |= moved;
                        *over = f.finished();
                    }
                    Err(e) if count.is_none() => {
                        is_remote("a transfer over a dead link", &e)?;
                        *over = true;
                    }
                    Err(e) => return Err(e),
                }
            }
            if flows.iter().all(|f| f.done() > 30) {
                if let Some(midst) = midst.take() {
                    oob.up("flowing")?;
                    midst()?;
                }
            }
            longest = longest.max(last.elapsed());
            if any {
                last = Instant::now();
                idle.reset();
            } else {
                idle.wait();
            }
            ensure!(
                last.elapsed() < DEAD,
                "nothing moved for {DEAD:?}, and no error: {}; {}",
                flows[0].describe(),
                flows[1].describe()
            );
        }
        Ok(longest)
    })?;
    ctx.oob.up(format!("quiet {}", quiet.as_millis()))?;
    ctx.deregister(vec![out, inn])?;
    if count.is_some() {
        simple(ctx, &links, 8, 300_000, 2)?;
        ctx.oob.barrier_of(&[0, 1])?;
    }
    ctx.close(&links)
}

fn endless(ctx: &mut Ctx) -> Result<()> {
    both_ways(ctx, None, || Ok(()))
}

fn long(ctx: &mut Ctx) -> Result<()> {
    both_ways(ctx, Some(5000), || Ok(()))
}

fn verified(ctx: &mut Ctx) -> Result<()> {
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    for round in 0..4 {
        simple(ctx, &links, 8, 700_001, round)?;
        simple(ctx, &links, 64, 5_000, round)?;
    }
    ctx.close(&links)
}

/// Rank 0 connects to rank 1 through a network that lets nothing pass, and again when it does.
fn unanswered(ctx: &mut Ctx) -> Result<()> {
    let dev = ctx.dev;
    if ctx.rank == 1 {
        let (handle, listener) = ctx.service(|net| net.listen(dev))?;
        ctx.oob.send(0, handle.0)?;
        for _ in 0..2_000 {
            let accepted = ctx.service(|net| net.accept(listener))?;
            ensure!(accepted.is_none(), "a connection that nobody has");
            std::thread::sleep(Duration::from_millis(1));
        }
        ctx.oob.recv(0)?;
        ctx.service(|net| net.close_listen(listener))?;
    } else {
        let mut handle = ctx.recv_handle(1)?;
        let started = Instant::now();
        let refused = loop {
            match ctx.service(|net| net.connect(dev, &mut handle)) {
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                Ok(Some(_)) => fail!("connected through a network that lets nothing pass"),
                Err(e) => break e,
            }
            ensure!(started.elapsed() < DEAD, "connect gives NULL for ever");
        };
        is_remote("a connect whose packets are dropped", &refused)?;
        let text = refused.to_string();
        for part in ["10.232.0.2", "VCCL_CONNECT_TIMEOUT", "firewall"] {
            ensure!(text.contains(part), "{part} is not in: {text}");
        }
        ctx.oob.send(1, vec![1])?;
    }
    ctx.oob.up("flowing")?;
    // The other way may be repaired a little later: the kernel sends again.
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    simple(ctx, &links, 8, 300_000, 3)?;
    ctx.close(&links)
}

/// Rank 1 is stopped in the midst of it, for longer than a dead host may be silent.
fn stopped(ctx: &mut Ctx) -> Result<()> {
    let stops = ctx.rank == 1;
    // By itself, and so in the midst of a transfer: who connects, or waits at a barrier, has other limits.
    both_ways(ctx, Some(2000), move || {
        if stops {
            let script = format!("sleep 38; kill -CONT {}", std::process::id());
            Command::new("sh")
                .args(["-c", &script])
                .spawn()
                .and_then(|_| Ok(nix::sys::signal::raise(nix::sys::signal::SIGSTOP)?))
                .map_err(|e| Error::new(format!("stopping: {e}")))?;
        }
        Ok(())
    })
}

fn entry(name: &str) -> Option<Entry> {
    match name {
        "endless" => Some(endless),
        "long" => Some(long),
        "verified" => Some(verified),
        "stopped" => Some(stopped),
        "unanswered" => Some(unanswered),
        _ => None,
    }
}

/// Runs it, calls `midst` once both ranks have data flowing, and says how long each was quiet at most.
fn run(l: &Launch, midst: impl Fn()) -> std::result::Result<Vec<Duration>, Failed> {
    let _turn = support::Turn::take();
    let mut flowing = 0;
    let mut quiet = Vec::new();
    l.run(&mut |_, bytes| {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if text == "flowing" {
            flowing += 1;
            if flowing == 2 {
                midst();
            }
        }
        if let Some(Ok(ms)) = text.strip_prefix("quiet ").map(str::parse) {
            quiet.push(Duration::from_millis(ms));
        }
    })?;
    Ok(quiet)
}

fn a_link_that_goes_down_ends_both_ends() -> std::result::Result<(), Failed> {
    goes_down("1")
}

fn a_link_that_goes_down_ends_both_ends_and_their_threads() -> std::result::Result<(), Failed> {
    goes_down("2")
}

fn goes_down(threads: &str) -> std::result::Result<(), Failed> {
    let net = Net::new()?;
    let mut launch = net.launch("endless");
    launch
        .env
        .push(("VCCL_SOCKET_NTHREADS".into(), threads.into()));
    let quiet = run(&launch, || net.set("down"))?;
    println!("until both ends of both connections had their error: {quiet:?}");
    if quiet.iter().any(|q| *q < Duration::from_secs(20)) {
        return Err(format!("too soon: {quiet:?}").into());
    }
    Ok(())
}

fn a_link_that_comes_back_is_gone_on_with() -> std::result::Result<(), Failed> {
    let net = Net::new()?;
    let quiet = run(&net.launch("long"), || {
        net.set("down");
        std::thread::sleep(Duration::from_secs(2));
        net.set("up");
    })?;
    println!("without data: {quiet:?}");
    if quiet.iter().any(|q| *q < Duration::from_secs(1)) {
        return Err(format!("the link was not down in the midst of it: {quiet:?}").into());
    }
    Ok(())
}

fn lost_and_reordered_packets_change_nothing() -> std::result::Result<(), Failed> {
    let net = Net::new()?;
    net.impair()?;
    run(&net.launch("verified"), || ())?;
    Ok(())
}

fn a_peer_that_is_stopped_is_waited_for() -> std::result::Result<(), Failed> {
    let net = Net::new()?;
    let quiet = run(&net.launch("stopped"), || ())?;
    println!("without data: {:?}", quiet.iter().max());
    if !quiet.iter().all(|q| *q > Duration::from_secs(30)) {
        return Err(format!("it was not stopped in the midst of it: {quiet:?}").into());
    }
    Ok(())
}

fn a_firewall_that_drops_packets_is_named() -> std::result::Result<(), Failed> {
    let net = Net::new()?;
    net.vanish(true);
    let mut l = net.launch("unanswered");
    l.env.push(("VCCL_CONNECT_TIMEOUT".into(), "3".into()));
    run(&l, || net.vanish(false))?;
    Ok(())
}

fn main() {
    enter_if_rank(entry);
    let args = Arguments::from_args();
    let possible = Net::new();
    let netem = possible
        .as_ref()
        .map_err(|e| e.clone())
        .and_then(|n| n.impair());
    let possible = possible.map(|_| ());
    for why in [possible.as_ref().err(), netem.as_ref().err()]
        .into_iter()
        .flatten()
    {
        support::not_run(&args, why);
    }
    type Test = (&'static str, fn() -> std::result::Result<(), Failed>);
    let on_a_network: [Test; 5] = support::named![
        a_link_that_goes_down_ends_both_ends,
        a_link_that_goes_down_ends_both_ends_and_their_threads,
        a_link_that_comes_back_is_gone_on_with,
        a_firewall_that_drops_packets_is_named,
        a_peer_that_is_stopped_is_waited_for,
    ];
    let with_netem: [Test; 1] = support::named![lost_and_reordered_packets_change_nothing,];
    let trial = |(name, f): Test, can: bool| Trial::test(name, f).with_ignored_flag(!can);
    let tests = on_a_network
        .map(|t| trial(t, possible.is_ok()))
        .into_iter()
        .chain(with_netem.map(|t| trial(t, netem.is_ok())))
        .collect();
    libtest_mimic::run(&args, tests).exit();
}
