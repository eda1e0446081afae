//! Devices, contexts, pointers, mappings: what a driver answers.

mod common;

use common::*;
use std::os::unix::process::ExitStatusExt;

#[test]
fn every_entry_point_is_exported_and_needs_cuinit() {
    isolated(
        "every_entry_point_is_exported_and_needs_cuinit",
        &[],
        || {
            let cu = Cu::load();
            for name in NAMES {
                cu.symbol(name);
            }
            let mut n = 0;
            assert_eq!(cu.cuDeviceGetCount(&mut n), 3);
            assert_eq!(cu.cuCtxSynchronize(), 3);
            assert_eq!(cu.cuDriverGetVersion(&mut n), 0);
            assert_eq!(cu.cuInit(1), 1);
            assert_eq!(cu.cuInit(0), 0);
            assert_eq!(cu.cuDeviceGetCount(&mut n), 0);
            assert_eq!(n, 2);
            let mut at = 0;
            assert_eq!(cu.cuMemAlloc_v2(&mut at, 100), 201);
            assert_eq!(cu.cuCtxSynchronize(), 201);
            let mut text = std::ptr::null();
            assert_eq!(cu.cuGetErrorName(1, &mut text), 0);
            // SAFETY: the call gave a text that ends in NUL.
            let name = unsafe { std::ffi::CStr::from_ptr(text) };
            assert_eq!(name.to_str().unwrap(), "CUDA_ERROR_INVALID_VALUE");
            assert_eq!(cu.cuGetErrorString(123456, &mut text), 1);
        },
    );
}

#[test]
fn a_cpu_access_to_device_memory_faults() {
    let test = "a_cpu_access_to_device_memory_faults";
    for (which, violent) in [
        ("alloc", true),
        ("vmm", true),
        ("alias", true),
        ("none", false),
    ] {
        let status = outcome(test, &[("WHICH", which)], || {
            let cu = Cu::start();
            let at = match std::env::var("WHICH").unwrap().as_str() {
                "alloc" => cu.alloc(4096),
                "vmm" => cu.map(cu.create(M, 0), M, 0),
                "alias" => cu.page().1,
                _ => cu.page().0 as u64,
            };
            // SAFETY: none: the access is the stray one that must fault.
            let byte = unsafe { (at as *const u8).read_volatile() };
            assert_eq!(byte, 0);
        });
        let signal = if violent { Some(libc::SIGSEGV) } else { None };
        assert_eq!(status.signal(), signal, "{which}: {status}");
    }
}

#[test]
fn devices_contexts_and_their_stack() {
    isolated(
        "devices_contexts_and_their_stack",
        &[("VCCL_DOUBLE_DEVICES", "3")],
        || {
            let cu = Cu::load();
            assert_eq!(cu.cuInit(0), 0);
            let (mut n, mut ctx, mut other) = (0, 0, 0);
            assert_eq!(cu.cuDeviceGet(&mut n, 2), 0);
            assert_eq!(cu.cuDeviceGet(&mut n, 3), 101);
            let mut text = [0u8; 20];
            assert_eq!(cu.cuDeviceGetPCIBusId(text.as_mut_ptr(), 20, 2), 0);
            assert_eq!(&text[..13], b"0000:12:00.0\0");
            assert_eq!(cu.cuCtxGetCurrent(&mut ctx), 0);
            assert_eq!(ctx, 0);
            assert_eq!(cu.cuDevicePrimaryCtxRetain(&mut ctx, 1), 0);
            assert_eq!(cu.cuDevicePrimaryCtxRetain(&mut other, 1), 0);
            assert_eq!(ctx, other, "one primary context per device");
            assert_eq!(cu.cuCtxSetCurrent(ctx), 0);
            assert_eq!(cu.cuCtxGetDevice(&mut n), 0);
            assert_eq!(n, 1);
            assert_eq!(cu.cuCtxCreate_v2(&mut other, 0, 2), 0);
            assert_eq!(cu.cuCtxGetDevice(&mut n), 0);
            assert_eq!(n, 2);
            let buffer = cu.alloc(100);
            assert_eq!(cu.cuCtxDestroy_v2(other), 0);
            assert_eq!(
                cu.attr(buffer, 7),
                Err(1),
                "its memory went with the context"
            );
            assert_eq!(cu.cuCtxGetDevice(&mut n), 0);
            assert_eq!(n, 1);
            assert_eq!(cu.cuCtxSetCurrent(other), 201);
            let (mut least, mut greatest) = (1, 1);
            assert_eq!(cu.cuCtxGetStreamPriorityRange(&mut least, &mut greatest), 0);
            assert_eq!((least, greatest), (0, -5));
            assert_eq!(cu.cuCtxPopCurrent_v2(&mut other), 0);
            assert_eq!(other, ctx);
            assert_eq!(cu.cuCtxPopCurrent_v2(&mut other), 201);
        },
    );
}

#[test]
fn allocations_share_blocks_and_addresses_return_with_new_ids() {
    isolated(
        "allocations_share_blocks_and_addresses_return_with_new_ids",
        &[],
        || {
            let cu = Cu::start();
            let (a, b, big) = (cu.alloc(1000), cu.alloc(1000), cu.alloc(5 << 20));
            assert_eq!(b - a, 1024, "small buffers lie in one block");
            assert_eq!(big % M as u64, 0);
            assert_eq!(cu.range(b + 999), Ok((b, 1000)));
            assert_eq!(cu.range(a + 1000), Err(500));
            assert_eq!(
                cu.attr(a, 19),
                cu.attr(b, 19),
                "the block begins at one place"
            );
            assert_eq!((cu.attr(b, 18), cu.attr(b, 12)), (Ok(M as u64), Ok(1000)));
            assert_eq!(
                (cu.attr(a, 2), cu.attr(a, 9), cu.attr(a, 10)),
                (Ok(2), Ok(0), Ok(1))
            );
            let id = cu.attr(big, 7).unwrap();
            assert_eq!(cu.attr(big + 77, 7), Ok(id));
            assert_eq!(cu.cuMemFree_v2(big + 512), 1);
            assert_eq!(cu.cuMemFree_v2(big), 0);
            assert_eq!(cu.cuMemFree_v2(big), 1);
            assert_eq!(cu.alloc(5 << 20), big, "the address comes back");
            assert_ne!(cu.attr(big, 7), Ok(id), "with another identity");
            assert_eq!(cu.get(big, 4), [0; 4], "and fresh bytes");
            let local = 5u32;
            assert_eq!(cu.attr((&raw const local) as u64, 2), Err(1));
            let (mut kind, mut ordinal) = (9u32, 9i32);
            let to = [(&raw mut kind).cast(), (&raw mut ordinal).cast()];
            let which = [2, 9];
            assert_eq!(
                cu.cuPointerGetAttributes(2, which.as_ptr(), to.as_ptr(), 0x1000),
                0
            );
            assert_eq!((kind, ordinal), (0, -2));
            assert_eq!(
                cu.cuPointerGetAttributes(2, which.as_ptr(), to.as_ptr(), a),
                0
            );
            assert_eq!((kind, ordinal), (2, 0));
            let mut at = 0;
            assert_eq!(cu.cuMemAlloc_v2(&mut at, 0), 1);
            assert_eq!(cu.cuMemAlloc_v2(&mut at, 1 << 40), 2);
        },
    );
}

#[test]
fn physical_memory_mappings_and_access() {
    isolated("physical_memory_mappings_and_access", &[], || {
        let cu = Cu::start();
        let (mut h, mut size) = (0, 0);
        assert_eq!(cu.cuMemCreate(&mut h, M + 4096, &prop(0), 0), 1);
        assert_eq!(
            cu.cuMemCreate(
                &mut h,
                M,
                &Prop {
                    handle_types: 8,
                    ..prop(0)
                },
                0
            ),
            800
        );
        assert_eq!(cu.cuMemGetAllocationGranularity(&mut size, &prop(0), 0), 0);
        assert_eq!(size, M);
        let (h, h2) = (cu.create(M, 0), cu.create(M, 0));
        let va = cu.reserve(4 * M);
        assert_eq!(cu.cuMemMap(va, M, 4096, h, 0), 801);
        assert_eq!(cu.cuMemMap(va, 2 * M, 0, h, 0), 801);
        assert_eq!(cu.cuMemMap(va, M, 0, h, 0), 0);
        assert_eq!(cu.cuMemMap(va, M, 0, h2, 0), 1, "taken");
        assert_eq!(
            cu.cuMemMap(va + 4 * M as u64, M, 0, h2, 0),
            1,
            "not reserved"
        );
        assert_eq!(cu.cuMemMap(va + M as u64, M, 0, h2, 0), 0);
        // Without access nothing is found there, and nothing copied.
        let (buf, s) = (cu.alloc(4096), cu.stream());
        assert_eq!(cu.range(va), Err(500));
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(va, buf, 100, s), 1);
        assert_eq!(cu.grant(va, M / 2, 0, 3), 1, "mappings are granted whole");
        assert_eq!(cu.grant(va, 3 * M, 0, 3), 1, "a hole");
        assert_eq!(cu.grant(va, M, 0, 1), 0);
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(va, buf, 100, s), 1, "only readable");
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(buf, va, 100, s), 0);
        assert_eq!(cu.grant(va, 2 * M, 0, 3), 0);
        assert_eq!(cu.range(va + M as u64 + 5), Ok((va + M as u64, M)));
        assert_eq!(
            (cu.attr(va + M as u64, 11), cu.attr(va + M as u64, 12)),
            (Ok(va), Ok(4 * M as u64))
        );
        assert_ne!(cu.attr(va, 7), cu.attr(va + M as u64, 7));
        assert_eq!(cu.attr(va, 10), Ok(0), "not for legacy IPC");
        // A copy may cross from one mapping into the next, not beyond the last.
        let seam = va + M as u64 - 2;
        cu.put(seam, b"seam");
        assert_eq!(cu.get(seam, 4), b"seam");
        assert_eq!(cu.get(va + M as u64, 2), b"am");
        assert_eq!(cu.cuMemcpyDtoDAsync_v2(va + 2 * M as u64 - 2, buf, 4, s), 1);
        // Handles are counted, and a mapping gives its own again.
        let (mut again, mut fd, mut ipc) = (0, -1, Ipc([0; 64]));
        assert_eq!(cu.cuMemRelease(h), 0);
        assert_eq!(cu.cuMemRelease(h), 1);
        assert_eq!(cu.cuMemExportToShareableHandle(&mut fd, h, 1, 0), 1);
        assert_eq!(cu.cuMemRetainAllocationHandle(&mut again, va + 100), 0);
        assert_eq!(again, h);
        assert_eq!(cu.cuMemRetainAllocationHandle(&mut again, buf), 1);
        assert_eq!(cu.cuIpcGetMemHandle(&mut ipc, va), 1);
        assert_eq!(cu.cuMemAddressFree(va, 4 * M), 1, "still mapped");
        assert_eq!(cu.cuMemUnmap(va, M / 2), 1);
        assert_eq!(cu.cuMemUnmap(va, 2 * M), 0);
        assert_eq!(cu.cuMemUnmap(va, 2 * M), 0, "harmless");
        assert_eq!(cu.cuMemAddressFree(va, M), 1);
        assert_eq!(cu.cuMemAddressFree(va, 4 * M), 0);
        // The bytes stayed with the handle.
        let back = cu.map(h, M, 0);
        assert_eq!(cu.get(back + M as u64 - 2, 2), b"se");
        assert_eq!(cu.grant(back, M, 1, 3), 0);
        assert_eq!(cu.control.counter("live_mappings"), 1);
        let plain = Prop {
            handle_types: 0,
            ..prop(0)
        };
        let mut hidden = 0;
        assert_eq!(cu.cuMemCreate(&mut hidden, M, &plain, 0), 0);
        assert_eq!(cu.cuMemExportToShareableHandle(&mut fd, hidden, 1, 0), 1);
    });
}

#[test]
fn host_memory_is_registered_and_has_an_alias() {
    isolated("host_memory_is_registered_and_has_an_alias", &[], || {
        let cu = Cu::start();
        let memory = vec![7u8; 3 * 4096];
        let host = memory.as_ptr() as usize;
        let mut alias = 0;
        assert_eq!(cu.cuMemHostGetDevicePointer_v2(&mut alias, host, 0), 1);
        assert_eq!(cu.cuMemHostRegister_v2(host, memory.len(), 3), 0);
        assert_eq!(cu.cuMemHostRegister_v2(host + 4096, 100, 3), 712);
        assert_eq!(
            cu.cuMemHostRegister_v2(0x10000, 4096, 3),
            1,
            "nothing mapped there"
        );
        assert_eq!(
            cu.cuMemHostGetDevicePointer_v2(&mut alias, host + 100, 0),
            0
        );
        assert_ne!(alias, host as u64 + 100);
        assert_eq!((cu.attr(host as u64, 2), cu.attr(alias, 2)), (Ok(1), Ok(1)));
        assert_eq!(cu.attr(alias, 4), Ok(host as u64 + 100));
        let (buf, s) = (cu.alloc(100), cu.stream());
        assert_eq!(cu.cuMemcpyAsync(buf, alias, 100, s), 0);
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(cu.get(buf, 100), [7; 100]);
        assert_eq!(
            cu.cuStreamWriteValue32_v2(s, host as u64, 1, 0),
            1,
            "not the alias"
        );
        assert_eq!(cu.cuMemHostUnregister(host + 4096), 1);
        assert_eq!(cu.cuMemHostUnregister(host), 0);
        assert_eq!(cu.cuMemHostUnregister(host), 713);
        assert_eq!(cu.cuStreamWriteValue32_v2(s, alias, 1, 0), 1, "gone");
        // Without aliases devices use the host's addresses.
        cu.control.set("host_alias", "0").unwrap();
        assert_eq!(cu.cuMemHostRegister_v2(host, memory.len(), 3), 0);
        assert_eq!(cu.cuMemHostGetDevicePointer_v2(&mut alias, host, 0), 0);
        assert_eq!(alias, host as u64);
        assert_eq!(cu.cuStreamWriteValue32_v2(s, alias, 0x01020304, 0), 0);
        assert_eq!(cu.cuStreamSynchronize(s), 0);
        assert_eq!(memory[..5], [4, 3, 2, 1, 7]);
        assert_eq!(cu.cuMemHostUnregister(host), 0);
    });
}

#[test]
fn a_forked_child_has_no_driver() {
    isolated("a_forked_child_has_no_driver", &[], || {
        let cu = Cu::start();
        let mut n = 0;
        // SAFETY: the child only calls into the double, which takes no lock there, and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let code = cu.cuDeviceGetCount(&mut n);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: waits for our own child.
        unsafe { libc::waitpid(pid, &mut status, 0) };
        assert_eq!(libc::WEXITSTATUS(status), 3);
    });
}

#[test]
fn calls_fail_as_told() {
    let env = [("VCCL_DOUBLE_FAIL", "cuMemMap:3:2,cuMemAlloc:2+:999")];
    isolated("calls_fail_as_told", &env, || {
        let cu = Cu::start();
        let (h, va, mut at) = (cu.create(M, 0), cu.reserve(4 * M), 0);
        let codes: Vec<i32> = (0..4)
            .map(|i| cu.cuMemMap(va + (i * M) as u64, M, 0, h, 0))
            .collect();
        assert_eq!(codes, [0, 0, 2, 0]);
        let codes: Vec<i32> = (0..3).map(|_| cu.cuMemAlloc_v2(&mut at, 10)).collect();
        assert_eq!(codes, [0, 999, 999]);
        cu.control.set("FAIL", "").unwrap();
        assert_eq!(cu.cuMemAlloc_v2(&mut at, 10), 0);
        cu.control.set("fail", "*:1:801").unwrap();
        assert_eq!(cu.cuMemAlloc_v2(&mut at, 10), 801);
        assert_eq!(cu.cuMemAlloc_v2(&mut at, 10), 0);
        assert!(cu.control.set("fail", "nonsense").is_err());
        assert!(cu.control.set("no_such_thing", "1").is_err());
        assert_eq!(cu.control.counter("cuMemAlloc"), 6);
        assert_eq!(cu.control.counter("cuMemAlloc_v2"), 6);
    });
}

#[test]
fn features_can_be_missing() {
    let env = [
        ("VCCL_DOUBLE_VMM_EXPORT", "0"),
        ("VCCL_DOUBLE_IPC", "0"),
        ("VCCL_DOUBLE_MEMOPS", "0"),
        ("VCCL_DOUBLE_PEER", "0"),
    ];
    isolated("features_can_be_missing", &env, || {
        let cu = Cu::start();
        let (mut h, mut can, mut ipc) = (0, 1, Ipc([0; 64]));
        let attr = |which| {
            let mut value = -1;
            assert_eq!(cu.cuDeviceGetAttribute(&mut value, which, 0), 0);
            value
        };
        assert_eq!((attr(102), attr(103), attr(122)), (1, 0, 0));
        assert_eq!(cu.cuMemCreate(&mut h, M, &prop(0), 0), 801);
        assert_eq!(
            cu.cuMemCreate(
                &mut h,
                M,
                &Prop {
                    handle_types: 0,
                    ..prop(0)
                },
                0
            ),
            0
        );
        let buf = cu.alloc(100);
        assert_eq!(cu.cuIpcGetMemHandle(&mut ipc, buf), 801);
        assert_eq!(cu.attr(buf, 10), Ok(0));
        let s = cu.stream();
        assert_eq!(cu.cuStreamWriteValue32_v2(s, buf, 1, 0), 801);
        assert_eq!(cu.cuDeviceCanAccessPeer(&mut can, 0, 1), 0);
        assert_eq!(can, 0);
        let zero = cu.context(0);
        cu.context(1);
        assert_eq!(cu.cuCtxEnablePeerAccess(zero, 0), 217);
        cu.control.set("vmm", "0").unwrap();
        assert_eq!(attr(102), 0);
        assert_eq!(cu.cuMemAddressReserve(&mut h, M, 0, 0, 0), 801);
    });
}

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

fn maps() -> usize {
    std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count()
}

#[test]
fn nothing_is_left_behind() {
    isolated("nothing_is_left_behind", &[], || {
        let cu = Cu::start();
        let memory = vec![0u8; 8192];
        let host = memory.as_ptr() as usize;
        let cycle = || {
            let (a, big, s, e) = (cu.alloc(100), cu.alloc(M + 1), cu.stream(), cu.event());
            let h = cu.create(M, 0);
            let va = cu.map(h, M, 0);
            let mut fd = -1;
            assert_eq!(cu.cuMemExportToShareableHandle(&mut fd, h, 1, 0), 0);
            let mut imported = 0;
            assert_eq!(
                cu.cuMemImportFromShareableHandle(&mut imported, fd as usize, 1),
                0
            );
            // SAFETY: the descriptor was given to us, and nobody else knows it.
            unsafe { libc::close(fd) };
            let vb = cu.map(imported, M, 0);
            assert_eq!(cu.cuMemHostRegister_v2(host, 8192, 2), 0);
            assert_eq!(cu.cuMemcpyDtoDAsync_v2(vb, big, 4096, s), 0);
            assert_eq!(cu.cuMemcpyDtoHAsync_v2(host, va, 4096, s), 0);
            assert_eq!(cu.cuEventRecord(e, s), 0);
            assert_eq!(cu.cuEventSynchronize(e), 0);
            assert_eq!(cu.cuStreamSynchronize(s), 0);
            assert_eq!(cu.cuMemHostUnregister(host), 0);
            for at in [va, vb] {
                assert_eq!(cu.cuMemUnmap(at, M), 0);
                assert_eq!(cu.cuMemAddressFree(at, M), 0);
            }
            for handle in [h, imported] {
                assert_eq!(cu.cuMemRelease(handle), 0);
            }
            assert_eq!(cu.cuEventDestroy_v2(e), 0);
            assert_eq!(cu.cuStreamDestroy_v2(s), 0);
            assert_eq!(cu.cuMemFree_v2(a), 0);
            assert_eq!(cu.cuMemFree_v2(big), 0);
        };
        cycle();
        let before = (count("/proc/self/fd"), count("/proc/self/task"), maps());
        for _ in 0..100 {
            cycle();
        }
        soon("the worker threads end", || {
            count("/proc/self/task") == before.1
        });
        assert_eq!(count("/proc/self/fd"), before.0);
        assert!(
            maps() <= before.2 + 2,
            "{} mappings, {} before",
            maps(),
            before.2
        );
        for what in [
            "allocations",
            "mappings",
            "reservations",
            "handles",
            "registered",
            "streams",
            "events",
            "workers",
        ] {
            assert_eq!(cu.control.counter(&format!("live_{what}")), 0, "{what}");
        }
        assert_eq!(cu.control.counter("pending_ops"), 0);
        assert_eq!(cu.violations(), [""; 0]);
    });
}
