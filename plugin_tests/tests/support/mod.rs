//! What the integration tests share: where the built files are, and runs whose ranks are processes of
//! the test's own program.

// Each test program uses a part of it.
#![allow(dead_code, unused_macros, unused_imports)]

use std::fmt::Display;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use libtest_mimic::Arguments;
use plugin_tests::error::Result;
use plugin_tests::launch::Launch;
use plugin_tests::memory::Kind;
use plugin_tests::rank::Ctx;

/// Functions with their names.
macro_rules! named {
    ($($f:ident),* $(,)?) => {
        [$((stringify!($f), $f)),*]
    };
}
pub(crate) use named;

/// Says that tests are not run; who lists them is not told.
pub fn not_run(args: &Arguments, why: &dyn Display) {
    if !args.list {
        println!("NOT RUN are the tests that need what is missing here: {why}");
    }
}

/// A file that `ci/build` makes, or that a variable names.
pub fn built(variable: &str, path: &str) -> PathBuf {
    let file = match std::env::var_os(variable) {
        Some(p) => PathBuf::from(p),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .expect("the workspace's root")
            .join("target/dist")
            .join(path),
    };
    assert!(
        file.exists(),
        "{} is missing: run ci/build, or set {variable}",
        file.display()
    );
    file.canonicalize()
        .expect("a file that exists has a full path")
}

/// The plugin.
pub fn plugin() -> PathBuf {
    built("VCCL_PLUGIN", "lib/libnccl-net-vccl.so")
}

/// The folder of the stand-in for the CUDA driver.
pub fn double_dir() -> PathBuf {
    let double = built("VCCL_CUDA_DOUBLE", "double/libcuda.so.1");
    let folder = double.parent().expect("a file lies in a folder");
    folder.to_path_buf()
}

/// Runs at a time. The ranks of a run are some ten threads, and bounds on time are asserted.
const RUNS: usize = 3;

/// The right to run, given back when dropped.
pub struct Turn(());

static RUNNING: Mutex<usize> = Mutex::new(0);
static FREED: Condvar = Condvar::new();

impl Turn {
    /// Waits for it.
    pub fn take() -> Turn {
        let mut n = RUNNING.lock().unwrap_or_else(|e| e.into_inner());
        while *n >= RUNS {
            n = FREED.wait(n).unwrap_or_else(|e| e.into_inner());
        }
        *n += 1;
        Turn(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *RUNNING.lock().unwrap_or_else(|e| e.into_inner()) -= 1;
        FREED.notify_one();
    }
}

/// A run of this program's own entries: the program must have a test `rank_process` that calls
/// `enter_if_rank`, or a `main` that does so first.
pub fn launch(entry: &str, nranks: usize, send: Kind, recv: Kind) -> Launch {
    let exe = std::env::current_exe().expect("a program knows its own path");
    let mut l = Launch::new(exe, plugin(), entry, nranks);
    l.args = ["--exact", "rank_process", "--nocapture", "--test-threads=1"]
        .map(String::from)
        .to_vec();
    l.params.set("send", send.name()).set("recv", recv.name());
    if send.is_device() || recv.is_device() {
        on_double(&mut l, nranks.max(2));
    }
    l.timeout = Duration::from_secs(40);
    l
}

/// Lets the ranks find the CUDA double, with that many devices.
pub fn on_double(l: &mut Launch, devices: usize) {
    l.library_dir = Some(double_dir());
    l.env
        .push(("VCCL_DOUBLE_DEVICES".into(), devices.to_string()));
}

/// What the ranks reported, in the order in which it came: the rank, and a line.
pub type Reports = Vec<(usize, String)>;

/// Runs it, and gives what the ranks reported.
pub fn run(l: &Launch) -> (Result<()>, Reports) {
    let _turn = Turn::take();
    let mut reports = Vec::new();
    let result = l.run(&mut |rank, bytes| {
        reports.push((rank, String::from_utf8_lossy(&bytes).into_owned()));
    });
    (result, reports)
}

/// Runs it, and fails with what the ranks say went wrong.
pub fn must_pass(l: &Launch) -> Reports {
    let (result, reports) = run(l);
    if let Err(e) = result {
        panic!("{}: {e}\nreports: {reports:#?}", l.entry);
    }
    reports
}

/// Reports all lines that the plugin has logged since `mark`, as `log LEVEL TEXT`.
pub fn report_log(ctx: &Ctx, mark: usize) -> Result<()> {
    for l in plugin_tests::logs::lines_since(mark) {
        ctx.oob.up(format!("log {} {}", l.level, l.text))?;
    }
    Ok(())
}

/// The plugin's lines among the reports: of one rank or all, and of WARN level only or all.
pub fn log_of(reports: &Reports, rank: Option<usize>, warnings: bool) -> Vec<&str> {
    reports
        .iter()
        .filter(|(r, _)| rank.is_none_or(|want| want == *r))
        .filter_map(|(_, line)| {
            line.strip_prefix("log 2 ").or_else(|| {
                let all = (!warnings).then_some(line.as_str())?;
                all.strip_prefix("log ")?.split_once(' ').map(|x| x.1)
            })
        })
        .collect()
}

/// What a rank reported behind `word`.
pub fn reported<'a>(reports: &'a Reports, rank: usize, word: &str) -> Option<&'a str> {
    reports
        .iter()
        .filter(|(r, _)| *r == rank)
        .find_map(|(_, l)| l.strip_prefix(word)?.strip_prefix(' '))
}
