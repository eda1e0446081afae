//! The suite's command line, for `plugin_driver conformance` and `vccl conformance`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use super::{cases, find, run_case, Case, Outcome, Setup};
use crate::launch::Layout;
use crate::memory::Kind;
use crate::nodes::Node;

/// The options.
pub const USAGE: &str = "\
usage: conformance --plugin LIBRARY [options]
       conformance --list
       agent ADDRESS:PORT         starts ranks for a driver elsewhere, whatever it asks for
       agent --stop ADDRESS:PORT  ends that

  --plugin LIBRARY    the net plugin to test
  --abi N[,N...]      ABI versions, 6 to 12; default: the newest that the plugin has
  --memory K[,K...]   kinds of memory: host, mmap, pinned, cuda, vmm, vmm-private, or a pair as vmm:host
                      for sender and receiver; default: host
  --case NAME         only this case; may be repeated
  --group NAME        only this group; may be repeated
  --large             also the cases that need much memory
  --threads           ranks are threads of one process
  --join N            join the first N devices into one, as NCCL joins the ports of a NIC
  --nodes N[,N...]    where the ranks' processes run, in turn: here, the name of a network
                      namespace (needs root), or HOST:PORT of an agent
  --cuda-dir FOLDER   the ranks' loader looks there first: for a stand-in of libcuda.so.1
  --env NAME=VALUE    for the ranks; may be repeated. NAME@1=VALUE is for rank 1 alone
  --timeout SECONDS   for each case; default: 60
  --list              print the cases and what they assert

Environment: VCCL_DRIVER_LOG=warn or info prints the plugin's log; VCCL_DRIVER_SLOW=SECONDS allows a close
or a deregistration so long (default: 1), for machines that stand still now and then.";

struct Options {
    plugin: Option<PathBuf>,
    abis: Vec<Option<u32>>,
    memory: Vec<(Kind, Kind)>,
    cases: Vec<String>,
    groups: Vec<String>,
    large: bool,
    layout: Layout,
    join: Option<i32>,
    nodes: Vec<Node>,
    cuda_dir: Option<PathBuf>,
    env: Vec<(String, String)>,
    timeout: Duration,
    list: bool,
}

fn parse(args: &[String]) -> Result<Options, String> {
    let mut o = Options {
        plugin: None,
        abis: vec![None],
        memory: vec![(Kind::Malloc, Kind::Malloc)],
        cases: Vec::new(),
        groups: Vec::new(),
        large: false,
        layout: Layout::Processes,
        join: None,
        nodes: Vec::new(),
        cuda_dir: None,
        env: Vec::new(),
        timeout: Duration::from_secs(60),
        list: false,
    };
    let mut args = args.iter();
    while let Some(a) = args.next() {
        let mut value = || {
            args.next()
                .cloned()
                .ok_or_else(|| format!("{a} needs a value"))
        };
        match a.as_str() {
            "--plugin" => o.plugin = Some(value()?.into()),
            "--abi" => o.abis = list(&value()?, |v| v.parse().map(Some).map_err(|_| no(v)))?,
            "--memory" => o.memory = list(&value()?, kinds)?,
            "--case" => o.cases.push(value()?),
            "--group" => o.groups.push(value()?),
            "--large" => o.large = true,
            "--threads" => o.layout = Layout::Threads,
            "--join" => {
                let v = value()?;
                o.join = Some(v.parse().map_err(|_| no(&v))?);
            }
            "--nodes" => o.nodes = list(&value()?, str::parse)?,
            "--cuda-dir" => o.cuda_dir = Some(value()?.into()),
            "--env" => {
                let text = value()?;
                let (k, v) = text.split_once('=').ok_or("--env needs NAME=VALUE")?;
                if k.split_once('@')
                    .is_some_and(|(_, rank)| rank.parse::<usize>().is_err())
                {
                    return Err(format!("--env {k}: behind @ stands the number of a rank"));
                }
                o.env.push((k.to_string(), v.to_string()));
            }
            "--timeout" => {
                let v = value()?;
                o.timeout = Duration::from_secs(v.parse().map_err(|_| no(&v))?);
            }
            "--list" => o.list = true,
            other => return Err(format!("unknown option {other}")),
        }
    }
    if o.layout == Layout::Threads && !o.nodes.is_empty() {
        return Err("--threads: all ranks are in one process; --nodes is for several".into());
    }
    if o.layout == Layout::Threads && o.env.iter().any(|(k, _)| k.contains('@')) {
        return Err(
            "--threads: all ranks have one environment; --env NAME@RANK is for several".into(),
        );
    }
    for name in &o.cases {
        if find(name).is_none() {
            return Err(format!("there is no case {name}; --list names them all"));
        }
    }
    Ok(o)
}

fn no(value: &str) -> String {
    format!("{value} is not a number that fits")
}

fn list<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    text.split(',').map(parse).collect()
}

fn kinds(text: &str) -> Result<(Kind, Kind), String> {
    let (a, b) = text.split_once(':').unwrap_or((text, text));
    let kind = |n: &str| Kind::parse(n).map_err(|e| e.to_string());
    Ok((kind(a)?, kind(b)?))
}

fn selected(o: &Options) -> Vec<&'static Case> {
    cases()
        .filter(|c| o.cases.is_empty() || o.cases.iter().any(|n| n == c.name))
        .filter(|c| o.groups.is_empty() || o.groups.iter().any(|g| g == c.group))
        .filter(|c| !c.large || o.large || o.cases.iter().any(|n| n == c.name))
        .collect()
}

/// Runs what `args`, the words after `conformance`, ask for. `plugin` is tested if they name none.
pub fn command(args: &[String], plugin: Option<PathBuf>) -> ExitCode {
    if args.iter().any(|a| a == "-h" || a == "--help") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let o = match parse(args) {
        Ok(o) => o,
        Err(e) => {
            eprintln!("{e}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let chosen = selected(&o);
    if o.list {
        for c in chosen {
            println!(
                "{:<22} {:<10} {}{}",
                c.name,
                c.group,
                c.about,
                if c.large { " (large)" } else { "" }
            );
        }
        return ExitCode::SUCCESS;
    }
    let Some(plugin) = o.plugin.clone().or(plugin) else {
        eprintln!("--plugin is missing\n\n{USAGE}");
        return ExitCode::from(2);
    };
    let exe = match std::env::current_exe() {
        Ok(e) => e,
        Err(e) => {
            eprintln!("cannot find this program itself: {e}");
            return ExitCode::FAILURE;
        }
    };
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for abi in &o.abis {
        for (i, (send, recv)) in o.memory.iter().enumerate() {
            for case in &chosen {
                if i > 0 && !case.memory {
                    continue;
                }
                let setup = Setup {
                    exe: exe.clone(),
                    plugin: plugin.clone(),
                    abi: *abi,
                    send: *send,
                    recv: *recv,
                    layout: o.layout,
                    join: o.join,
                    nodes: o.nodes.clone(),
                    env: o.env.clone(),
                    library_dir: o.cuda_dir.clone(),
                    timeout: o.timeout,
                };
                let (outcome, took) = run_case(case, &setup);
                let word = match &outcome {
                    Outcome::Passed => {
                        passed += 1;
                        "ok"
                    }
                    Outcome::Skipped(_) => {
                        skipped += 1;
                        "skipped"
                    }
                    Outcome::Failed(_) => {
                        failed += 1;
                        "FAILED"
                    }
                };
                let abi = abi.map_or("newest".to_string(), |v| format!("v{v}"));
                print!(
                    "{word:<8} {:<22} abi {abi} {}:{} {:.2} s",
                    case.name,
                    send.name(),
                    recv.name(),
                    took.as_secs_f64()
                );
                match outcome {
                    Outcome::Passed => println!(),
                    Outcome::Skipped(why) => println!(" ({why})"),
                    Outcome::Failed(why) => println!("\n{}", indent(&why)),
                }
            }
        }
    }
    let more = if skipped > 0 {
        format!(", {skipped} skipped")
    } else {
        String::new()
    };
    println!("{passed} passed, {failed} failed{more}");
    if failed > 0 || passed == 0 {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

fn indent(text: &str) -> String {
    text.lines()
        .map(|l| format!("    {l}"))
        .collect::<Vec<_>>()
        .join("\n")
}
