//! Memory that goes to other processes.

mod common;

use common::*;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Two processes number the devices differently; the memory of one device is the same in both.
#[test]
fn exported_memory_reaches_another_process() {
    let test = "exported_memory_reaches_another_process";
    isolated(test, &[("CUDA_VISIBLE_DEVICES", "0,1")], || {
        let cu = Cu::start();
        if let Some(socket) = parent() {
            // Here the exporter's device 0 is device 1.
            let fd = recv_fd(&socket);
            let uuid: [u8; 16] = recv(&socket);
            let (mut handle, mut mine) = (0, [0; 16]);
            assert_eq!(
                cu.cuMemImportFromShareableHandle(&mut handle, fd.as_raw_fd() as usize, 1),
                0
            );
            drop(fd);
            let at = cu.map(handle, M, 0);
            assert_eq!(cu.attr(at, 9), Ok(1));
            assert_eq!(cu.cuDeviceGetUuid(&mut mine, 1), 0);
            assert_eq!(mine, uuid);
            let mut prop = Prop::default();
            assert_eq!(
                cu.cuMemGetAllocationPropertiesFromHandle(&mut prop, handle),
                0
            );
            assert_eq!((prop.device, prop.handle_types), (1, 0));
            let mut again = -1;
            assert_eq!(cu.cuMemExportToShareableHandle(&mut again, handle, 1, 0), 1);
            assert_eq!(cu.control.counter("live_imported_handles"), 1);
            assert_eq!(cu.get(at, 4), b"ping");
            // A push from this process's device 0, the other's device 1, is a peer copy.
            let (near, s) = (cu.alloc(64), cu.stream());
            cu.put(near, b"pong");
            let path = cu.control.progress();
            assert_eq!(cu.cuMemcpyDtoDAsync_v2(at + 64, near, 4, s), 0);
            drop(path);
            assert_eq!(cu.cuStreamSynchronize(s), 0);
            assert_eq!(
                (cu.control.counter("peer_copies"), cu.violations().len()),
                (1, 0)
            );
            send(&socket, [1]);
            // The exporter has let go; the memory is still there.
            let [_] = recv(&socket);
            assert_eq!(cu.get(at, 4), b"ping");
            return;
        }
        let peer = peer(test, &[("CUDA_VISIBLE_DEVICES", "1,0")]);
        let handle = cu.create(M, 0);
        let at = cu.map(handle, M, 0);
        cu.put(at, b"ping");
        let (mut fd, mut uuid) = (-1, [0; 16]);
        assert_eq!(cu.cuMemExportToShareableHandle(&mut fd, handle, 1, 0), 0);
        // SAFETY: the descriptor was given to us, and nobody else knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: only takes integers.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags, libc::FD_CLOEXEC);
        send_fd(&peer.socket, fd.as_raw_fd());
        assert_eq!(cu.cuDeviceGetUuid(&mut uuid, 0), 0);
        send(&peer.socket, uuid);
        let [_] = recv(&peer.socket);
        assert_eq!(cu.get(at + 64, 4), b"pong");
        assert_eq!(cu.cuMemUnmap(at, M), 0);
        assert_eq!(cu.cuMemRelease(handle), 0);
        send(&peer.socket, [2]);
        peer.finish();
        assert_eq!(cu.violations(), [""; 0]);
    });
}

#[test]
fn what_is_no_memory_is_not_imported() {
    isolated("what_is_no_memory_is_not_imported", &[], || {
        let cu = Cu::start();
        let mut handle = 0;
        let null = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: the name ends in NUL; the descriptor is nobody else's.
        let other = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"x".as_ptr(), 0)) };
        for fd in [
            null.as_raw_fd() as usize,
            other.as_raw_fd() as usize,
            999,
            usize::MAX,
        ] {
            assert_eq!(
                cu.cuMemImportFromShareableHandle(&mut handle, fd, 1),
                999,
                "{fd}"
            );
        }
        let mut at = 0;
        assert_eq!(cu.cuIpcOpenMemHandle_v2(&mut at, Ipc([0; 64]), 1), 1);
        assert_eq!(cu.cuIpcOpenMemHandle_v2(&mut at, Ipc([0x5a; 64]), 1), 1);
        // An import into the same process is another handle of the same memory.
        let own = cu.create(M, 0);
        let mut fd = -1;
        assert_eq!(cu.cuMemExportToShareableHandle(&mut fd, own, 1, 0), 0);
        assert_eq!(
            cu.cuMemImportFromShareableHandle(&mut handle, fd as usize, 1),
            0
        );
        assert_ne!(handle, own);
        let (a, b) = (cu.map(own, M, 0), cu.map(handle, M, 0));
        cu.put(a, b"same");
        assert_eq!(cu.get(b, 4), b"same");
    });
}

#[test]
fn ipc_handles_open_in_another_process() {
    let test = "ipc_handles_open_in_another_process";
    isolated(test, &[], || {
        let cu = Cu::start();
        if let Some(socket) = parent() {
            let open = |handle: [u8; 64]| {
                let mut at = 0;
                match cu.cuIpcOpenMemHandle_v2(&mut at, Ipc(handle), 1) {
                    0 => Ok(at),
                    code => Err(code),
                }
            };
            let (a, b, big): ([u8; 64], [u8; 64], [u8; 64]) =
                (recv(&socket), recv(&socket), recv(&socket));
            let at_a = open(a).unwrap();
            let at_b = open(b).unwrap();
            let at_big = open(big).unwrap();
            assert_eq!(
                at_b - at_a,
                1024,
                "two buffers of one block share its mapping"
            );
            assert_eq!(cu.range(at_b + 5), Ok((at_b, 1000)));
            assert_eq!(cu.get(at_a, 1), b"A");
            assert_eq!(cu.get(at_b, 1), b"B");
            assert_eq!((cu.attr(at_big, 9), cu.attr(at_big, 10)), (Ok(1), Ok(0)));
            assert_eq!(open(a), Ok(at_a), "counted");
            let mut bad = a;
            bad[20] ^= 1;
            assert_eq!(open(bad), Err(1));
            let mut again = Ipc([0; 64]);
            assert_eq!(cu.cuIpcGetMemHandle(&mut again, at_a), 1);
            assert_eq!(cu.cuMemFree_v2(at_a), 1);
            assert_eq!(cu.cuIpcCloseMemHandle(at_a + 8), 1);
            // Device 1 pushes into device 0's memory and back from this process.
            let (near, s) = (cu.alloc(64), cu.stream());
            cu.put(near, b"from the peer");
            assert_eq!(cu.cuMemcpyDtoDAsync_v2(at_big, near, 13, s), 0);
            assert_eq!(cu.cuStreamSynchronize(s), 0);
            assert_eq!(cu.control.counter("peer_copies"), 1);
            // A copy that hangs while the exporter frees.
            cu.control.set("hang_copies", "1").unwrap();
            assert_eq!(cu.cuMemcpyDtoDAsync_v2(at_big, near, 13, s), 0);
            send(&socket, [1]);
            let [_] = recv(&socket);
            cu.control.set("hang_copies", "0").unwrap();
            assert_eq!(cu.cuStreamSynchronize(s), 0);
            assert_eq!(open(big), Ok(at_big), "what is open can be opened again");
            for at in [at_a, at_a, at_b, at_big, at_big] {
                assert_eq!(cu.cuIpcCloseMemHandle(at), 0);
            }
            assert_eq!(cu.cuIpcCloseMemHandle(at_a), 1);
            assert_eq!(open(big), Err(1), "freed by its owner");
            assert_eq!(cu.control.counter("live_ipc_imports"), 0);
            assert_eq!(cu.violations(), [""; 0]);
            return;
        }
        // The peer's device 0 is this process's device 1.
        let peer = peer(test, &[("CUDA_VISIBLE_DEVICES", "1,0")]);
        let (a, b, big) = (cu.alloc(1000), cu.alloc(1000), cu.alloc(M + 5));
        for (at, text) in [(a, b"A"), (b, b"B"), (big, b"C")] {
            cu.put(at, text);
            let mut handle = Ipc([0; 64]);
            // A handle of an address within speaks of the whole.
            assert_eq!(cu.cuIpcGetMemHandle(&mut handle, at + 16), 0);
            let mut here = 0;
            assert_eq!(cu.cuIpcOpenMemHandle_v2(&mut here, handle, 1), 201);
            send(&peer.socket, handle.0);
        }
        let [_] = recv(&peer.socket);
        assert_eq!(cu.get(big, 13), b"from the peer");
        assert_eq!(cu.violations(), [""; 0]);
        assert_eq!(cu.cuMemFree_v2(a), 0);
        assert_eq!(cu.control.counter("freed_while_open"), 1);
        assert_eq!(cu.violations(), [""; 0]);
        assert_eq!(cu.cuMemFree_v2(big), 0);
        let found = cu.violations();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("freed under a copy") && found[0].contains("process"));
        send(&peer.socket, [1]);
        peer.finish();
    });
}

#[test]
fn a_peer_that_dies_leaves_nothing() {
    let test = "a_peer_that_dies_leaves_nothing";
    isolated(test, &[], || {
        let cu = Cu::start();
        if let Some(socket) = parent() {
            let mut at = 0;
            assert_eq!(cu.cuIpcOpenMemHandle_v2(&mut at, Ipc(recv(&socket)), 1), 0);
            cu.control.set("hang_copies", "1").unwrap();
            let s = cu.stream();
            assert_eq!(cu.cuMemcpyDtoDAsync_v2(at, at + 64, 64, s), 0);
            send(&socket, [1]);
            let [_] = recv(&socket);
        }
        let mut peer = peer(test, &[]);
        let big = cu.alloc(M);
        let mut handle = Ipc([0; 64]);
        assert_eq!(cu.cuIpcGetMemHandle(&mut handle, big), 0);
        send(&peer.socket, handle.0);
        let [_] = recv(&peer.socket);
        peer.child.kill().unwrap();
        peer.child.wait().unwrap();
        assert_eq!(cu.cuMemFree_v2(big), 0);
        assert_eq!(cu.violations(), [""; 0], "the dead use nothing");
        assert_eq!(cu.control.counter("freed_while_open"), 0);
    });
}

#[test]
fn the_double_is_found_where_a_program_loaded_it() {
    isolated("the_double_is_found_where_a_program_loaded_it", &[], || {
        assert!(cuda_double::control::Control::find().is_err());
        let cu = Cu::load();
        let control = cuda_double::control::Control::find().unwrap();
        assert_eq!(cu.cuInit(0), 0);
        assert_eq!(control.counter("cuInit"), 1);
    });
}
