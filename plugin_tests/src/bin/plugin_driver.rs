//! Drives a net plugin as NCCL does: `plugin_driver conformance --plugin X.so`.

use std::process::ExitCode;

use plugin_tests::conformance::{self, command};
use plugin_tests::error::Result;
use plugin_tests::{nodes, rank};

fn main() -> ExitCode {
    rank::enter_if_rank(conformance::find);
    env_logger::init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((first, rest)) if first == "conformance" => command::command(rest, None),
        Some((first, [address])) if first == "agent" => ended(nodes::agent(address)),
        Some((first, [stop, address])) if first == "agent" && stop == "--stop" => {
            ended(nodes::stop_agent(address))
        }
        Some((first, _)) if first == "-h" || first == "--help" => {
            println!("{}", command::USAGE);
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{}", command::USAGE);
            ExitCode::from(2)
        }
    }
}

fn ended(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
