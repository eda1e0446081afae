//! The conformance suite over the plugin that `ci/build` made: one test for each group of cases and
//! ABI version in host memory, and for each kind of memory on the CUDA double.
//!
//! `VCCL_PLUGIN` and `VCCL_CUDA_DOUBLE` name another plugin and another double.

mod support;

use std::path::PathBuf;
use std::time::Duration;

use plugin_tests::conformance::{cases, run_case, Outcome, Setup};
use plugin_tests::launch::Layout;
use plugin_tests::memory::Kind;

struct Run {
    group: &'static str,
    abi: u32,
    send: Kind,
    recv: Kind,
    layout: Layout,
    env: &'static [(&'static str, &'static str)],
}

impl Run {
    fn host(group: &'static str, abi: u32) -> Run {
        Run {
            group,
            abi,
            send: Kind::Malloc,
            recv: Kind::Mmap,
            layout: Layout::Processes,
            env: &[],
        }
    }

    fn go(self) {
        let device = self.send.is_device() || self.recv.is_device();
        let library_dir = device.then(support::double_dir);
        let setup = Setup {
            exe: PathBuf::from(env!("CARGO_BIN_EXE_plugin_driver")),
            plugin: support::plugin(),
            abi: Some(self.abi),
            send: self.send,
            recv: self.recv,
            layout: self.layout,
            join: None,
            nodes: Vec::new(),
            env: self
                .env
                .iter()
                .map(|(k, v)| (k.to_string(), v.to_string()))
                .collect(),
            library_dir,
            timeout: Duration::from_secs(150),
        };
        let mut passed = 0;
        let mut failures = Vec::new();
        for case in cases().filter(|c| c.group == self.group && !c.large) {
            let (outcome, took) = run_case(case, &setup);
            match outcome {
                Outcome::Passed => {
                    passed += 1;
                    println!("{}: passed in {took:?}", case.name);
                }
                Outcome::Skipped(why) => println!("{}: skipped: {why}", case.name),
                Outcome::Failed(why) => failures.push(why),
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n\n"));
        assert!(passed > 0, "group {} has no case that applies", self.group);
    }
}

/// Host memory, one process for each rank.
macro_rules! host {
    ($($version:ident = $abi:literal),* $(,)?) => {$(
        mod $version {
            use super::Run;

            #[test]
            fn setup() {
                Run::host("setup", $abi).go();
            }
            #[test]
            fn data() {
                Run::host("data", $abi).go();
            }
            #[test]
            fn memory() {
                Run::host("memory", $abi).go();
            }
            #[test]
            fn errors() {
                Run::host("errors", $abi).go();
            }
            #[test]
            fn lifecycle() {
                Run::host("lifecycle", $abi).go();
            }
            #[test]
            fn handles() {
                Run::host("handles", $abi).go();
            }
            #[test]
            fn kill() {
                Run::host("kill", $abi).go();
            }
            #[test]
            fn scale() {
                Run::host("scale", $abi).go();
            }
        }
    )*};
}

host! { v6 = 6, v7 = 7, v8 = 8, v9 = 9, v10 = 10, v11 = 11, v12 = 12 }

/// Device memory on the CUDA double, or one end of it.
macro_rules! device {
    ($($name:ident = ($abi:literal, $send:ident, $recv:ident)),* $(,)?) => {$(
        mod $name {
            use super::{Kind, Layout, Run};

            fn run(group: &'static str) {
                let (send, recv) = (Kind::$send, Kind::$recv);
                Run { group, abi: $abi, send, recv, layout: Layout::Processes, env: &[] }.go();
            }

            #[test]
            fn setup() {
                run("setup");
            }
            #[test]
            fn data() {
                run("data");
            }
            #[test]
            fn memory() {
                run("memory");
            }
            #[test]
            fn errors() {
                run("errors");
            }
            #[test]
            fn lifecycle() {
                run("lifecycle");
            }
            #[test]
            fn kill() {
                run("kill");
            }
            #[test]
            fn scale() {
                run("scale");
            }
        }
    )*};
}

device! {
    vmm_v8 = (8, Vmm, Vmm),
    vmm_v12 = (12, Vmm, Vmm),
    cuda = (8, Cuda, Cuda),
    private = (8, VmmPrivate, VmmPrivate),
    host_to_vmm = (8, Malloc, Vmm),
    vmm_to_host = (8, Vmm, Malloc),
    cuda_to_vmm = (12, Cuda, Vmm),
    vmm_to_private = (12, Vmm, VmmPrivate),
}

/// Ranks that are threads of one process, as with one process for several GPUs.
mod threads {
    use super::{Kind, Layout, Run};

    fn run(group: &'static str, abi: u32, kind: Kind) {
        Run {
            group,
            abi,
            send: kind,
            recv: kind,
            layout: Layout::Threads,
            env: &[],
        }
        .go();
    }

    #[test]
    fn host() {
        for group in ["setup", "data", "memory", "errors"] {
            run(group, 8, Kind::Malloc);
            run(group, 12, Kind::Malloc);
        }
    }

    #[test]
    fn vmm() {
        for group in ["setup", "data", "memory", "errors"] {
            run(group, 8, Kind::Vmm);
        }
    }

    #[test]
    fn cuda() {
        for group in ["data", "memory"] {
            run(group, 12, Kind::Cuda);
        }
    }
}

/// All over TCP, as between hosts; GPU memory goes through page-locked chunks.
mod tcp {
    use super::{Kind, Layout, Run};

    const ONE: &[(&str, &str)] = &[("VCCL_TRANSPORT", "tcp")];
    /// Messages are split over these, and overtake each other.
    const FIVE: &[(&str, &str)] = &[("VCCL_TRANSPORT", "tcp"), ("VCCL_NSOCKS_PERTHREAD", "5")];
    /// As many, moved by helping threads.
    const HELPED: &[(&str, &str)] = &[
        ("VCCL_TRANSPORT", "tcp"),
        ("NCCL_SOCKET_NTHREADS", "2"),
        ("NCCL_NSOCKS_PERTHREAD", "2"),
    ];
    const IPV6: &[(&str, &str)] = &[
        ("VCCL_TRANSPORT", "tcp"),
        ("NCCL_SOCKET_IFNAME", "lo"),
        ("NCCL_SOCKET_FAMILY", "AF_INET6"),
    ];

    fn run(
        groups: &[&'static str],
        (send, recv): (Kind, Kind),
        layout: Layout,
        env: &'static [(&'static str, &'static str)],
    ) {
        for group in groups {
            Run {
                group,
                abi: 8,
                send,
                recv,
                layout,
                env,
            }
            .go();
        }
    }

    const ALL: [&str; 7] = [
        "setup",
        "data",
        "memory",
        "errors",
        "lifecycle",
        "kill",
        "scale",
    ];
    const MOST: [&str; 6] = ["setup", "data", "memory", "errors", "lifecycle", "kill"];

    #[test]
    fn host() {
        run(&ALL, (Kind::Malloc, Kind::Mmap), Layout::Processes, ONE);
    }

    #[test]
    fn handles() {
        run(
            &["handles"],
            (Kind::Malloc, Kind::Malloc),
            Layout::Processes,
            ONE,
        );
    }

    #[test]
    fn host_over_several_sockets() {
        run(&MOST, (Kind::Malloc, Kind::Mmap), Layout::Processes, FIVE);
    }

    #[test]
    fn helping_threads() {
        run(&MOST, (Kind::Malloc, Kind::Mmap), Layout::Processes, HELPED);
        run(&MOST, (Kind::Cuda, Kind::Vmm), Layout::Processes, HELPED);
    }

    /// More open files than the usual soft limit allows.
    #[test]
    fn more_sockets_than_the_soft_limit() {
        run(
            &["scale"],
            (Kind::Malloc, Kind::Malloc),
            Layout::Processes,
            &[("VCCL_TRANSPORT", "tcp"), ("VCCL_NSOCKS_PERTHREAD", "3")],
        );
    }

    #[test]
    fn host_over_ipv6() {
        let has_ipv6 = std::net::TcpListener::bind("[::1]:0").is_ok();
        if !has_ipv6 {
            println!("skipped: this machine has no IPv6");
            return;
        }
        run(
            &["setup", "data"],
            (Kind::Malloc, Kind::Malloc),
            Layout::Processes,
            IPV6,
        );
    }

    #[test]
    fn cuda() {
        run(&ALL, (Kind::Cuda, Kind::Cuda), Layout::Processes, ONE);
    }

    #[test]
    fn vmm_over_several_sockets() {
        run(&MOST, (Kind::Vmm, Kind::Vmm), Layout::Processes, FIVE);
    }

    #[test]
    fn host_to_vmm_and_back() {
        run(&MOST, (Kind::Malloc, Kind::Vmm), Layout::Processes, ONE);
        run(&MOST, (Kind::Vmm, Kind::Malloc), Layout::Processes, ONE);
    }

    #[test]
    fn threads() {
        let groups = ["setup", "data", "memory", "errors"];
        run(&groups, (Kind::Malloc, Kind::Malloc), Layout::Threads, ONE);
        run(&groups, (Kind::Cuda, Kind::Cuda), Layout::Threads, ONE);
    }
}
