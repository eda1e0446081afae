//! Copies, streams, events and violations.

mod common;

use common::*;
use std::time::{Duration, Instant};

#[test]
fn copies_are_asynchronous_ordered_and_take_their_time() {
    let env = [("VCCL_DOUBLE_COPY_DELAY_US", "30000")];
    isolated(
        "copies_are_asynchronous_ordered_and_take_their_time",
        &env,
        || {
            let cu = Cu::start();
            let (a, b, s, e) = (cu.alloc(M), cu.alloc(M), cu.stream(), cu.event());
            let (host, _) = cu.page();
            let (flag, flag_alias) = cu.page();
            poke(host, 0xabcd);
            assert_eq!(cu.cuEventQuery(e), 0, "never recorded");
            let began = Instant::now();
            assert_eq!(cu.cuMemcpyHtoDAsync_v2(a, host, 4096, s), 0);
            assert_eq!(cu.cuMemcpyDtoDAsync_v2(b, a, 4096, s), 0);
            assert_eq!(cu.cuMemcpyDtoHAsync_v2(host + 2048, b, 4, s), 0);
            assert_eq!(cu.cuStreamWriteValue32_v2(s, flag_alias + 64, 9, 0), 0);
            assert_eq!(cu.cuStreamWriteValue64_v2(s, flag_alias + 128, 10, 0), 0);
            assert_eq!(cu.cuEventRecord(e, s), 0);
            assert!(
                began.elapsed() < Duration::from_millis(25),
                "the calls return at once"
            );
            assert_eq!((cu.cuStreamQuery(s), cu.cuEventQuery(e)), (600, 600));
            assert_eq!(peek(flag + 64), 0);
            soon("the value is written", || peek(flag + 64) == 9);
            assert!(
                began.elapsed() >= Duration::from_millis(90),
                "three copies of 30 ms"
            );
            assert_eq!(peek(host + 2048), 0xabcd, "the value comes after the data");
            assert_eq!(cu.cuEventSynchronize(e), 0);
            assert_eq!(peek(flag + 128), 10);
            assert_eq!((cu.cuStreamQuery(s), cu.cuEventQuery(e)), (0, 0));
            // Streams do not wait for each other.
            let other = cu.stream();
            assert_eq!(cu.cuMemcpyDtoDAsync_v2(b, a, 4096, s), 0);
            assert_eq!(cu.cuStreamWriteValue32_v2(other, flag_alias, 5, 0), 0);
            assert_eq!(cu.cuStreamSynchronize(other), 0);
            assert_eq!((peek(flag), cu.cuStreamQuery(s)), (5, 600));
            // Bandwidth counts as well: 2 MiB at 0.02 GB/s are 105 ms.
            assert_eq!(cu.cuStreamSynchronize(s), 0);
            cu.control.set("copy_delay_us", "0").unwrap();
            cu.control.set("copy_gbps", "0.02").unwrap();
            let began = Instant::now();
            assert_eq!(cu.cuMemcpyDtoDAsync_v2(b, a, M, s), 0);
            assert_eq!(cu.cuStreamSynchronize(s), 0);
            assert!(began.elapsed() >= Duration::from_millis(100));
            assert_eq!(cu.control.counter("local_copies"), 3);
            assert_eq!(cu.control.counter("copies_done"), 5);
            assert_eq!(cu.violations(), [""; 0]);
        },
    );
}

#[test]
fn a_stream_waits_for_a_value() {
    isolated("a_stream_waits_for_a_value", &[], || {
        let cu = Cu::start();
        let (flag, alias) = cu.page();
        let (s, device) = (cu.stream(), cu.alloc(64));
        assert_eq!(cu.cuStreamWaitValue32_v2(s, alias, 3, 0), 0);
        assert_eq!(cu.cuStreamWriteValue32_v2(s, alias + 64, 1, 0), 0);
        assert_eq!(cu.cuStreamWriteValue32_v2(s, device, 77, 0), 0);
        poke(flag, 2);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!((peek(flag + 64), cu.cuStreamQuery(s)), (0, 600));
        poke(flag, 4);
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(peek(flag + 64), 1);
        assert_eq!(cu.get(device, 4), 77u32.to_le_bytes());
        assert_eq!(
            cu.cuStreamWriteValue32_v2(s, alias + 2, 1, 0),
            1,
            "unaligned"
        );
        assert_eq!(
            cu.cuStreamWriteValue64_v2(s, alias + 4, 1, 0),
            1,
            "unaligned"
        );
        assert_eq!(
            cu.cuStreamWriteValue32_v2(s, alias + 4096, 1, 0),
            1,
            "past the end"
        );
    });
}

/// Whoever sees a value may let go of the memory that it came from and lies in.
#[test]
fn memory_may_go_as_soon_as_the_value_is_seen() {
    isolated("memory_may_go_as_soon_as_the_value_is_seen", &[], || {
        let cu = Cu::start();
        let s = cu.stream();
        for i in 0..200 {
            let (flag, alias) = cu.page();
            let data = cu.alloc(4096);
            cu.put(data, &7u32.to_le_bytes());
            assert_eq!(cu.cuMemcpyDtoDAsync_v2(data + 2048, data, 1024, s), 0);
            if i % 2 == 0 {
                assert_eq!(cu.cuStreamWriteValue32_v2(s, alias, 7, 0), 0);
            } else {
                assert_eq!(cu.cuMemcpyDtoHAsync_v2(flag, data, 4, s), 0);
            }
            while peek(flag) != 7 {
                std::hint::spin_loop();
            }
            assert_eq!(cu.cuMemFree_v2(data), 0);
            assert_eq!(cu.cuMemFreeHost(flag), 0);
        }
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(cu.violations(), [""; 0]);
    });
}

#[test]
fn rows_are_copied_as_they_lie() {
    isolated("rows_are_copied_as_they_lie", &[], || {
        let cu = Cu::start();
        let (a, b, s) = (cu.alloc(1000), cu.alloc(1000), cu.stream());
        cu.put(a, b"abcdefgh");
        let copy = |dst, src, width| {
            cu.put(b, &[b'.'; 12]);
            let code = cu.cuMemcpy2DAsync_v2(&Rows::two(dst, src, width), s);
            assert_eq!(cu.cuStreamSynchronize(s), 0);
            code
        };
        assert_eq!(copy((b, 3), (a, 3), 3), 0);
        assert_eq!(cu.get(b, 12), b"abcdef......");
        assert_eq!(copy((b, 6), (a, 6), 1), 0);
        assert_eq!(cu.get(b, 12), b"a.....g.....");
        assert_eq!(copy((b + 1, 7), (a, 2), 2), 0);
        assert_eq!(cu.get(b, 12), b".ab.....cd..");
        assert_eq!(copy((b, 2), (a, 3), 3), 1, "a pitch below the width");
        assert_eq!(
            copy((b, 996), (a, 3), 5),
            1,
            "the second row leaves the allocation"
        );
        let mut odd = Rows::two((b, 3), (a, 3), 3);
        odd.dst.kind = 2;
        assert_eq!(
            cu.cuMemcpy2DAsync_v2(&odd, s),
            801,
            "not what the double has"
        );
        assert_eq!(cu.cuMemcpy2DAsync_v2(std::ptr::null(), s), 1);
        assert_eq!(cu.violations(), [""; 0]);
    });
}

#[test]
fn copies_stay_within_one_allocation() {
    isolated("copies_stay_within_one_allocation", &[], || {
        let cu = Cu::start();
        let (a, b, big, s) = (cu.alloc(1000), cu.alloc(1000), cu.alloc(3 * M), cu.stream());
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(b, a, 1000, s), 0);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(b, a, 1001, s), 1);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(b, big, 1001, s), 1);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(0x1000, a, 10, s), 1);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(0, a, 10, s), 1);
        assert_eq!(
            cu.cuMemcpyDtoDAsync_v2(0x1000, a, 0, s),
            0,
            "nothing to copy"
        );
        assert_eq!(cu.cuMemcpyHtoDAsync_v2(a, 0x1000, 10, s), 1, "unreadable");
        let (host, _) = cu.page();
        assert_eq!(cu.cuMemcpyDtoHAsync_v2(host + 4000, big, 100, s), 1);
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(cu.cuMemFree_v2(a), 0);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(b, a, 10, s), 1, "freed");
        assert_eq!(cu.cuMemsetD8_v2(b, 3, 1000), 0);
        assert_eq!(cu.get(b, 1000), [3; 1000]);
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(cu.cuStreamDestroy_v2(s), 0);
        assert_eq!(cu.violations(), [""; 0]);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(b, big, 10, s), 400);
        assert!(cu.violations()[0].contains("stream that is gone"));
    });
}

#[test]
fn peer_memory_needs_access() {
    isolated("peer_memory_needs_access", &[], || {
        let cu = Cu::start();
        let one = cu.context(1);
        let (far, s1) = (cu.alloc(M), cu.stream());
        let zero = cu.context(0);
        let (near, s) = (cu.alloc(M), cu.stream());
        cu.put(near, b"hello");
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(far, near, 5, s), 1);
        assert_eq!(cu.cuStreamWriteValue32_v2(s, far, 1, 0), 1);
        assert_eq!(cu.range(far), Err(500));
        assert_eq!(cu.cuMemcpyPeerAsync(far, one, near, zero, 5, s), 0);
        cu.control.set("peer_strict", "0").unwrap();
        assert_eq!(
            cu.cuMemcpyDtoDAsync_v2(far, near, 5, s),
            0,
            "a driver stages it"
        );
        assert_eq!(cu.control.counter("staged_peer_copies"), 1);
        let path = cu.control.progress();
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(far, near, 5, s), 0);
        drop(path);
        assert!(cu.violations()[0].contains("staged"));
        assert_eq!(cu.cuCtxEnablePeerAccess(one, 0), 0);
        assert_eq!(cu.cuCtxEnablePeerAccess(one, 0), 704);
        assert_eq!(cu.cuCtxEnablePeerAccess(zero, 0), 217);
        assert_eq!(cu.range(far), Ok((far, M)));
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(far, near, 5, s), 0);
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(cu.control.counter("peer_copies"), 2);
        assert_eq!(cu.control.counter("local_copies"), 0);
        assert_eq!(cu.get(far, 5), b"hello");
        // A mapping that only device 1 may use is not for device 0.
        let at = cu.map(cu.create(M, 0), M, 1);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(at, near, 5, s), 1);
        assert_eq!(
            cu.cuMemcpyDtoDAsync_v2(at, far, 5, s1),
            1,
            "asked for in device 0's context"
        );
        assert_eq!(cu.cuCtxSetCurrent(one), 0);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(at, far, 5, s1), 0);
        assert_eq!(cu.cuStreamSynchronize(s1), 0);
    });
}

#[test]
fn what_breaks_a_capture_off_is_told() {
    let env = [("VCCL_DOUBLE_CAPTURE", "1")];
    isolated("what_breaks_a_capture_off_is_told", &env, || {
        let cu = Cu::start();
        cu.control.reset();
        let at = cu.alloc(M);
        assert!(cu.violations()[0].starts_with("breaks a graph capture: cuMemAlloc_v2"));
        cu.control.reset();
        let mut mode = 2;
        assert_eq!(cu.cuThreadExchangeStreamCaptureMode(&mut mode), 0);
        assert_eq!(mode, 0, "global is what a thread begins with");
        assert_eq!(cu.cuMemFree_v2(at), 0);
        assert_eq!(cu.violations(), [""; 0]);
        assert_eq!(cu.cuThreadExchangeStreamCaptureMode(&mut mode), 0);
        assert_eq!(mode, 2);
    });
}

#[test]
fn slow_calls_on_a_progress_path_are_violations() {
    isolated("slow_calls_on_a_progress_path_are_violations", &[], || {
        let cu = Cu::start();
        let one = cu.context(1);
        let far = cu.alloc(M);
        cu.context(0);
        assert_eq!(cu.cuCtxEnablePeerAccess(one, 0), 0);
        let (near, s, e) = (cu.alloc(M), cu.stream(), cu.event());
        let (host, alias) = cu.page();
        let path = cu.control.progress();
        // What belongs there.
        assert_eq!(cu.cuMemcpyAsync(far, near, 64, s), 0);
        assert_eq!(cu.cuMemcpyDtoHAsync_v2(host, near, 64, s), 0);
        let two = Rows::two((near, 32), (alias, 32), 32);
        assert_eq!(cu.cuMemcpy2DAsync_v2(&two, s), 0);
        assert_eq!(cu.cuMemcpyAsync(near, alias, 1, s), 0);
        assert_eq!(cu.cuStreamWriteValue32_v2(s, alias, 1, 0), 0);
        assert_eq!(cu.cuEventRecord(e, s), 0);
        soon("the event is done", || cu.cuEventQuery(e) == 0);
        assert_eq!(cu.violations(), [""; 0]);
        // What does not.
        let pageable = [0u8; 64];
        let mut at = 0;
        let mut expected = 0;
        let mut bad = |what: &str, code: i32| {
            expected += 1;
            assert_eq!(code, 0, "{what}");
            let found = cu.violations();
            assert_eq!(found.len(), expected, "{what}: {found:?}");
            let last = &found[expected - 1];
            assert!(
                last.starts_with("progress path: ") && last.contains(what),
                "{what}: {last}"
            );
        };
        bad(
            "64 bytes from host memory runs as a kernel",
            cu.cuMemcpyAsync(near, alias, 64, s),
        );
        let one_row = Rows { height: 1, ..two };
        bad(
            "32 bytes from host memory runs as a kernel",
            cu.cuMemcpy2DAsync_v2(&one_row, s),
        );
        bad(
            "copies within device 0",
            cu.cuMemcpyAsync(near, near + 64, 64, s),
        );
        bad(
            "pageable",
            cu.cuMemcpyAsync(near, pageable.as_ptr() as u64, 64, s),
        );
        bad("memset", cu.cuMemsetD8Async(near, 0, 64, s));
        bad("cuStreamSynchronize", cu.cuStreamSynchronize(s));
        bad("cuEventSynchronize", cu.cuEventSynchronize(e));
        bad("cuCtxSynchronize", cu.cuCtxSynchronize());
        bad("cuMemAlloc_v2", cu.cuMemAlloc_v2(&mut at, 64));
        bad("cuMemFree_v2", cu.cuMemFree_v2(at));
        bad("cuMemCreate", cu.cuMemCreate(&mut at, M, &prop(0), 0));
        let handle = at;
        bad(
            "cuMemAddressReserve",
            cu.cuMemAddressReserve(&mut at, M, 0, 0, 0),
        );
        bad("cuMemMap", cu.cuMemMap(at, M, 0, handle, 0));
        bad("cuMemSetAccess", cu.grant(at, M, 0, 3));
        bad("cuMemUnmap", cu.cuMemUnmap(at, M));
        bad(
            "cuMemHostRegister_v2",
            cu.cuMemHostRegister_v2(pageable.as_ptr() as usize, 64, 0),
        );
        bad(
            "cuMemHostUnregister",
            cu.cuMemHostUnregister(pageable.as_ptr() as usize),
        );
        bad("cuStreamCreate", cu.cuStreamCreate(&mut at, 1));
        bad("cuStreamDestroy_v2", cu.cuStreamDestroy_v2(at));
        bad("cuEventCreate", cu.cuEventCreate(&mut at, 2));
        bad("cuEventDestroy_v2", cu.cuEventDestroy_v2(at));
        // Other threads are not on it, nor is this one once it has left.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                cu.context(0);
                assert_eq!(cu.cuStreamSynchronize(s), 0);
            });
        });
        let inner = cu.control.progress();
        drop(inner);
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(cu.violations().len(), 22, "the outer mark still counts");
        drop(path);
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(cu.cuMemcpyAsync(near, near + 64, 64, s), 0);
        assert_eq!(cu.violations().len(), 22);
        assert_eq!(cu.control.violation_count(), 22);
        assert_eq!(cu.control.counter("local_copies"), 2);
        cu.control.reset();
        assert_eq!(cu.violations(), [""; 0]);
        let _path = cu.control.progress();
        cu.control.set("allow_local", "1").unwrap();
        assert_eq!(cu.cuMemcpyAsync(near, near + 64, 64, s), 0);
        cu.control.set("progress_strict", "0").unwrap();
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(cu.violations(), [""; 0]);
    });
}

#[test]
fn memory_that_goes_under_a_copy_is_told() {
    let report = std::env::temp_dir().join(format!("double-report-{}", std::process::id()));
    let report = report.to_str().unwrap().to_string();
    let env = [
        ("VCCL_DOUBLE_HANG_COPIES", "1"),
        ("VCCL_DOUBLE_REPORT", report.as_str()),
    ];
    isolated("memory_that_goes_under_a_copy_is_told", &env, || {
        let cu = Cu::start();
        let (a, b, s) = (cu.alloc(M), cu.alloc(100), cu.stream());
        let va = cu.map(cu.create(M, 0), M, 0);
        let (host, _) = cu.page();
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(va, a, 64, s), 0);
        assert_eq!(cu.cuMemcpyHtoDAsync_v2(va, host, 64, s), 0);
        assert_eq!(cu.control.counter("pending_ops"), 2);
        assert_eq!(cu.cuMemFree_v2(b), 0);
        assert_eq!(cu.violations(), [""; 0], "nothing uses that one");
        assert_eq!(cu.cuMemFree_v2(a), 0);
        assert_eq!(cu.cuMemUnmap(va, M), 0);
        assert_eq!(cu.cuMemFreeHost(host), 0);
        let found = cu.violations();
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].contains("freed under a copy") && found[0].contains(&format!("{a:#x}")));
        assert!(found[1].contains("unmapped under a copy"));
        assert!(found[2].contains("unregistered under a copy"));
        // Let go, the copies end without harm to the test; the host memory is not touched.
        cu.control.set("hang_copies", "0").unwrap();
        soon("the stream ends", || cu.cuStreamQuery(s) != 600);
        assert_eq!(cu.cuStreamQuery(s), 700);
        let report = std::fs::read_to_string(std::env::var("VCCL_DOUBLE_REPORT").unwrap()).unwrap();
        assert_eq!(report.lines().count(), 3);
    });
    std::fs::remove_file(report).unwrap();
}

#[test]
fn copies_hang_until_they_are_released() {
    isolated("copies_hang_until_they_are_released", &[], || {
        let cu = Cu::start();
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
        cu.context(1);
        let (far, s1) = (cu.alloc(M), cu.stream());
        cu.context(0);
        let (near, s) = (cu.alloc(M), cu.stream());
        let (flag, alias) = cu.page();
        let before = threads();
        cu.control.set("hang_devices", "0").unwrap();
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(near, near + 64, 64, s), 0);
        assert_eq!(cu.cuStreamWriteValue32_v2(s, alias, 1, 0), 0);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(far, far + 64, 64, s1), 0);
        assert_eq!(cu.cuStreamSynchronize(s1), 0, "device 1 does not hang");
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!((cu.cuStreamQuery(s), peek(flag)), (600, 0));
        // Streams can be made and destroyed meanwhile, even the one that hangs.
        let extra = cu.stream();
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(near, near + 64, 64, extra), 0);
        assert_eq!(cu.cuStreamDestroy_v2(extra), 0);
        cu.control.set("hang_copies", "0").unwrap();
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(peek(flag), 1);
        soon("the destroyed stream's thread ends", || threads() == before);
        cu.control.set("hang_copies", "1").unwrap();
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(near, near + 64, 64, s), 0);
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(cu.cuStreamQuery(s), 600);
        cu.control.reset();
        assert_eq!(cu.cuStreamSynchronize(s), 0);
    });
}

#[test]
fn a_failed_copy_stays_with_its_context() {
    isolated("a_failed_copy_stays_with_its_context", &[], || {
        let cu = Cu::start();
        let one = cu.context(1);
        let s1 = cu.stream();
        let far = cu.alloc(64);
        let zero = cu.context(0);
        let (near, s, e) = (cu.alloc(M), cu.stream(), cu.event());
        let (flag, alias) = cu.page();
        cu.control.set("async_fail", "719:2").unwrap();
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(near, near + 64, 64, s), 0);
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(
            cu.cuMemcpyDtoDAsync_v2(near, near + 64, 64, s),
            0,
            "the call knows nothing yet"
        );
        let _ = cu.cuStreamWriteValue32_v2(s, alias, 1, 0);
        soon("the copy fails", || cu.cuStreamQuery(s) == 719);
        assert_eq!(cu.cuEventQuery(e), 719);
        assert_eq!(cu.cuStreamSynchronize(s), 719);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(near, near + 64, 64, s), 719);
        let mut at = 0;
        assert_eq!(cu.cuMemAlloc_v2(&mut at, 10), 719);
        assert_eq!(peek(flag), 0, "nothing more happens in the context");
        assert_eq!(cu.cuCtxSetCurrent(one), 0);
        assert_eq!(
            cu.cuMemcpyDtoDAsync_v2(far, far + 32, 32, s1),
            0,
            "another is not concerned"
        );
        assert_eq!(cu.cuStreamSynchronize(s1), 0);
        cu.control.reset();
        assert_eq!(cu.cuCtxSetCurrent(zero), 0);
        assert_eq!(cu.cuStreamSynchronize(s), 0);
    });
}
