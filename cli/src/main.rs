//! The vccl command line: measures and tests the plugin without NCCL or MPI.

mod perf;
mod plugin;
mod signals;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use plugin_tests::conformance;
use plugin_tests::rank::{self, Entry};

#[derive(Parser)]
#[command(
    name = "vccl",
    version,
    about = "Measures and tests vccl, the SM-free net plugin for NCCL"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure bandwidth and latency over the plugin, with the columns of nccl-tests
    Perf(perf::Args),
    /// Run the conformance suite on the plugin; `vccl conformance -- --help` shows its options
    Conformance {
        /// The plugin; default: the one that belongs to this program
        #[arg(long)]
        plugin: Option<PathBuf>,
        /// Options of the suite
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
}

/// What a rank that this program started runs.
fn entry(name: &str) -> Option<Entry> {
    if name == perf::ENTRY {
        return Some(perf::run_rank);
    }
    conformance::find(name)
}

fn main() -> ExitCode {
    rank::enter_if_rank(entry);
    env_logger::init();
    match Cli::parse().command {
        Command::Perf(args) => match perf::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("vccl perf: {e}");
                ExitCode::FAILURE
            }
        },
        Command::Conformance { plugin, options } => match plugin::find(plugin.as_deref()) {
            Ok(p) => conformance::command::command(&options, Some(p)),
            Err(e) => {
                eprintln!("vccl conformance: {e}");
                ExitCode::FAILURE
            }
        },
    }
}
