//! The double as a program sees it: loaded as `libcuda.so.1`, called by name. Each test runs in a
//! process of its own, so that its settings come from its environment and it can crash alone.
#![allow(non_snake_case, dead_code)]

use cuda_double::control::Control;
use nix::sys::socket::{
    recvmsg, sendmsg, ControlMessage, ControlMessageOwned, MsgFlags, RecvMsg, UnixAddr,
};
use std::ffi::{c_void, CString};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const CHILD: &str = "DOUBLE_TEST_CHILD";
const PEER: &str = "DOUBLE_TEST_PEER_FD";
pub const M: usize = 2 << 20;

fn command(test: &str, env: &[(&str, &str)]) -> Command {
    let mut cmd = Command::new(std::env::current_exe().unwrap());
    cmd.args([test, "--exact", "--nocapture", "--test-threads=1"])
        .stdout(Stdio::null());
    for (key, _) in std::env::vars() {
        if key.starts_with("VCCL_DOUBLE_") || key == "CUDA_VISIBLE_DEVICES" || key == PEER {
            cmd.env_remove(key);
        }
    }
    cmd.env(CHILD, test).envs(env.iter().copied());
    cmd
}

/// Runs the body in a process of its own and tells how it ended; in that process, does not return.
pub fn outcome(test: &str, env: &[(&str, &str)], body: impl FnOnce()) -> ExitStatus {
    if std::env::var(CHILD).is_ok() {
        body();
        std::process::exit(0);
    }
    command(test, env).status().unwrap()
}

/// Runs the body in a process of its own; it must succeed.
pub fn isolated(test: &str, env: &[(&str, &str)], body: impl FnOnce()) {
    let status = outcome(test, env, body);
    assert!(status.success(), "{test}: {status}");
}

/// Another process of the same test, and a socket to it.
pub struct Peer {
    pub child: Child,
    pub socket: UnixStream,
}

/// Starts one.
pub fn peer(test: &str, env: &[(&str, &str)]) -> Peer {
    let (socket, theirs) = UnixStream::pair().unwrap();
    // SAFETY: only takes integers; the descriptor is open.
    unsafe { libc::fcntl(theirs.as_raw_fd(), libc::F_SETFD, 0) };
    let child = command(test, env)
        .env(PEER, theirs.as_raw_fd().to_string())
        .spawn()
        .unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    Peer { child, socket }
}

impl Peer {
    pub fn finish(mut self) {
        drop(self.socket);
        assert!(self.child.wait().unwrap().success(), "the peer failed");
    }
}

/// The socket to the process that started this one as a peer.
pub fn parent() -> Option<UnixStream> {
    let fd: RawFd = std::env::var(PEER).ok()?.parse().ok()?;
    // SAFETY: the descriptor was handed down for this, and nobody else takes it.
    let socket = unsafe { UnixStream::from_raw_fd(fd) };
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    Some(socket)
}

pub fn send_fd(socket: &UnixStream, fd: RawFd) {
    let fds = [fd];
    let rights = [ControlMessage::ScmRights(&fds)];
    let text = [IoSlice::new(b"f")];
    sendmsg::<UnixAddr>(socket.as_raw_fd(), &text, &rights, MsgFlags::empty(), None).unwrap();
}

pub fn recv_fd(socket: &UnixStream) -> OwnedFd {
    let mut byte = [0u8];
    let mut text = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!(RawFd);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let got: RecvMsg<'_, '_, UnixAddr> =
        recvmsg(socket.as_raw_fd(), &mut text, Some(&mut space), flags).unwrap();
    for message in got.cmsgs().unwrap() {
        if let ControlMessageOwned::ScmRights(fds) = message {
            // SAFETY: the descriptor was just received and is nobody else's.
            return unsafe { OwnedFd::from_raw_fd(fds[0]) };
        }
    }
    panic!("no descriptor came");
}

pub fn send<const N: usize>(mut socket: &UnixStream, bytes: [u8; N]) {
    socket.write_all(&bytes).unwrap();
}

pub fn recv<const N: usize>(mut socket: &UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Prop {
    pub kind: i32,
    pub handle_types: i32,
    pub location: i32,
    pub device: i32,
    pub win32: usize,
    pub flags: u64,
}

/// One side of [`Rows`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RowsSide {
    pub x: usize,
    pub y: usize,
    pub kind: u32,
    pub host: usize,
    pub device: u64,
    pub array: usize,
    pub pitch: usize,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Rows {
    pub src: RowsSide,
    pub dst: RowsSide,
    pub width: usize,
    pub height: usize,
}

impl Rows {
    /// Two rows between unified addresses, each with its pitch.
    pub fn two(dst: (u64, usize), src: (u64, usize), width: usize) -> Rows {
        let side = |(device, pitch)| RowsSide {
            kind: 4,
            device,
            pitch,
            ..RowsSide::default()
        };
        Rows {
            src: side(src),
            dst: side(dst),
            width,
            height: 2,
        }
    }
}

#[repr(C)]
pub struct Access {
    pub location: i32,
    pub device: i32,
    pub flags: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ipc(pub [u8; 64]);

/// The loaded library.
pub struct Cu {
    library: usize,
    pub control: Control,
}

macro_rules! api {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];
        impl Cu {
            $(pub fn $name(&self, $($arg: $ty),*) -> i32 {
                let f = self.symbol(stringify!($name));
                // SAFETY: the entry point has that signature; the tests give it good pointers.
                unsafe {
                    std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> i32>(f)($($arg),*)
                }
            })*
        }
    };
}

api! {
    cuInit(flags: u32);
    cuDriverGetVersion(v: &mut i32);
    cuGetErrorString(code: i32, text: &mut *const i8);
    cuGetErrorName(code: i32, text: &mut *const i8);
    cuDeviceGetCount(n: &mut i32);
    cuDeviceGet(d: &mut i32, ordinal: i32);
    cuDeviceGetAttribute(v: &mut i32, which: i32, d: i32);
    cuDeviceGetName(text: *mut u8, len: i32, d: i32);
    cuDeviceGetUuid(id: &mut [u8; 16], d: i32);
    cuDeviceGetUuid_v2(id: &mut [u8; 16], d: i32);
    cuDeviceGetPCIBusId(text: *mut u8, len: i32, d: i32);
    cuDeviceCanAccessPeer(can: &mut i32, d: i32, peer: i32);
    cuDeviceTotalMem_v2(bytes: &mut usize, d: i32);
    cuDevicePrimaryCtxRetain(ctx: &mut u64, d: i32);
    cuDevicePrimaryCtxRelease_v2(d: i32);
    cuCtxCreate_v2(ctx: &mut u64, flags: u32, d: i32);
    cuCtxDestroy_v2(ctx: u64);
    cuCtxGetCurrent(ctx: &mut u64);
    cuCtxSetCurrent(ctx: u64);
    cuCtxPushCurrent_v2(ctx: u64);
    cuCtxPopCurrent_v2(ctx: &mut u64);
    cuCtxGetDevice(d: &mut i32);
    cuCtxSynchronize();
    cuCtxEnablePeerAccess(peer: u64, flags: u32);
    cuCtxGetStreamPriorityRange(least: &mut i32, greatest: &mut i32);
    cuPointerGetAttribute(data: *mut c_void, which: i32, at: u64);
    cuPointerGetAttributes(n: u32, which: *const i32, data: *const *mut c_void, at: u64);
    cuMemGetAddressRange_v2(base: &mut u64, size: &mut usize, at: u64);
    cuMemAlloc_v2(at: &mut u64, size: usize);
    cuMemFree_v2(at: u64);
    cuMemHostAlloc(at: &mut usize, size: usize, flags: u32);
    cuMemFreeHost(at: usize);
    cuMemHostRegister_v2(at: usize, size: usize, flags: u32);
    cuMemHostUnregister(at: usize);
    cuMemHostGetDevicePointer_v2(at: &mut u64, host: usize, flags: u32);
    cuMemCreate(handle: &mut u64, size: usize, prop: &Prop, flags: u64);
    cuMemRelease(handle: u64);
    cuMemAddressReserve(at: &mut u64, size: usize, align: usize, wish: u64, flags: u64);
    cuMemAddressFree(at: u64, size: usize);
    cuMemMap(at: u64, size: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap(at: u64, size: usize);
    cuMemSetAccess(at: u64, size: usize, access: *const Access, n: usize);
    cuMemGetAllocationGranularity(size: &mut usize, prop: &Prop, option: i32);
    cuMemGetAllocationPropertiesFromHandle(prop: &mut Prop, handle: u64);
    cuMemRetainAllocationHandle(handle: &mut u64, at: u64);
    cuMemExportToShareableHandle(fd: &mut i32, handle: u64, kind: i32, flags: u64);
    cuMemImportFromShareableHandle(handle: &mut u64, fd: usize, kind: i32);
    cuIpcGetMemHandle(handle: &mut Ipc, at: u64);
    cuIpcOpenMemHandle_v2(at: &mut u64, handle: Ipc, flags: u32);
    cuIpcCloseMemHandle(at: u64);
    cuMemcpyAsync(dst: u64, src: u64, len: usize, stream: u64);
    cuMemcpyDtoDAsync_v2(dst: u64, src: u64, len: usize, stream: u64);
    cuMemcpyHtoDAsync_v2(dst: u64, src: usize, len: usize, stream: u64);
    cuMemcpyDtoHAsync_v2(dst: usize, src: u64, len: usize, stream: u64);
    cuMemcpy2DAsync_v2(rows: *const Rows, stream: u64);
    cuThreadExchangeStreamCaptureMode(mode: &mut i32);
    cuMemcpyPeerAsync(dst: u64, dst_ctx: u64, src: u64, src_ctx: u64, len: usize, stream: u64);
    cuMemcpy(dst: u64, src: u64, len: usize);
    cuMemcpyHtoD_v2(dst: u64, src: *const u8, len: usize);
    cuMemcpyDtoH_v2(dst: *mut u8, src: u64, len: usize);
    cuMemcpyDtoD_v2(dst: u64, src: u64, len: usize);
    cuMemsetD8_v2(dst: u64, byte: u8, len: usize);
    cuMemsetD8Async(dst: u64, byte: u8, len: usize, stream: u64);
    cuStreamCreate(stream: &mut u64, flags: u32);
    cuStreamCreateWithPriority(stream: &mut u64, flags: u32, priority: i32);
    cuStreamDestroy_v2(stream: u64);
    cuStreamQuery(stream: u64);
    cuStreamSynchronize(stream: u64);
    cuStreamGetCtx(stream: u64, ctx: &mut u64);
    cuStreamWriteValue32_v2(stream: u64, at: u64, value: u32, flags: u32);
    cuStreamWaitValue32_v2(stream: u64, at: u64, value: u32, flags: u32);
    cuStreamWriteValue64_v2(stream: u64, at: u64, value: u64, flags: u32);
    cuEventCreate(event: &mut u64, flags: u32);
    cuEventRecord(event: u64, stream: u64);
    cuEventQuery(event: u64);
    cuEventSynchronize(event: u64);
    cuEventDestroy_v2(event: u64);
    cuMemGetHandleForAddressRange(handle: *mut c_void, at: u64, size: usize, kind: i32, flags: u64);
}

/// The library as it was built with these tests: `cargo test` refreshes only the one beside them.
fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().unwrap().join("libcuda_double.so")
}

impl Cu {
    /// Loads the double without initializing it.
    pub fn load() -> Cu {
        let path = library();
        let control = Control::load(&path).unwrap();
        // Its name is the driver's, so a program's own look-up finds it too.
        // SAFETY: the name ends in NUL.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null());
        Cu {
            library: library as usize,
            control,
        }
    }

    /// Loads and initializes it, and makes the primary context of device 0 current.
    pub fn start() -> Cu {
        let cu = Cu::load();
        assert_eq!(cu.cuInit(0), 0);
        cu.context(0);
        cu
    }

    pub fn symbol(&self, name: &str) -> *mut c_void {
        let text = CString::new(name).unwrap();
        // SAFETY: the library is open and the name ends in NUL.
        let found = unsafe { libc::dlsym(self.library as *mut c_void, text.as_ptr()) };
        assert!(!found.is_null(), "{name} is missing");
        found
    }

    /// Makes a device's primary context current.
    pub fn context(&self, device: i32) -> u64 {
        let mut ctx = 0;
        assert_eq!(self.cuDevicePrimaryCtxRetain(&mut ctx, device), 0);
        assert_eq!(self.cuCtxSetCurrent(ctx), 0);
        ctx
    }

    pub fn alloc(&self, size: usize) -> u64 {
        let mut at = 0;
        assert_eq!(self.cuMemAlloc_v2(&mut at, size), 0);
        at
    }

    pub fn stream(&self) -> u64 {
        let mut stream = 0;
        assert_eq!(self.cuStreamCreate(&mut stream, 1), 0);
        stream
    }

    pub fn event(&self) -> u64 {
        let mut event = 0;
        assert_eq!(self.cuEventCreate(&mut event, 2), 0);
        event
    }

    pub fn create(&self, size: usize, device: i32) -> u64 {
        let (mut handle, prop) = (0, prop(device));
        assert_eq!(self.cuMemCreate(&mut handle, size, &prop, 0), 0);
        handle
    }

    pub fn reserve(&self, size: usize) -> u64 {
        let mut at = 0;
        assert_eq!(self.cuMemAddressReserve(&mut at, size, 0, 0, 0), 0);
        at
    }

    pub fn grant(&self, at: u64, size: usize, device: i32, flags: i32) -> i32 {
        let access = Access {
            location: 1,
            device,
            flags,
        };
        self.cuMemSetAccess(at, size, &access, 1)
    }

    /// Maps physical memory somewhere and lets a device at it.
    pub fn map(&self, handle: u64, size: usize, device: i32) -> u64 {
        let at = self.reserve(size);
        assert_eq!(self.cuMemMap(at, size, 0, handle, 0), 0);
        assert_eq!(self.grant(at, size, device, 3), 0);
        at
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        assert_eq!(self.cuMemcpyHtoD_v2(at, bytes.as_ptr(), bytes.len()), 0);
    }

    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert_eq!(self.cuMemcpyDtoH_v2(bytes.as_mut_ptr(), at, len), 0);
        bytes
    }

    /// An attribute that is a 64-bit value.
    pub fn attr(&self, at: u64, which: i32) -> Result<u64, i32> {
        let mut value = 0u64;
        match self.cuPointerGetAttribute((&raw mut value).cast(), which, at) {
            0 => Ok(value),
            code => Err(code),
        }
    }

    pub fn range(&self, at: u64) -> Result<(u64, usize), i32> {
        let (mut base, mut size) = (0, 0);
        match self.cuMemGetAddressRange_v2(&mut base, &mut size, at) {
            0 => Ok((base, size)),
            code => Err(code),
        }
    }

    /// Registers one page of fresh host memory; gives its address and what devices call it.
    pub fn page(&self) -> (usize, u64) {
        let mut host = 0;
        assert_eq!(self.cuMemHostAlloc(&mut host, 4096, 0), 0);
        let mut alias = 0;
        assert_eq!(self.cuMemHostGetDevicePointer_v2(&mut alias, host, 0), 0);
        (host, alias)
    }

    pub fn violations(&self) -> Vec<String> {
        self.control.violations()
    }
}

pub fn prop(device: i32) -> Prop {
    Prop {
        kind: 1,
        handle_types: 1,
        location: 1,
        device,
        ..Prop::default()
    }
}

/// A 32-bit value of host memory that a stream writes.
pub fn peek(host: usize) -> u32 {
    // SAFETY: the tests give addresses of live, aligned memory.
    unsafe { std::sync::atomic::AtomicU32::from_ptr(host as *mut u32) }
        .load(std::sync::atomic::Ordering::Acquire)
}

pub fn poke(host: usize, value: u32) {
    // SAFETY: the tests give addresses of live, aligned memory.
    unsafe { std::sync::atomic::AtomicU32::from_ptr(host as *mut u32) }
        .store(value, std::sync::atomic::Ordering::Release);
}

/// Waits for something that is to come true soon.
pub fn soon(what: &str, mut test: impl FnMut() -> bool) {
    let began = Instant::now();
    while !test() {
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "did not come true: {what}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}
