//! The driver itself: what it says when something is wrong with what it is given.

use std::process::Command;

fn driver(args: &[&str]) -> (bool, String, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_plugin_driver"))
        .args(args)
        .output()
        .expect("the driver starts");
    let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
    (out.status.success(), text(out.stdout), text(out.stderr))
}

#[test]
fn the_list_names_every_case() {
    let (ok, out, _) = driver(&["conformance", "--list", "--large"]);
    assert!(ok);
    assert_eq!(
        out.lines().count(),
        plugin_tests::conformance::cases().count()
    );
    assert!(out.contains("kill_transfer") && out.contains("sizes_1g"));
}

#[test]
fn wrong_options_are_named() {
    for (args, word) in [
        (&["conformance", "--plugin"][..], "needs a value"),
        (&["conformance", "--nonsense"], "--nonsense"),
        (&["conformance", "--memory", "paper"], "paper"),
        (&["conformance", "--case", "none_such"], "none_such"),
        (&["conformance"], "--plugin is missing"),
        (&[], "usage"),
    ] {
        let (ok, _, err) = driver(args);
        assert!(!ok && err.contains(word), "{args:?}: {err}");
    }
}

#[test]
fn a_missing_plugin_and_a_library_that_is_none_fail_with_their_path() {
    let (ok, out, _) = driver(&[
        "conformance",
        "--plugin",
        "/nowhere/libnccl-net-x.so",
        "--case",
        "properties",
    ]);
    assert!(!ok && out.contains("/nowhere/libnccl-net-x.so"), "{out}");
    assert!(out.contains("0 passed, 1 failed"), "{out}");

    let (ok, out, _) = driver(&[
        "conformance",
        "--plugin",
        "libc.so.6",
        "--case",
        "properties",
    ]);
    assert!(!ok && out.contains("no NCCL net plugin"), "{out}");
}
