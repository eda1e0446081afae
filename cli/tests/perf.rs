//! `vccl perf` from the outside: help, refusals, and small runs in host memory over the plugin that
//! `ci/build` made (`VCCL_PLUGIN` names another).

use std::path::PathBuf;

use assert_cmd::Command;

fn plugin() -> PathBuf {
    let file = std::env::var_os("VCCL_PLUGIN")
        .map(PathBuf::from)
        .unwrap_or_else(|| {
            let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
            root.parent()
                .expect("the workspace's root")
                .join("target/dist/lib/libnccl-net-vccl.so")
        });
    assert!(
        file.exists(),
        "{} is missing: run ci/build, or set VCCL_PLUGIN",
        file.display()
    );
    file
}

fn vccl(args: &[&str]) -> (bool, String, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_vccl"))
        .args(args)
        .timeout(std::time::Duration::from_secs(120))
        .output()
        .expect("vccl starts");
    let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
    (out.status.success(), text(out.stdout), text(out.stderr))
}

fn perf(args: &[&str]) -> (bool, String, String) {
    let plugin = plugin();
    let mut all = vec!["perf"];
    all.extend(args);
    all.extend([
        "--memory",
        "host",
        "--plugin",
        plugin.to_str().expect("a path in UTF-8"),
    ]);
    vccl(&all)
}

#[test]
fn help_names_the_options_of_nccl_tests() {
    let (ok, out, _) = vccl(&["perf", "--help"]);
    assert!(ok);
    for option in [
        "--minbytes",
        "--maxbytes",
        "--stepfactor",
        "--stepbytes",
        "--iters",
        "--warmup_iters",
        "--check",
        "--ranks",
        "--plugin",
        "--abi",
        "--memory",
        "--steps",
        "--channels",
        "--json",
        "--pingpong",
    ] {
        assert!(out.contains(option), "{option}\n{out}");
    }
    let (ok, out, _) = vccl(&["--help"]);
    assert!(
        ok && out.contains("perf") && out.contains("conformance"),
        "{out}"
    );
}

#[test]
fn what_cannot_be_is_refused_with_its_reason() {
    for (args, reason) in [
        (&["perf", "sendrecv", "-b", "5X"][..], "5X"),
        (&["perf", "sendrecv", "-b", "many"], "many"),
        (
            &["perf", "sendrecv", "-b", "2M", "-e", "1M"],
            "more than --maxbytes",
        ),
        (&["perf", "sendrecv", "-f", "1"], "never ends"),
        (&["perf", "sendrecv", "-i", "0"], "never ends"),
        (&["perf", "sendrecv", "-n", "0"], "measures nothing"),
        (
            &["perf", "sendrecv", "-r", "1", "--memory", "host"],
            "at least 2 ranks",
        ),
        (&["perf", "sendrecv", "--steps", "0"], "--steps 0"),
        (&["perf", "sendrecv", "--channels", "0"], "--channels 0"),
        (&["perf", "sendrecv", "--abi", "5"], "5"),
        (&["perf", "alltoall", "--pingpong"], "sendrecv only"),
        (&["perf", "allgather", "--oneway"], "sendrecv only"),
        (&["perf", "sendrecv", "--oneway", "--pingpong"], "--oneway"),
        (&["perf", "sendrecv", "--buffers", "0"], "--buffers 0"),
        (
            &[
                "perf",
                "sendrecv",
                "--pingpong",
                "-r",
                "3",
                "--memory",
                "host",
            ],
            "2 ranks",
        ),
        (&["perf", "broadcast"], "broadcast"),
        (&["nothing"], "nothing"),
    ] {
        let (ok, _, err) = vccl(args);
        assert!(!ok && err.contains(reason), "{args:?}: {err}");
    }
}

#[test]
fn a_plugin_that_is_not_there_is_named_with_a_cure() {
    let (ok, _, err) = vccl(&[
        "perf",
        "sendrecv",
        "--memory",
        "host",
        "--plugin",
        "/nowhere/x.so",
    ]);
    assert!(
        !ok && err.contains("/nowhere/x.so") && err.contains("--plugin"),
        "{err}"
    );

    let (ok, _, err) = vccl(&[
        "perf",
        "sendrecv",
        "--memory",
        "host",
        "-e",
        "8",
        "--plugin",
        "libnone-such.so",
    ]);
    assert!(
        !ok && err.contains("libnone-such.so") && err.contains("cannot open"),
        "{err}"
    );

    let (ok, _, err) = vccl(&[
        "perf",
        "sendrecv",
        "--memory",
        "host",
        "-e",
        "8",
        "--plugin",
        "libc.so.6",
    ]);
    assert!(!ok && err.contains("no NCCL net plugin"), "{err}");
}

/// The table's rows, as words.
fn rows(out: &str) -> Vec<Vec<String>> {
    out.lines()
        .filter(|l| l.contains(" float "))
        .map(|l| l.split_whitespace().map(String::from).collect())
        .collect()
}

#[test]
fn sendrecv_prints_a_row_for_each_size_and_writes_json() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let json = dir.path().join("out.json");
    let (ok, out, err) = perf(&[
        "sendrecv",
        "-b",
        "1K",
        "-e",
        "64K",
        "-f",
        "4",
        "-n",
        "5",
        "-w",
        "1",
        "--json",
        json.to_str().expect("a path in UTF-8"),
    ]);
    assert!(ok, "{out}\n{err}");
    let table = rows(&out);
    let sizes: Vec<&str> = table.iter().map(|r| r[0].as_str()).collect();
    assert_eq!(sizes, ["1024", "4096", "16384", "65536"], "{out}");
    for r in &table {
        assert_eq!(
            r[1].parse::<usize>().unwrap() * 4,
            r[0].parse::<usize>().unwrap(),
            "{r:?}"
        );
        assert!(r[3].parse::<f64>().unwrap() > 0.0, "{r:?}");
        assert_eq!(r[4], r[5], "sendrecv: algbw and busbw are the same: {r:?}");
        assert_eq!(r[6], "0", "{r:?}");
        assert_eq!(r.len(), 9, "host memory has memcpy beside it: {r:?}");
    }
    assert!(out.contains("# Avg bus bandwidth"), "{out}");
    assert!(out.contains("# Out of bounds values : 0 OK"), "{out}");

    let text = std::fs::read_to_string(&json).expect("the JSON file");
    let v: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(v["operation"], "sendrecv");
    assert_eq!(v["ranks"], 2);
    assert_eq!(v["memory"], "host");
    assert_eq!(v["network"], "vccl");
    assert_eq!(v["wrong"], 0);
    assert!(v["date"].as_str().expect("a date").ends_with('Z'));
    assert!(!v["host"]["cpu"].as_str().expect("a CPU").is_empty());
    assert!(!v["version"].as_str().expect("a version").is_empty());
    let results = v["results"].as_array().expect("results");
    assert_eq!(results.len(), 4);
    for r in results {
        assert!(r["memcpy_gbps"].as_f64().expect("memcpy") > 0.0);
        let ratio = r["algbw_gbps"].as_f64().unwrap() / r["memcpy_gbps"].as_f64().unwrap();
        assert!((r["algbw_to_memcpy"].as_f64().unwrap() - ratio).abs() < 1e-9);
    }
}

#[test]
fn bus_bandwidth_has_the_factors_of_nccl_tests() {
    for (op, ranks, factor) in [("alltoall", 3usize, 2.0 / 3.0), ("allgather", 4, 3.0 / 4.0)] {
        let count = ranks.to_string();
        let (ok, out, err) = perf(&[
            op,
            "-r",
            &count,
            "-b",
            "48K",
            "-e",
            "48K",
            "-n",
            "3",
            "-w",
            "1",
            "--channels",
            "2",
        ]);
        assert!(ok, "{out}\n{err}");
        let table = rows(&out);
        assert_eq!(table.len(), 1, "{out}");
        let (alg, bus): (f64, f64) = (table[0][4].parse().unwrap(), table[0][5].parse().unwrap());
        assert!((bus - alg * factor).abs() <= 0.011, "{op}: {alg} {bus}");
        assert_eq!(
            table[0][1].parse::<usize>().unwrap(),
            (48 << 10) / 4 / ranks
        );
        assert_eq!(table[0][6], "0", "{out}");
    }
}

#[test]
fn oneway_streams_through_buffers_in_turn() {
    let args = [
        "sendrecv",
        "--oneway",
        "--steps",
        "3",
        "--buffers",
        "5",
        "-b",
        "4",
        "-e",
        "4M",
        "-f",
        "32",
        "-n",
        "7",
    ];
    let (ok, out, err) = perf(&args);
    assert!(
        ok && out.contains("rank 0 to rank 1") && out.contains("5 buffers"),
        "{out}\n{err}"
    );
    let table = rows(&out);
    assert_eq!(table.len(), 5, "{out}");
    assert!(table.iter().all(|r| r[6] == "0"), "{out}");
}

#[test]
fn pingpong_steps_and_no_check() {
    let (ok, out, err) = perf(&[
        "sendrecv",
        "--pingpong",
        "-b",
        "8",
        "-e",
        "1K",
        "-f",
        "128",
        "-n",
        "50",
        "--abi",
        "8",
    ]);
    assert!(
        ok && out.contains("one way") && out.contains(", v8)"),
        "{out}\n{err}"
    );
    assert_eq!(rows(&out).len(), 2, "{out}");

    let (ok, out, err) = perf(&[
        "sendrecv", "--steps", "8", "-b", "4", "-e", "4", "-n", "100", "-c", "0",
    ]);
    assert!(ok, "{out}\n{err}");
    assert_eq!(rows(&out)[0][6], "N/A", "{out}");
}

#[test]
fn an_interrupt_stops_the_ranks() {
    use std::process::{Command, Stdio};
    let plugin = plugin();
    /// Ends a run that a failed test leaves behind, with its ranks.
    struct Ended(Option<std::process::Child>);
    impl Drop for Ended {
        fn drop(&mut self) {
            if let Some(mut child) = self.0.take() {
                interrupt(child.id());
                let _ = child.wait();
            }
        }
    }
    fn interrupt(id: u32) -> bool {
        // The shell's own: a system without procps has no program of that name.
        let kill = format!("kill -INT {id}");
        let status = Command::new("sh").args(["-c", &kill]).status();
        status.is_ok_and(|s| s.success())
    }
    let child = Command::new(env!("CARGO_BIN_EXE_vccl"))
        .args([
            "perf",
            "sendrecv",
            "-b",
            "4K",
            "-e",
            "4K",
            "-n",
            "2000000000",
            "--memory",
            "host",
        ])
        .arg("--plugin")
        .arg(&plugin)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("vccl starts");
    let id = child.id();
    let mut running = Ended(Some(child));
    let children =
        || std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let mut ranks: Vec<String> = Vec::new();
    while ranks.len() < 2 && std::time::Instant::now() < end {
        std::thread::sleep(std::time::Duration::from_millis(20));
        ranks = children().split_whitespace().map(String::from).collect();
    }
    assert_eq!(ranks.len(), 2, "two ranks run");
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(interrupt(id));
    let child = running.0.take().expect("still there");
    let out = child.wait_with_output().expect("vccl ends");
    assert!(!out.status.success());
    assert!(String::from_utf8_lossy(&out.stderr).contains("interrupted"));
    for r in ranks {
        assert!(
            !std::path::Path::new(&format!("/proc/{r}")).exists(),
            "rank {r} lives on"
        );
    }
}
