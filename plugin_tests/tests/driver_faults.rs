//! What a CUDA driver can refuse, on the double: whatever fails, data arrives right by another path or
//! both ends get an error that names the call, in bounded time, and nothing is left behind.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_double::control::Control;
use plugin_tests::conformance::util::{
    accept, close_listen, connect_within, error_within, listen, memory, put, recv, send, until,
    verify, wait,
};
use plugin_tests::conformance::{self, cases};
use plugin_tests::error::{Context, Error, Result};
use plugin_tests::exchange::simple;
use plugin_tests::launch::Launch;
use plugin_tests::memory::{Buffer, Kind};
use plugin_tests::net::{Comm, Registered, Request};
use plugin_tests::pattern::Key;
use plugin_tests::rank::{enter_if_rank, Ctx, Entry, Link};
use plugin_tests::worker::Idle;
use plugin_tests::{ensure, fail, logs};

use support::{launch, log_of, must_pass, report_log, reported, Reports};

/// Not a test: ranks of the runs below are processes of this program that run only this.
#[test]
fn rank_process() {
    enter_if_rank(find);
}

fn find(name: &str) -> Option<Entry> {
    Some(match name {
        "faulty" => faulty,
        "copy_fails" => copy_fails,
        "copy_hangs" => copy_hangs,
        "lifetimes" => lifetimes,
        "few_mappings" => few_mappings,
        "end_at_once" => end_at_once,
        "init_only" => init_only,
        _ => return conformance::find(name),
    })
}

const PUSH: &str = "pushed straight into the receive buffer";
const HOST: &str = "through shared host memory";
const CHUNKS: &str = "through chunks in the receiver's GPU";

/// What the driver holds for this process. Contexts of the plugin's own live as long as the process.
const LIVE: [&str; 9] = [
    "live_allocations",
    "live_ipc_imports",
    "live_mappings",
    "live_reservations",
    "live_handles",
    "live_imported_handles",
    "live_registered",
    "live_streams",
    "live_events",
];

fn double() -> Result<Control> {
    Control::find().map_err(|e| Error::new(e.to_string()))
}

fn set(d: &Control, key: &str, value: &str) -> Result<()> {
    d.set(key, value).map_err(|e| Error::new(e.to_string()))
}

fn live(d: &Control) -> Vec<u64> {
    LIVE.iter().map(|n| d.counter(n)).collect()
}

/// Waits until the driver holds no more for this process than before.
fn as_before(d: &Control, before: &[u64]) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(3);
    loop {
        let more: Vec<String> = LIVE
            .iter()
            .zip(before.iter().zip(live(d)))
            .filter(|(_, (was, is))| *was != is)
            .map(|(n, (was, is))| format!("{n}: {was} before, {is} now"))
            .collect();
        if more.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < end, "left behind: {}", more.join("; "));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether both ranks got through a step; each learns of the other.
fn agree<T>(ctx: &Ctx, mine: &Result<T>) -> Result<bool> {
    ctx.oob.send(1 - ctx.rank, vec![u8::from(mine.is_ok())])?;
    Ok(ctx.oob.recv(1 - ctx.rank)? == [1] && mine.is_ok())
}

/// A connection from rank 0 to rank 1, or why there is none.
fn one_connection(ctx: &mut Ctx) -> Result<Result<Link>> {
    let id = ctx.next_connection();
    if ctx.rank == 0 {
        let mut handle = ctx.recv_handle(1)?;
        let made = match connect_within(ctx, &mut handle, Duration::from_secs(10)) {
            Ok(Some(c)) => Ok(c),
            Ok(None) => fail!("connect still gives NULL"),
            Err(e) => Err(e),
        };
        ctx.oob.send(1, vec![u8::from(made.is_ok())])?;
        return Ok(made.map(|c| Link {
            id,
            peer: 1,
            comm: Comm::Send(c),
        }));
    }
    let (handle, l) = listen(ctx)?;
    ctx.oob.send(0, handle.0)?;
    let made = if ctx.oob.recv(0)? == [1] {
        let comm = Comm::Recv(accept(ctx, l)?);
        Ok(Link { id, peer: 0, comm })
    } else {
        Err(Error::new("the other rank could not connect"))
    };
    close_listen(ctx, l)?;
    Ok(made)
}

const SIZES: [usize; 5] = [1, 5_000, 300_001, 5 << 20, 4_999];
const BUFFERS: usize = 2;

/// Registers and moves data; an error of the plugin's is what this gives, once both ranks have had
/// theirs. What it opened it closes.
fn attempt(ctx: &Ctx, link: &Link, buffers: &[Arc<Buffer>]) -> Result<Result<()>> {
    // Which end registers first, where that matters.
    let first: Option<usize> = ctx.params.text("first").and_then(|t| t.parse().ok());
    if first == Some(1 - ctx.rank) {
        ctx.oob.barrier()?;
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut regs: Vec<Registered> = Vec::new();
    let mut registered = Ok(());
    for b in buffers {
        match ctx.register(link, b) {
            Ok(r) => regs.push(r),
            Err(e) => registered = Err(e),
        }
    }
    if first == Some(ctx.rank) {
        ctx.oob.barrier()?;
    }
    let mut result = registered;
    if agree(ctx, &result)? {
        'data: for (i, size) in SIZES.into_iter().enumerate() {
            for (b, reg) in regs.iter().enumerate() {
                let moved = move_one(ctx, link, reg, size, i * BUFFERS + b);
                let both = agree(ctx, &moved)?;
                result = moved;
                if !both {
                    break 'data;
                }
            }
        }
    }
    ctx.deregister(regs)?;
    Ok(result)
}

/// How long a message may take, or the error in its place.
const MOVE_LIMIT: Duration = Duration::from_secs(8);

fn move_one(ctx: &Ctx, link: &Link, reg: &Registered, size: usize, message: usize) -> Result<()> {
    let key = Key {
        seed: 9,
        rank: 0,
        connection: link.id,
        message,
    };
    if link.sends() {
        put(&reg.buffer, 0, size, key)?;
        let r = send(ctx, link, reg, 0, size, 0)?;
        until(ctx, "the send", MOVE_LIMIT, |io| io.test(r))?;
        return Ok(());
    }
    let r = recv(ctx, link, reg, 0, size, 0)?;
    let n = until(ctx, "the receive", MOVE_LIMIT, |io| io.test(r))?;
    ensure!(n == size, "test gave {n} bytes of {size}");
    verify(&reg.buffer, 0, size, key)
}

/// Parameters: `fault` (`KEY=VALUE` of the double), `at` (`connect` or `register`), `in` (`Sender`,
/// `Receiver` or `Both`), `warm` (whether a connection was there before).
fn faulty(ctx: &mut Ctx) -> Result<()> {
    let d = double()?;
    let place: String = ctx.params.get("in")?;
    let mine = place == "Both" || (place == "Sender") == (ctx.rank == 0);
    let fault: String = ctx.params.get("fault")?;
    let (key, value) = fault.split_once('=').ok_or(Error::new("bad fault"))?;
    let at: String = ctx.params.get("at")?;
    if ctx.params.text("warm").is_some() {
        let links = ctx.connect(&[(0, 1)])?;
        simple(ctx, &links, 2, 1_000, 0)?;
        ctx.close(&links)?;
    }
    let kind = if ctx.rank == 0 {
        ctx.send_kind()?
    } else {
        ctx.recv_kind()?
    };
    let buffers: Vec<Arc<Buffer>> = (0..BUFFERS)
        .map(|_| Ok(Arc::new(Buffer::new(kind, 5 << 20, ctx.gpu)?)))
        .collect::<Result<_>>()?;
    ctx.oob.barrier()?;
    let before = live(&d);
    let mark = logs::mark();
    let start = Instant::now();
    if mine && at == "connect" {
        set(&d, key, value)?;
    }
    let result = match one_connection(ctx)? {
        Err(e) => Err(e),
        Ok(link) => {
            ctx.oob.barrier()?;
            if mine && at == "register" {
                set(&d, key, value)?;
            }
            ctx.oob.barrier()?;
            let r = attempt(ctx, &link, &buffers)?;
            ctx.close(&[link])?;
            r
        }
    };
    ensure!(
        start.elapsed() < Duration::from_secs(15),
        "it took {:?}",
        start.elapsed()
    );
    ctx.oob.up(match &result {
        Ok(()) => "result ok".to_string(),
        Err(e) => format!("result {e}"),
    })?;
    if let Err(e) = &result {
        ensure!(
            e.code().is_some() || e.text().contains("the other rank"),
            "no error of the plugin: {e}"
        );
    }
    if mine && key == "FAIL" {
        set(&d, "FAIL", "")?;
    }
    ctx.oob.barrier()?;
    as_before(&d, &before)?;
    report_log(ctx, mark)
}

/// What must come of a fault.
enum Outcome {
    /// Data arrives, all of it by this path.
    Path(&'static str),
    /// Data arrives, that of one buffer by one path, that of the other by the other.
    Paths(&'static str, &'static str),
    /// One end gets an error, and these words are in a warning; the other end does not hang.
    Refused(&'static [&'static str]),
}

/// When it begins.
#[derive(Clone, Copy, PartialEq, Debug)]
enum At {
    /// Before the process's first connection.
    First,
    /// Before a later connection.
    Connect,
    /// Once there is a connection, before memory is registered.
    Register,
}

/// Where.
#[derive(Clone, Copy, PartialEq, Debug)]
enum In {
    Sender,
    Receiver,
    Both,
}

struct Fault {
    fault: &'static str,
    at: At,
    place: In,
    kinds: (Kind, Kind),
    outcome: Outcome,
}

fn check(f: &Fault) -> std::result::Result<(), String> {
    check_in_order(f, None)
}

fn check_in_order(f: &Fault, first: Option<usize>) -> std::result::Result<(), String> {
    let mut l = launch("faulty", 2, f.kinds.0, f.kinds.1);
    if let Some(rank) = first {
        l.params.set("first", rank);
    }
    l.params
        .set("fault", f.fault)
        .set(
            "at",
            if f.at == Register {
                "register"
            } else {
                "connect"
            },
        )
        .set("in", format!("{:?}", f.place));
    if f.at != First {
        l.params.set("warm", 1);
    }
    l.env.push(("VCCL_DOUBLE_ALLOW_LOCAL".into(), "1".into()));
    let what = format!(
        "{} in {:?} at {:?}, {} to {}",
        f.fault,
        f.place,
        f.at,
        f.kinds.0.name(),
        f.kinds.1.name()
    );
    let (result, reports) = support::run(&l);
    result
        .map_err(|e| e.to_string())
        .and_then(|()| outcome_is(f, &reports))
        .map_err(|e| {
            let log = log_of(&reports, None, true).join("\n  ");
            let results = [0, 1].map(|r| reported(&reports, r, "result"));
            format!("{what}: {e}\n  results: {results:?}\n  {log}")
        })
}

fn outcome_is(f: &Fault, reports: &Reports) -> std::result::Result<(), String> {
    let results = [0, 1].map(|r| reported(reports, r, "result"));
    let paths: &[&str] = match &f.outcome {
        Path(path) => &[path],
        Paths(one, other) => &[one, other],
        Refused(words) => {
            if results == [Some("ok"), Some("ok")] {
                return Err("no end got an error".into());
            }
            let all = log_of(reports, None, true).join("\n");
            return match words.iter().find(|w| !all.contains(*w)) {
                Some(w) => Err(format!("no warning has {w:?}")),
                None => Ok(()),
            };
        }
    };
    if results != [Some("ok"), Some("ok")] {
        return Err("data did not arrive".into());
    }
    let lines = log_of(reports, Some(0), false);
    let sent: Vec<&str> = lines.into_iter().filter(|l| l.contains("sent ")).collect();
    // One line for each path, when the connection closes; an earlier connection was before the mark.
    if sent.len() != paths.len() || !paths.iter().all(|p| sent.iter().any(|l| l.contains(p))) {
        return Err(format!("not {paths:?}: {sent:?}"));
    }
    Ok(())
}

use At::{Connect, First, Register};
use In::{Both, Receiver, Sender};
use Kind::{Cuda, Malloc, Vmm, VmmPrivate};
use Outcome::{Path, Paths, Refused};

fn fault(
    fault: &'static str,
    at: At,
    place: In,
    send: Kind,
    recv: Kind,
    outcome: Outcome,
) -> Fault {
    Fault {
        fault,
        at,
        place,
        kinds: (send, recv),
        outcome,
    }
}

fn all(faults: &[Fault]) {
    let failures: Vec<String> = faults.iter().filter_map(|f| check(f).err()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
#[rustfmt::skip]
fn memory_that_cannot_be_exported() {
    all(&[
        fault("VMM_EXPORT=0", Connect, Both, Vmm, VmmPrivate, Path(HOST)),
        fault("VMM_EXPORT=0", Connect, Both, Cuda, Cuda, Path(PUSH)),
        fault("IPC=0", Connect, Both, Cuda, Cuda, Path(CHUNKS)),
        fault("IPC=0", Connect, Both, Vmm, Vmm, Path(PUSH)),
        fault("FAIL=cuMemExportToShareableHandle:*:304", Register, Receiver, Vmm, Vmm, Path(HOST)),
        fault("FAIL=cuMemExportToShareableHandle:1:304", Register, Receiver, Vmm, Vmm, Paths(CHUNKS, PUSH)),
        fault("FAIL=cuIpcGetMemHandle:*:304", Register, Receiver, Cuda, Cuda, Path(CHUNKS)),
        fault("FAIL=cuIpcGetMemHandle:*:304,cuMemCreate:*:2", Register, Receiver, Cuda, Cuda, Path(HOST)),
        fault("FAIL=cuMemRetainAllocationHandle:*:1", Register, Receiver, Vmm, Vmm, Path(CHUNKS)),
    ]);
}

#[test]
#[rustfmt::skip]
fn memory_that_cannot_be_mapped() {
    all(&[
        fault("PEER=0", Connect, Both, Vmm, Vmm, Path(HOST)),
        fault("PEER=0", Connect, Both, Cuda, Cuda, Path(HOST)),
        fault("PEER=0", Connect, Both, VmmPrivate, VmmPrivate, Path(HOST)),
        fault("FAIL=cuMemMap:*:2", Register, Sender, Vmm, Vmm, Path(HOST)),
        fault("FAIL=cuMemMap:1:2", Register, Sender, Vmm, Vmm, Paths(HOST, PUSH)),
        fault("FAIL=cuMemSetAccess:*:1", Register, Sender, Vmm, Vmm, Path(HOST)),
        fault("FAIL=cuMemSetAccess:1:1", Register, Sender, Vmm, Vmm, Paths(HOST, PUSH)),
        fault("FAIL=cuMemImportFromShareableHandle:*:304", Register, Sender, Vmm, Vmm, Path(HOST)),
        fault("FAIL=cuMemImportFromShareableHandle:1:304", Register, Sender, Vmm, Vmm, Paths(HOST, PUSH)),
        fault("FAIL=cuMemAddressReserve:*:2", Register, Sender, Vmm, Vmm, Path(HOST)),
        fault("FAIL=cuIpcOpenMemHandle:*:201", Register, Sender, Cuda, Cuda, Path(HOST)),
        fault("FAIL=cuIpcOpenMemHandle:1:201", Register, Sender, Cuda, Cuda, Paths(HOST, PUSH)),
    ]);
}

#[test]
#[rustfmt::skip]
fn chunks_in_the_gpu_that_cannot_be_made_or_mapped() {
    all(&[
        fault("FAIL=cuMemCreate:*:2", Register, Receiver, Vmm, VmmPrivate, Path(HOST)),
        fault("FAIL=cuMemMap:*:2", Register, Receiver, Vmm, VmmPrivate, Path(HOST)),
        fault("FAIL=cuMemSetAccess:*:1", Register, Receiver, Vmm, VmmPrivate, Path(HOST)),
        fault("FAIL=cuMemMap:*:2", Register, Sender, Vmm, VmmPrivate, Path(HOST)),
        fault("FAIL=cuMemImportFromShareableHandle:1:304", Register, Sender, Vmm, VmmPrivate, Path(HOST)),
    ]);
}

#[test]
#[rustfmt::skip]
fn what_every_connection_needs() {
    all(&[
        fault("MEMOPS=0", Connect, Sender, Vmm, Vmm, Refused(&["cuStreamWriteValue32", "step counters"])),
        fault("FAIL=cuMemHostRegister:*:2", Connect, Sender, Vmm, Vmm, Refused(&["cuMemHostRegister", "page-locking"])),
        fault("FAIL=cuMemHostRegister:1:2", Connect, Sender, Vmm, Vmm, Refused(&["cuMemHostRegister"])),
        fault("FAIL=cuStreamCreateWithPriority:*:2", Connect, Sender, Vmm, Vmm, Refused(&["cuStreamCreateWithPriority"])),
        fault("FAIL=cuStreamCreateWithPriority:1:2", Connect, Sender, Vmm, Vmm, Refused(&["cuStreamCreateWithPriority"])),
        fault("FAIL=cuEventCreate:*:2", Connect, Sender, Vmm, Vmm, Refused(&["cuEventCreate"])),
        fault("FAIL=cuDeviceGetUuid:*:999", Connect, Sender, Vmm, Vmm, Refused(&["cuDeviceGetUuid"])),
    ]);
}

#[test]
#[rustfmt::skip]
fn a_receiver_that_cannot_drain() {
    all(&[
        fault("MEMOPS=0", Register, Receiver, Vmm, VmmPrivate, Refused(&["cuStreamWriteValue32"])),
        fault("MEMOPS=0", Register, Receiver, Vmm, Vmm, Path(PUSH)),
        fault("FAIL=cuMemHostRegister:*:2", Register, Receiver, Vmm, VmmPrivate, Refused(&["cuMemHostRegister"])),
        fault("FAIL=cuMemHostRegister:*:2", Register, Receiver, Vmm, Vmm, Path(PUSH)),
        fault("FAIL=cuMemHostRegister:*:2", Register, Sender, Vmm, Malloc, Refused(&["cuMemHostRegister"])),
    ]);
}

#[test]
#[rustfmt::skip]
fn no_context_of_its_own() {
    all(&[
        fault("FAIL=cuCtxCreate:*:2", First, Both, Vmm, Vmm, Path(PUSH)),
        fault("FAIL=cuCtxCreate:1:2", First, Sender, Vmm, Vmm, Path(PUSH)),
        fault("FAIL=cuCtxCreate:*:2", First, Both, Cuda, Cuda, Path(PUSH)),
        fault("FAIL=cuCtxCreate:*:2", First, Both, Vmm, VmmPrivate, Path(CHUNKS)),
    ]);
}

#[test]
#[rustfmt::skip]
fn the_data_path_itself() {
    all(&[
        fault("FAIL=cuMemcpyAsync:3:700", Register, Sender, Vmm, Vmm, Refused(&["cuMemcpyAsync"])),
        fault("FAIL=cuMemcpy2DAsync:1:700", Register, Sender, Vmm, Vmm, Refused(&["cuMemcpy2DAsync"])),
        fault("FAIL=cuMemcpy2DAsync:2:700", Register, Receiver, Malloc, Vmm, Refused(&["cuMemcpy2DAsync"])),
        // The first copy of an odd length, and its second: the last byte.
        fault("FAIL=cuMemcpy2DAsync:3:700", Register, Sender, Vmm, Vmm, Refused(&["cuMemcpy2DAsync"])),
        fault("FAIL=cuMemcpy2DAsync:4:700", Register, Sender, Vmm, Vmm, Refused(&["cuMemcpy2DAsync"])),
        fault("FAIL=cuMemcpy2DAsync:4:700", Register, Receiver, Malloc, Vmm, Refused(&["cuMemcpy2DAsync"])),
        fault("FAIL=cuStreamWriteValue32:3:700", Register, Sender, Vmm, Vmm, Refused(&["cuStreamWriteValue32"])),
        fault("FAIL=cuCtxPushCurrent:5:201", Register, Sender, Vmm, Vmm, Refused(&["cuCtxPushCurrent"])),
        fault("FAIL=cuMemcpyAsync:3:700", Register, Receiver, Vmm, VmmPrivate, Refused(&["cuMemcpyAsync"])),
        fault("FAIL=cuMemcpyAsync:2:700", Register, Sender, Vmm, Malloc, Refused(&["cuMemcpyAsync"])),
    ]);
}

/// The receiver learns at its own registration, or later from the sender, that it must drain host memory
/// into its GPU.
#[test]
fn host_memory_for_a_gpu_that_cannot_drain() {
    for first in [0, 1] {
        let f = fault(
            "FAIL=cuStreamCreateWithPriority:*:2",
            Register,
            Receiver,
            Malloc,
            Vmm,
            Refused(&["cuStreamCreateWithPriority"]),
        );
        if let Err(e) = check_in_order(&f, Some(first)) {
            panic!("rank {first} registers first: {e}");
        }
    }
}

/// Copies that fail while they run, in rank 0: both ends get an error, in bounded time.
fn copy_fails(ctx: &mut Ctx) -> Result<()> {
    let d = double()?;
    let links = ctx.connect(&[(0, 1)])?;
    simple(ctx, &links, 4, 10_000, 0)?;
    let link = links[0];
    let (_b, reg) = memory(ctx, &link, 1 << 20)?;
    ctx.oob.barrier()?;
    let failing: usize = ctx.params.get("in")?;
    if ctx.rank == failing {
        set(&d, "ASYNC_FAIL", "719:1")?;
    }
    ctx.oob.barrier()?;
    let mark = logs::mark();
    let e = ctx.progress(|io| -> Result<Error> {
        // As NCCL polls: without sleeping. A send that was done before the failure, for example in a
        // chunk, is followed by another.
        let end = Instant::now() + Duration::from_secs(10);
        let mut idle = Idle::eager(true);
        let mut open: Option<Request> = None;
        while Instant::now() < end {
            let step = match (open, link.comm) {
                (Some(r), _) => io.test(r).map(|done| done.is_none().then_some(r)),
                (None, Comm::Send(c)) => io.isend(c, &reg, 0, 1 << 20, 0),
                (None, Comm::Recv(c)) => io.irecv(c, &reg, 0, 1 << 20, 0),
            };
            match step {
                Err(e) => return Ok(e),
                Ok(now) => {
                    ensure!(
                        link.sends() || open.is_none() || now.is_some(),
                        "the receive completed"
                    );
                    open = now;
                    idle.wait();
                }
            }
        }
        fail!("no error within 10 s")
    })?;
    ensure!(e.code().is_some(), "{e}");
    ensure!(
        ctx.rank != failing || e.text().contains("719"),
        "the error does not have the driver's code: {e}"
    );
    ctx.oob.up(format!("result {e}"))?;
    ctx.oob.barrier()?;
    ctx.deregister(vec![reg])?;
    ctx.close(&links)?;
    report_log(ctx, mark)
}

#[test]
fn copies_that_fail_while_they_run() {
    for (place, recv) in [(0, Kind::Vmm), (1, Kind::VmmPrivate), (0, Kind::VmmPrivate)] {
        let mut l = launch("copy_fails", 2, Kind::Vmm, recv);
        l.params.set("in", place);
        l.env.push(("VCCL_DOUBLE_ALLOW_LOCAL".into(), "1".into()));
        must_pass(&l);
    }
}

/// Copies of rank 0 never end: its close and deregMr return in time, with a warning each; rank 1 is not
/// harmed, nor are other connections, nor anybody once the copies end after all.
fn copy_hangs(ctx: &mut Ctx) -> Result<()> {
    let d = double()?;
    let links = ctx.connect(&[(0, 1), (1, 0)])?;
    simple(ctx, &links, 4, 10_000, 0)?;
    let hung = *links.iter().find(|l| l.id == 0).expect("opened above");
    let other = *links.iter().find(|l| l.id == 1).expect("opened above");
    let (_b, reg) = memory(ctx, &hung, 1 << 20)?;
    // The test's own copies of rank 0 would hang as well: what is sent later is written now.
    let (buffer, other_reg) = memory(ctx, &other, 1 << 20)?;
    let key = Key {
        seed: 3,
        rank: 1,
        connection: 1,
        message: 0,
    };
    if other.sends() {
        put(&buffer, 0, 1 << 20, key)?;
    }
    ctx.oob.barrier()?;
    let mark = logs::mark();
    let hangs_here = ctx.rank == 0;
    let request: Request = if hangs_here {
        set(&d, "HANG_COPIES", "1")?;
        send(ctx, &hung, &reg, 0, 1 << 20, 0)?
    } else {
        recv(ctx, &hung, &reg, 0, 1 << 20, 0)?
    };
    ctx.oob.barrier()?;
    let still = ctx.progress(|io| io.test(request))?;
    ensure!(still.is_none(), "a copy that hangs completed");
    if hangs_here {
        // Each within `CLOSE_LIMIT`, or these fail.
        ctx.deregister(vec![reg])?;
        one_warning("deregMr", mark, "still in flight")?;
        let mark = logs::mark();
        ctx.close(&[hung])?;
        one_warning("close", mark, "still in flight")?;
        ctx.oob.send(1, b"closed".to_vec())?;
    } else {
        ensure!(ctx.oob.recv(0)? == b"closed", "out of step");
        let e = error_within(
            ctx,
            "a receive whose sender closed with the copy hanging",
            Duration::from_secs(5),
            |io| io.test(request).map(|_| ()),
        )?;
        ensure!(e.code().is_some(), "{e}");
        // The copy may yet write there. The registration's end waits in vain, and says so.
        let mark = logs::mark();
        ctx.deregister(vec![reg])?;
        ctx.close(&[hung])?;
        let said = logs::warnings_since(mark);
        ensure!(
            said.iter().any(|w| w.contains("has not let go")),
            "memory that a hanging copy may yet write to was given back with these words: {said:?}"
        );
    }
    // The other direction is rank 1's copies, which go on.
    let r = if other.sends() {
        send(ctx, &other, &other_reg, 0, 1 << 20, 0)?
    } else {
        recv(ctx, &other, &other_reg, 0, 1 << 20, 0)?
    };
    wait(ctx, "the other connection", r)?;
    ctx.oob.barrier()?;
    if hangs_here {
        set(&d, "HANG_COPIES", "0")?;
        let end = Instant::now() + Duration::from_secs(5);
        while d.counter("pending_ops") > 0 {
            ensure!(Instant::now() < end, "the copies do not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        verify(&buffer, 0, 1 << 20, key).context(|| "the other connection")?;
    }
    ctx.deregister(vec![other_reg])?;
    ctx.oob.barrier()?;
    let fresh = ctx.connect(&[(0, 1)])?;
    simple(ctx, &fresh, 4, 10_000, 2).context(|| "a new connection")?;
    ctx.close(&fresh)?;
    ctx.close(&[other])
}

/// That one warning came since `mark`, with those words.
fn one_warning(what: &str, mark: usize, words: &str) -> Result<()> {
    let said = logs::warnings_since(mark);
    ensure!(
        said.len() == 1 && said[0].contains(words),
        "{what} gave these warnings: {said:?}"
    );
    Ok(())
}

#[test]
fn copies_that_never_end() {
    for recv in [Kind::Vmm, Kind::Cuda] {
        must_pass(&launch("copy_hangs", 2, recv, recv));
    }
}

/// The same buffers on eight connections: one import for the pair of processes, and none after the last
/// deregMr, nor after a close that finds registrations.
fn lifetimes(ctx: &mut Ctx) -> Result<()> {
    const CONNECTIONS: usize = 8;
    let d = double()?;
    let warm = ctx.connect(&[(0, 1)])?;
    simple(ctx, &warm, 2, 1_000, 0)?;
    ctx.close(&warm)?;
    let count = |name: &str| d.counter(name);
    let kind = ctx.recv_kind()?;
    let buffer = Arc::new(Buffer::new(kind, 3 << 20, ctx.gpu)?);
    let second = Arc::new(Buffer::new(kind, 3 << 20, ctx.gpu)?);
    ctx.oob.barrier()?;
    let all_before = live(&d);
    for close_ends_it in [false, true] {
        let links = ctx.connect(&[(0, 1); CONNECTIONS])?;
        ctx.oob.barrier()?;
        let before = ["live_imported_handles", "live_ipc_imports"].map(count);
        ctx.oob.barrier()?;
        let imports = || {
            let now = ["live_imported_handles", "live_ipc_imports"].map(count);
            now[0] - before[0] + now[1] - before[1]
        };
        let mut regs: Vec<Registered> = Vec::new();
        for link in &links {
            regs.push(ctx.register(link, &buffer)?);
            regs.push(ctx.register(link, &buffer)?);
        }
        through(ctx, &links, &regs, 2)?;
        if ctx.rank == 0 {
            ensure!(imports() == 1, "one buffer is imported {} times", imports());
        } else {
            ensure!(imports() == 0, "the receiver imported {}", imports());
        }
        ctx.oob.barrier()?;
        // A second buffer, on one connection only.
        let more = ctx.register(&links[0], &second)?;
        through(ctx, &links[..1], std::slice::from_ref(&more), 1)?;
        ensure!(
            ctx.rank == 1 || imports() == 2,
            "two buffers are imported {} times",
            imports()
        );
        ctx.oob.barrier()?;
        ctx.deregister(vec![more])?;
        ctx.oob.barrier()?;
        ensure!(
            ctx.rank == 1 || imports() == 1,
            "after the second buffer's deregMr {} are imported",
            imports()
        );
        ctx.oob.barrier()?;
        if close_ends_it {
            // The sending end first, or the receiving end: whose close comes first is its choice.
            ctx.close(&links)?;
            drop(regs);
        } else {
            let last = regs.pop();
            ctx.deregister(regs)?;
            ctx.oob.barrier()?;
            ensure!(
                ctx.rank == 1 || imports() == 1,
                "with one registration left, {} are imported",
                imports()
            );
            ctx.oob.barrier()?;
            ctx.deregister(last.into_iter().collect())?;
            ctx.oob.barrier()?;
            ensure!(
                imports() == 0,
                "after the last deregMr {} are imported",
                imports()
            );
            ctx.oob.barrier()?;
            ctx.close(&links)?;
        }
        ctx.oob.barrier()?;
        as_before(&d, &all_before)?;
        ctx.oob.barrier()?;
    }
    Ok(())
}

/// One message through every registration, `each` of which belong to one link.
fn through(ctx: &Ctx, links: &[Link], regs: &[Registered], each: usize) -> Result<()> {
    for (i, reg) in regs.iter().enumerate() {
        let link = &links[i / each];
        move_one(ctx, link, reg, 70_000, i)?;
        ctx.oob.barrier()?;
    }
    Ok(())
}

#[test]
fn mappings_live_as_long_as_registrations() {
    for kind in [Kind::Vmm, Kind::Cuda] {
        must_pass(&launch("lifetimes", 2, kind, kind));
    }
}

/// Both ends of a connection end registrations, and then connections, at the same moment, many times:
/// each call waits for nothing that never comes.
fn end_at_once(ctx: &mut Ctx) -> Result<()> {
    const ROUNDS: usize = 60;
    const REGISTRATIONS: usize = 20;
    const CONNECTIONS: usize = 4;
    let d = double()?;
    let warm = ctx.connect(&[(0, 1)])?;
    simple(ctx, &warm, 2, 1_000, 0)?;
    ctx.close(&warm)?;
    let kind = ctx.recv_kind()?;
    let buffer = Arc::new(Buffer::new(kind, 1 << 20, ctx.gpu)?);
    ctx.oob.barrier()?;
    let before = live(&d);
    let mark = logs::mark();
    for round in 0..ROUNDS {
        let links = ctx.connect(&[(0, 1); CONNECTIONS])?;
        let mut regs: Vec<Registered> = Vec::new();
        for link in &links {
            for _ in 0..REGISTRATIONS {
                regs.push(ctx.register(link, &buffer)?);
            }
            move_one(ctx, link, &regs[regs.len() - 1], 4_096, round)?;
        }
        ctx.oob.barrier()?;
        ctx.deregister(regs)?;
        ctx.oob.barrier()?;
        ctx.close(&links)?;
        let said = logs::warnings_since(mark);
        let late = said
            .iter()
            .find(|w| w.contains("has not let go") || w.contains("in flight"));
        ensure!(late.is_none(), "round {round}: {late:?}");
    }
    ctx.oob.barrier()?;
    as_before(&d, &before)
}

#[test]
fn both_ends_end_at_once() {
    must_pass(&launch("end_at_once", 2, Kind::Vmm, Kind::Vmm));
}

/// Twelve buffers where one mapping is allowed: the rest takes another way.
fn few_mappings(ctx: &mut Ctx) -> Result<()> {
    const N: usize = 12;
    let d = double()?;
    let links = ctx.connect(&[(0, 1)])?;
    let link = links[0];
    let buffers: Vec<Arc<Buffer>> = (0..N)
        .map(|_| ctx.buffer(&link, 3 << 20))
        .collect::<Result<_>>()?;
    ctx.oob.barrier()?;
    let before = live(&d);
    ctx.oob.barrier()?;
    let held = || {
        let now = live(&d);
        // Mappings, and what was opened over IPC.
        (now[2] + now[1]) - (before[2] + before[1])
    };
    let mark = logs::mark();
    for round in 0..2 {
        let regs: Vec<Registered> = buffers
            .iter()
            .map(|b| ctx.register(&link, b))
            .collect::<Result<_>>()?;
        for (i, reg) in regs.iter().enumerate() {
            move_one(ctx, &link, reg, 200_001, round * N + i)?;
            ensure!(held() <= 1, "{} mappings where 1 is allowed", held());
        }
        ctx.oob.barrier()?;
        ctx.deregister(regs)?;
        ctx.oob.barrier()?;
        ensure!(held() == 0, "{} mappings after the last deregMr", held());
        ctx.oob.barrier()?;
    }
    ctx.close(&links)?;
    report_log(ctx, mark)
}

#[test]
fn more_registrations_than_mappings() {
    for kind in [Kind::Vmm, Kind::Cuda] {
        let mut l = launch("few_mappings", 2, kind, kind);
        l.env.push(("VCCL_MAX_MAPPINGS".into(), "1".into()));
        let reports = must_pass(&l);
        let sent = log_of(&reports, Some(0), false);
        let through = |path: &str| sent.iter().any(|t| t.contains("sent ") && t.contains(path));
        assert!(through(PUSH) && through(HOST), "{sent:?}");
        let warnings = log_of(&reports, None, true);
        let of_it = warnings.iter().filter(|w| w.contains("VCCL_MAX_MAPPINGS"));
        assert_eq!(of_it.count(), 1, "{warnings:?}");
    }
}

#[test]
fn both_kinds_of_context() {
    for context in ["primary", "private"] {
        for group in ["setup", "data", "memory"] {
            for case in cases().filter(|c| c.group == group && !c.large) {
                let mut l = launch(case.name, case.nranks, Kind::Vmm, Kind::Vmm);
                l.env.push(("VCCL_CUDA_CONTEXT".into(), context.into()));
                let (result, _) = support::run(&l);
                match result {
                    Err(e) if !e.is_skip() => panic!("{}, {context}: {e}", case.name),
                    _ => {}
                }
            }
        }
    }
}

/// Settings are read at init: what it says of them.
fn init_only(ctx: &mut Ctx) -> Result<()> {
    report_log(ctx, 0)?;
    // The defaults work.
    let links = ctx.connect(&[(0, 0)])?;
    ctx.close(&links)
}

fn init_with(name: &str, value: &str) -> Reports {
    let mut l: Launch = launch("init_only", 1, Kind::Malloc, Kind::Malloc);
    l.env.push((name.into(), value.into()));
    must_pass(&l)
}

#[test]
fn wrong_settings_are_named_once() {
    for (name, value, allowed) in [
        ("VCCL_HOST_CHUNK", "5000", "4K to 16M, a multiple of 4K"),
        ("VCCL_HOST_CHUNK", "32M", "4K to 16M, a multiple of 4K"),
        ("VCCL_HOST_CHUNK", "", "4K to 16M, a multiple of 4K"),
        ("VCCL_STAGING_CHUNK", "1T", "64K to 256M, a multiple of 4K"),
        ("VCCL_STREAMS", "0", "1 to 1024"),
        ("VCCL_MAX_MAPPINGS", "-1", "1 to 1000000"),
        ("VCCL_SPEED", "fast", "1000 to 10000000"),
        ("VCCL_CONNECT_TIMEOUT", "1.5", "1 to 3600"),
        ("VCCL_CLOSE_TIMEOUT", "99999999999999999999", "10 to 60000"),
        ("VCCL_CUDA_CONTEXT", "none", "private or primary"),
        ("VCCL_TIMING", "yes", "0 or 1"),
    ] {
        let reports = init_with(name, value);
        let warnings = log_of(&reports, None, true);
        assert!(
            warnings.len() == 1
                && warnings[0].contains(&format!("{name}={value}"))
                && warnings[0].contains(allowed),
            "{name}={value}: {warnings:?}"
        );
    }
    let reports = init_with("VCCL_HOST_CHUNK", "8K");
    assert!(log_of(&reports, None, true).is_empty(), "{reports:?}");
    let said = log_of(&reports, None, false);
    assert!(
        said.iter()
            .any(|l| l.contains("VCCL_HOST_CHUNK=8K set by the environment")),
        "{said:?}"
    );
}
