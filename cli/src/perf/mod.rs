//! `vccl perf`: starts ranks, lets them move data over the plugin's own functions, and reports what
//! nccl-tests would.

mod plan;
mod rank;
mod report;
mod sizes;

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use plugin_tests::cuda;
use plugin_tests::launch::Launch;
use plugin_tests::memory::Kind;
use plugin_tests::net::MAX_REQUESTS;
use plugin_tests::nodes::Node;
use plugin_tests::params::Params;

use crate::{plugin, signals};
pub use rank::run as run_rank;
use report::{Report, Row};
use sizes::Sizes;

/// The name under which ranks know what to run.
pub const ENTRY: &str = "perf";

/// What is moved between the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Op {
    /// Each rank sends to the next one and receives from the one before
    Sendrecv,
    /// Each rank sends a different part to every other rank
    Alltoall,
    /// Each rank sends its part to every other rank
    Allgather,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Op::Sendrecv => "sendrecv",
            Op::Alltoall => "alltoall",
            Op::Allgather => "allgather",
        }
    }

    /// nccl-tests' factor from algorithm bandwidth to bus bandwidth.
    fn bus_factor(self, ranks: usize) -> f64 {
        match self {
            Op::Sendrecv => 1.0,
            Op::Alltoall | Op::Allgather => (ranks as f64 - 1.0) / ranks as f64,
        }
    }
}

/// Where the data lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Memory {
    /// GPU memory with two or more GPUs, host memory otherwise
    Auto,
    /// Host memory
    Host,
    /// Host memory that the GPU's driver has page-locked
    Pinned,
    /// GPU memory that other processes can map, as NCCL allocates it
    Device,
}

impl Memory {
    fn name(self) -> &'static str {
        match self {
            Memory::Auto => "auto",
            Memory::Host => "host",
            Memory::Pinned => "pinned",
            Memory::Device => "device",
        }
    }
}

/// The options, named as in nccl-tests where that has them.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// What to move
    #[arg(value_enum)]
    op: Op,
    /// Smallest size in bytes; K, M and G are binary
    #[arg(short = 'b', long, default_value = "8", value_parser = sizes::parse_bytes)]
    minbytes: u64,
    /// Largest size in bytes
    #[arg(short = 'e', long, default_value = "128M", value_parser = sizes::parse_bytes)]
    maxbytes: u64,
    /// Factor from one size to the next
    #[arg(short = 'f', long, default_value_t = 2)]
    stepfactor: u64,
    /// Bytes from one size to the next, instead of a factor
    #[arg(short = 'i', long, value_parser = sizes::parse_bytes)]
    stepbytes: Option<u64>,
    /// Iterations that are timed at each size
    #[arg(short = 'n', long, default_value_t = 20)]
    iters: usize,
    /// Iterations before that
    #[arg(
        short = 'w',
        long = "warmup_iters",
        alias = "warmup-iters",
        default_value_t = 5
    )]
    warmup_iters: usize,
    /// 1: compare every byte that was received at each size
    #[arg(short = 'c', long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    check: u8,
    /// How many ranks, each a process; default: one for each GPU, or 2 in host memory
    #[arg(short = 'r', long)]
    ranks: Option<usize>,
    /// Join that many devices, the first ones, into one, as NCCL joins the ports of a NIC
    #[arg(long)]
    join: Option<i32>,
    /// Where the ranks run, in turn: here, the name of a network namespace, or HOST:PORT of a
    /// `plugin_driver agent`
    #[arg(long, value_delimiter = ',')]
    nodes: Vec<Node>,
    /// The plugin; default: the one installed beside this program, or the loader's
    #[arg(long)]
    plugin: Option<PathBuf>,
    /// ABI version of the plugin's functions, 6 to 12; default: the newest
    #[arg(long, value_parser = clap::value_parser!(u32).range(6..=12))]
    abi: Option<u32>,
    /// Where the data lies
    #[arg(long, value_enum, default_value_t = Memory::Auto)]
    memory: Memory,
    /// Iterations in flight. 1: each waits for the one before, as NCCL's stream order makes them
    #[arg(long, default_value_t = 1)]
    steps: usize,
    /// Connections between two ranks; each carries its part of a message
    #[arg(long, default_value_t = 1)]
    channels: usize,
    /// Measure one-way latency: half the time in which a message goes to rank 1 and one comes back
    #[arg(long, conflicts_with = "oneway")]
    pingpong: bool,
    /// Only rank 0 sends, to rank 1; with --steps, a stream of messages
    #[arg(long)]
    oneway: bool,
    /// Buffers that are used in turn, each as large as the largest size: with enough of them small messages are
    /// not in the caches
    #[arg(long, default_value_t = 1)]
    buffers: usize,
    /// Also write the results to this file, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Seconds that the whole run may take
    #[arg(long, default_value_t = 3600)]
    timeout: u64,
}

/// Who sends, in a sendrecv.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Way {
    /// Everybody.
    Both,
    /// Rank 0.
    #[value(name = "oneway")]
    One,
    /// Rank 0, and rank 1 when it has received.
    #[value(name = "pingpong")]
    PingPong,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Both => "both",
            Way::One => "oneway",
            Way::PingPong => "pingpong",
        }
    }
}

impl Args {
    fn way(&self) -> Way {
        match (self.oneway, self.pingpong) {
            (true, _) => Way::One,
            (_, true) => Way::PingPong,
            _ => Way::Both,
        }
    }
}

struct Place {
    ranks: usize,
    kind: Kind,
    gpus: Vec<String>,
}

/// Decides where to run, or says why that cannot be.
fn place(args: &Args) -> Result<Place, String> {
    let gpus = match args.memory {
        Memory::Host => 0,
        _ => cuda::device_count(),
    };
    if gpus == 0 && matches!(args.memory, Memory::Device | Memory::Pinned) {
        let why = cuda::get()
            .err()
            .map_or("there is no GPU".into(), |e| e.to_string());
        return Err(format!(
            "--memory {} needs GPUs: {why}; --memory host needs none",
            args.memory.name()
        ));
    }
    let device = match args.memory {
        Memory::Host | Memory::Pinned => false,
        Memory::Auto => gpus >= 2,
        Memory::Device => true,
    };
    if device && gpus == 1 && args.ranks.is_none() {
        return Err(
            "--memory device needs two GPUs and this machine has one: --ranks 2 lets two ranks share \
             it, --memory host measures without it"
                .into(),
        );
    }
    let ranks = args.ranks.unwrap_or(if device { gpus } else { 2 });
    if ranks < 2 {
        return Err(format!(
            "--ranks {ranks}: data moves between at least 2 ranks"
        ));
    }
    let names = (0..if device { ranks.min(gpus) } else { 0 })
        .map(|g| {
            cuda::get()
                .and_then(|c| c.device_name(g))
                .unwrap_or_else(|_| "unknown".into())
        })
        .collect();
    let kind = match (device, args.memory) {
        (true, _) => Kind::Vmm,
        (false, Memory::Pinned) => Kind::Pinned,
        (false, _) => Kind::Mmap,
    };
    Ok(Place {
        ranks,
        kind,
        gpus: names,
    })
}

fn check_args(args: &Args) -> Result<Sizes, String> {
    let sizes = Sizes::new(
        args.minbytes,
        args.maxbytes,
        args.stepfactor,
        args.stepbytes,
    )?;
    if args.iters == 0 {
        return Err("--iters 0 measures nothing".into());
    }
    if !(1..=MAX_REQUESTS).contains(&args.steps) {
        return Err(format!(
            "--steps {}: NCCL has 1 to {MAX_REQUESTS} requests",
            args.steps
        ));
    }
    if !(1..=256).contains(&args.channels) {
        return Err(format!(
            "--channels {}: 1 to 256 are possible",
            args.channels
        ));
    }
    if args.way() != Way::Both && args.op != Op::Sendrecv {
        return Err(format!("--{} goes with sendrecv only", args.way().name()));
    }
    if !(1..=1024).contains(&args.buffers) {
        return Err(format!(
            "--buffers {}: 1 to 1024 are possible",
            args.buffers
        ));
    }
    let registered = args.maxbytes.saturating_mul(args.buffers as u64);
    if args.abi.is_some_and(|v| v < 8) && registered > i32::MAX as u64 {
        return Err(
            "before ABI version 8 a registration has at most 2 GiB - 1; lower --maxbytes or --buffers"
                .into(),
        );
    }
    Ok(sizes)
}

/// Runs the benchmark and prints its table; an error if anything failed or any data was wrong.
pub fn run(args: &Args) -> Result<(), String> {
    let sizes = check_args(args)?;
    let place = place(args)?;
    if args.way() != Way::Both && place.ranks != 2 {
        return Err(format!(
            "--{} is between 2 ranks, not {}",
            args.way().name(),
            place.ranks
        ));
    }
    let library = plugin::find(args.plugin.as_deref())?;
    let exe = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
    let mut launch = Launch::new(exe, library.clone(), ENTRY, place.ranks);
    launch.abi = args.abi;
    launch.join = args.join;
    launch.nodes = args.nodes.clone();
    launch.timeout = Duration::from_secs(args.timeout);
    launch.tidy = false;
    launch.interrupt = Some(signals::watch());
    let p = &mut launch.params;
    p.set("op", args.op.name()).set("memory", place.kind.name());
    p.set("min", args.minbytes).set("max", args.maxbytes);
    p.set("factor", args.stepfactor)
        .set("bytes", args.stepbytes.unwrap_or(0));
    p.set("iters", args.iters)
        .set("warmup", args.warmup_iters)
        .set("check", args.check);
    p.set("steps", args.steps).set("channels", args.channels);
    p.set("way", args.way().name()).set("buffers", args.buffers);

    let bar = ProgressBar::with_draw_target(
        Some(sizes.list().len() as u64),
        ProgressDrawTarget::stderr(),
    );
    if let Ok(style) =
        ProgressStyle::with_template("{msg} [{wide_bar}] {pos}/{len} sizes, {elapsed}")
    {
        bar.set_style(style);
    }
    bar.set_message(format!("{}, {} ranks", args.op.name(), place.ranks));

    let mut report = Report::new(args, &place, &library, sizes.list().len());
    let mut problem = None;
    let result = launch.run(&mut |rank, bytes| {
        let p = Params::decode(&String::from_utf8_lossy(&bytes));
        match report.add(rank, &p) {
            Ok(Some(Row { size, .. })) => {
                bar.inc(1);
                bar.set_message(format!("{}, {size} bytes done", args.op.name()));
            }
            Ok(None) => {}
            Err(e) => problem = Some(e),
        }
    });
    bar.finish_and_clear();
    result.map_err(|e| e.to_string())?;
    if let Some(e) = problem {
        return Err(e.to_string());
    }
    report.check_complete()?;
    print!("{}", report.text());
    if let Some(path) = &args.json {
        std::fs::write(path, report.json())
            .map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    match report.wrong() {
        0 => Ok(()),
        n => Err(format!("{n} elements arrived wrong")),
    }
}
