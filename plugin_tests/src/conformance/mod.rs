//! The conformance suite: what NCCL needs of a net plugin, as named cases. Each case is a function
//! that all ranks of a run call; it is written once and runs over every ABI version, kind of memory
//! and transport.

pub mod command;
mod errors;
mod fault;
mod flow;
mod handles;
mod kill;
mod lifecycle;
mod memory;
mod scale;
mod setup;
mod sizes;
pub mod util;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::launch::{Launch, Layout};
use crate::memory::Kind;
use crate::nodes::Node;
use crate::rank::Entry;

/// A case of the suite.
pub struct Case {
    /// Its name, without blanks.
    pub name: &'static str,
    /// The group that it belongs to.
    pub group: &'static str,
    /// What it asserts.
    pub about: &'static str,
    /// How many ranks it needs.
    pub nranks: usize,
    /// Ranks that die in it.
    pub victims: &'static [usize],
    /// Whether it moves data, so that running it with other memory tests something else.
    pub memory: bool,
    /// Whether its ranks can be threads of one process.
    pub threads: bool,
    /// Whether it needs much memory or time and only runs when asked for.
    pub large: bool,
    /// The soft limit of open files.
    pub nofile: Option<u64>,
    /// What every rank runs.
    pub run: Entry,
}

impl Case {
    const fn new(
        name: &'static str,
        group: &'static str,
        nranks: usize,
        run: Entry,
        about: &'static str,
    ) -> Case {
        Case {
            name,
            group,
            about,
            nranks,
            victims: &[],
            memory: true,
            threads: true,
            large: false,
            nofile: None,
            run,
        }
    }

    const fn without_memory(self) -> Case {
        Case {
            memory: false,
            ..self
        }
    }

    const fn processes_only(self) -> Case {
        Case {
            threads: false,
            ..self
        }
    }

    const fn killing(self, victims: &'static [usize]) -> Case {
        Case {
            victims,
            threads: false,
            ..self
        }
    }
}

/// Every case, in the order in which they run.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    [
        setup::CASES,
        sizes::CASES,
        flow::CASES,
        memory::CASES,
        errors::CASES,
        lifecycle::CASES,
        handles::CASES,
        kill::CASES,
        scale::CASES,
        fault::CASES,
    ]
    .into_iter()
    .flatten()
}

/// The entry of the case of that name: what [`crate::rank::enter_if_rank`] needs.
pub fn find(name: &str) -> Option<Entry> {
    cases().find(|c| c.name == name).map(|c| c.run)
}

/// Under which conditions cases run.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The program that hosts the ranks.
    pub exe: PathBuf,
    /// The plugin's library.
    pub plugin: PathBuf,
    /// The ABI version, or the newest that the plugin has.
    pub abi: Option<u32>,
    /// The kind of memory that is sent from.
    pub send: Kind,
    /// The kind of memory that is received into.
    pub recv: Kind,
    /// Processes or threads.
    pub layout: Layout,
    /// How many devices to join into one.
    pub join: Option<i32>,
    /// Where the processes run, in turn.
    pub nodes: Vec<Node>,
    /// Environment variables for the ranks: how a transport is chosen.
    pub env: Vec<(String, String)>,
    /// The folder of a stand-in for the CUDA driver.
    pub library_dir: Option<PathBuf>,
    /// The longest that a case may take.
    pub timeout: Duration,
}

/// How a case ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All that it asserts holds.
    Passed,
    /// It does not apply here, and this is why.
    Skipped(String),
    /// This does not hold.
    Failed(String),
}

/// Runs a case and says how it ended, and how long it took.
pub fn run_case(case: &Case, setup: &Setup) -> (Outcome, Duration) {
    let start = Instant::now();
    if setup.layout == Layout::Threads && !case.threads {
        let why = "its ranks must be processes".to_string();
        return (Outcome::Skipped(why), start.elapsed());
    }
    let mut launch = Launch::new(
        setup.exe.clone(),
        setup.plugin.clone(),
        case.name,
        case.nranks,
    );
    launch.abi = setup.abi;
    launch.layout = setup.layout;
    launch.join = setup.join;
    launch.nodes = setup.nodes.clone();
    launch.env = setup.env.clone();
    launch.library_dir = setup.library_dir.clone();
    if setup.library_dir.is_some() {
        // Settings of the CUDA double. NCCL never has two ranks on one GPU.
        let mut set = |name: &str, value: String| {
            if !launch.env.iter().any(|e| e.0 == name) {
                launch.env.push((name.to_string(), value));
            }
        };
        set("VCCL_DOUBLE_DEVICES", case.nranks.max(2).to_string());
        // An application may capture a graph at any time.
        set("VCCL_DOUBLE_CAPTURE", "1".to_string());
        if setup.recv == Kind::VmmPrivate {
            // Nobody else can write into such memory: a copy within the GPU is all that is left.
            set("VCCL_DOUBLE_ALLOW_LOCAL", "1".to_string());
        }
    }
    launch.nofile = case.nofile;
    launch.victims = case.victims.to_vec();
    launch.timeout = setup.timeout;
    launch
        .params
        .set("send", setup.send.name())
        .set("recv", setup.recv.name());
    let outcome = match launch.run(&mut |_, _| {}) {
        Ok(()) => Outcome::Passed,
        Err(e) if e.is_skip() => Outcome::Skipped(e.to_string()),
        Err(e) => Outcome::Failed(format!("case {}: {e}", case.name)),
    };
    (outcome, start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_case_says_what_it_asserts() {
        let mut names: Vec<&str> = cases().map(|c| c.name).collect();
        let n = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), n);
        for c in cases() {
            assert!(c.about.len() > 20 && c.nranks > 0, "{}", c.name);
            assert!(find(c.name).is_some());
        }
    }
}
