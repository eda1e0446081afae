//! The data path of an established connection: no allocation, no system call, no lock that is waited
//! for, in what NCCL's progress thread calls, over ten thousand messages.
//!
//! One process holds both ends and calls the plugin's table as NCCL does. Three things make its calls
//! observable:
//! - This program defines `malloc` and its kin; libraries that it opens bind to them. They count what
//!   the thread allocates while it is inside the plugin.
//! - It defines `dlsym` too, and so gives the plugin entry points of the CUDA double that say when the
//!   thread is inside the driver: what a driver does is not counted.
//! - The kernel's syscall user dispatch turns each system call of the thread, inside the plugin, into
//!   a signal.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod support;

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use plugin_tests::cuda;
use plugin_tests::memory::{Buffer, Kind};
use plugin_tests::pattern::{self, Key};
use vccl::abi::types::{NCCL_PTR_CUDA, NCCL_PTR_HOST};
use vccl::abi::v8;

thread_local! {
    /// Inside a call of the plugin's, and not inside the driver.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static FREES: AtomicU64 = AtomicU64::new(0);

fn note(counter: &AtomicU64) {
    // Also called before the thread has its locals, or after.
    if INSIDE.try_with(Cell::get).unwrap_or(false) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

extern "C" {
    fn __libc_malloc(size: usize) -> *mut c_void;
    fn __libc_calloc(n: usize, size: usize) -> *mut c_void;
    fn __libc_realloc(p: *mut c_void, size: usize) -> *mut c_void;
    fn __libc_memalign(align: usize, size: usize) -> *mut c_void;
    fn __libc_free(p: *mut c_void);
}

/// The C library's, counted.
///
/// # Safety
/// As the C library's.
#[no_mangle]
pub unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    note(&ALLOCATIONS);
    // SAFETY: the caller's promise.
    unsafe { __libc_malloc(size) }
}

/// The C library's, counted.
///
/// # Safety
/// As the C library's.
#[no_mangle]
pub unsafe extern "C" fn calloc(n: usize, size: usize) -> *mut c_void {
    note(&ALLOCATIONS);
    // SAFETY: the caller's promise.
    unsafe { __libc_calloc(n, size) }
}

/// The C library's, counted.
///
/// # Safety
/// As the C library's.
#[no_mangle]
pub unsafe extern "C" fn realloc(p: *mut c_void, size: usize) -> *mut c_void {
    note(&ALLOCATIONS);
    // SAFETY: the caller's promise.
    unsafe { __libc_realloc(p, size) }
}

/// The C library's, counted.
///
/// # Safety
/// As the C library's.
#[no_mangle]
pub unsafe extern "C" fn posix_memalign(to: *mut *mut c_void, align: usize, size: usize) -> c_int {
    note(&ALLOCATIONS);
    // SAFETY: the caller's promise; `to` is a place for the result.
    unsafe {
        let p = __libc_memalign(align, size);
        if p.is_null() {
            return libc::ENOMEM;
        }
        *to = p;
    }
    0
}

/// The C library's, counted.
///
/// # Safety
/// As the C library's.
#[no_mangle]
pub unsafe extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    note(&ALLOCATIONS);
    // SAFETY: the caller's promise.
    unsafe { __libc_memalign(align, size) }
}

/// The C library's, counted.
///
/// # Safety
/// As the C library's.
#[no_mangle]
pub unsafe extern "C" fn free(p: *mut c_void) {
    if !p.is_null() {
        note(&FREES);
    }
    // SAFETY: the caller's promise.
    unsafe { __libc_free(p) }
}

/// What the kernel reads at each system call of the thread: whether to let it pass.
static SELECTOR: AtomicU8 = AtomicU8::new(PASS);
const PASS: u8 = 0;
const BLOCK: u8 = 1;
const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;

static SYSCALLS: AtomicU64 = AtomicU64::new(0);
/// The numbers of the first of them.
static NUMBERS: [AtomicU32; 16] = [const { AtomicU32::new(u32::MAX) }; 16];

/// `siginfo_t` of SIGSYS.
#[repr(C)]
struct SysInfo {
    signo: c_int,
    errno: c_int,
    code: c_int,
    call_addr: *mut c_void,
    syscall: c_int,
    arch: u32,
}

/// Counts the system call and lets it be made after all.
unsafe extern "C" fn on_sigsys(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // Until the next entry into the plugin: the return from here is a system call as well.
    SELECTOR.store(PASS, Ordering::SeqCst);
    let n = SYSCALLS.fetch_add(1, Ordering::SeqCst) as usize;
    // SAFETY: the kernel passes the information of a SIGSYS, and the interrupted thread's registers.
    unsafe {
        let number = (*info.cast::<SysInfo>()).syscall;
        if let Some(place) = NUMBERS.get(n) {
            place.store(number as u32, Ordering::SeqCst);
        }
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        // The instruction `syscall` has two bytes, and its number was in rax.
        registers[libc::REG_RIP as usize] -= 2;
        registers[libc::REG_RAX as usize] = i64::from(number);
    }
}

/// Whether the thread's system calls are counted while it lives; it must stay on its thread.
struct Watch(bool);

impl Watch {
    fn start() -> std::io::Result<Watch> {
        // SAFETY: an empty action is a valid one; the handler has the form that SA_SIGINFO asks for. The
        // selector lives for ever.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigsys as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            if libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()) != 0
                || libc::prctl(
                    PR_SET_SYSCALL_USER_DISPATCH,
                    1 as libc::c_ulong,
                    0 as libc::c_ulong,
                    0 as libc::c_ulong,
                    SELECTOR.as_ptr(),
                ) != 0
            {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(Watch(true))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.0 {
            // SAFETY: takes numbers only.
            unsafe {
                libc::prctl(
                    PR_SET_SYSCALL_USER_DISPATCH,
                    0 as libc::c_ulong,
                    0 as libc::c_ulong,
                    0 as libc::c_ulong,
                    0 as libc::c_ulong,
                )
            };
        }
    }
}

/// Runs a call of the plugin's.
fn inside<R>(f: impl FnOnce() -> R) -> R {
    INSIDE.set(true);
    SELECTOR.store(BLOCK, Ordering::SeqCst);
    let r = f();
    SELECTOR.store(PASS, Ordering::SeqCst);
    INSIDE.set(false);
    r
}

/// Runs a call of the driver's, which the plugin may have made.
fn outside<R>(f: impl FnOnce() -> R) -> R {
    let was = INSIDE.try_with(|i| i.replace(false)).unwrap_or(false);
    if !was {
        return f();
    }
    SELECTOR.store(PASS, Ordering::SeqCst);
    let r = f();
    SELECTOR.store(BLOCK, Ordering::SeqCst);
    INSIDE.set(true);
    r
}

static DRIVER_CALLS: AtomicU64 = AtomicU64::new(0);

/// Entry points of the driver that the data path may use, each with the driver's own behind it. All
/// arguments are integers or pointers, at most four.
macro_rules! entries {
    ($($name:literal $function:ident $real:ident;)*) => {
        $(
            static $real: AtomicUsize = AtomicUsize::new(0);

            unsafe extern "C" fn $function(a: usize, b: usize, c: usize, d: usize) -> c_int {
                type Entry = unsafe extern "C" fn(usize, usize, usize, usize) -> c_int;
                DRIVER_CALLS.fetch_add(1, Ordering::Relaxed);
                // SAFETY: `dlsym` below stored the driver's function before it gave this one out. Four
                // integer arguments are passed alike whatever their types, and surplus ones are not
                // looked at.
                outside(|| unsafe {
                    let real: Entry = std::mem::transmute($real.load(Ordering::Acquire));
                    real(a, b, c, d)
                })
            }
        )*

        fn wrapped(name: &CStr, real: *mut c_void) -> *mut c_void {
            $(
                if name == $name {
                    $real.store(real as usize, Ordering::Release);
                    return $function as *const () as *mut c_void;
                }
            )*
            real
        }
    };
}

entries! {
    c"cuCtxPushCurrent_v2" push REAL_PUSH;
    c"cuCtxPopCurrent_v2" pop REAL_POP;
    c"cuMemcpyAsync" copy REAL_COPY;
    c"cuMemcpy2DAsync_v2" copy_rows REAL_COPY_ROWS;
    c"cuStreamWriteValue32_v2" write_value REAL_WRITE_VALUE;
    c"cuEventQuery" event_query REAL_EVENT_QUERY;
    c"cuStreamQuery" stream_query REAL_STREAM_QUERY;
    c"cuThreadExchangeStreamCaptureMode" capture_mode REAL_CAPTURE_MODE;
}

/// The C library's, but for the entry points above.
///
/// # Safety
/// As the C library's.
#[no_mangle]
pub unsafe extern "C" fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void {
    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
    static REAL: AtomicUsize = AtomicUsize::new(0);
    let mut real = REAL.load(Ordering::Acquire);
    if real == 0 {
        // One of these versions it has, depending on its age.
        for version in [c"GLIBC_2.34", c"GLIBC_2.2.5"] {
            // SAFETY: both texts end in NUL.
            real = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) }
                as usize;
            if real != 0 {
                break;
            }
        }
        REAL.store(real, Ordering::Release);
    }
    // SAFETY: the C library's function of that name, of this type.
    let found = unsafe { std::mem::transmute::<usize, Dlsym>(real)(library, name) };
    if found.is_null() {
        return found;
    }
    // SAFETY: the caller's name ends in NUL.
    wrapped(unsafe { CStr::from_ptr(name) }, found)
}

/// The plugin's table, loaded once; the CUDA double comes first, so that the plugin finds it.
fn net() -> &'static v8::Net {
    static NET: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    let address = *NET.get_or_init(|| {
        let double = support::built("VCCL_CUDA_DOUBLE", "double/libcuda.so.1");
        // SAFETY: the double's and the plugin's initializers do nothing; both stay loaded.
        let (double, plugin) = unsafe {
            (
                Library::open(Some(double), RTLD_NOW | RTLD_LOCAL).expect("the double loads"),
                Library::open(Some(support::plugin()), RTLD_NOW | RTLD_LOCAL)
                    .expect("the plugin loads"),
            )
        };
        // SAFETY: the symbol is the table of that version.
        let table = unsafe { plugin.get::<*const v8::Net>(b"ncclNetPlugin_v8\0") };
        let address = table.expect("the table").as_raw_ptr() as usize;
        std::mem::forget((double, plugin));
        // SAFETY: the table lives as long as the library, which was forgotten.
        let net = unsafe { &*(address as *const v8::Net) };
        let init = net.init.expect("init");
        // SAFETY: the logger lives as long as the process.
        let rc = unsafe { init(Some(plugin_tests::logs::logger())) };
        assert_eq!(rc, 0, "init");
        address
    });
    // SAFETY: as above.
    unsafe { &*(address as *const v8::Net) }
}

/// Registered memory of one end.
struct End {
    comm: *mut c_void,
    mhandle: *mut c_void,
    buffer: Buffer,
}

/// Both ends of a connection within this process.
struct Pair {
    net: &'static v8::Net,
    send: End,
    recv: End,
}

const WINDOW: usize = 8;

impl Pair {
    /// A connection, with memory for [`WINDOW`] messages of `size` bytes at both ends.
    fn open(kind: Kind, size: usize) -> Pair {
        let net = net();
        let on_gpu = |gpu| {
            if kind.is_device() {
                cuda::get()
                    .and_then(|c| c.bind(gpu))
                    .expect("a device of the double");
            }
        };
        let mut handle = [0u8; 128];
        let mut listener = std::ptr::null_mut();
        let mut out: *mut c_void = std::ptr::null_mut();
        let mut inn: *mut c_void = std::ptr::null_mut();
        let end = Instant::now() + Duration::from_secs(20);
        // SAFETY: the pointers are places for what the interface promises, and the handle has its 128
        // bytes.
        unsafe {
            let rc = net.listen.expect("listen")(0, handle.as_mut_ptr().cast(), &mut listener);
            assert_eq!(rc, 0, "listen");
            while out.is_null() || inn.is_null() {
                let mut device = std::ptr::null_mut();
                if out.is_null() {
                    on_gpu(0);
                    let connect = net.connect.expect("connect");
                    let rc = connect(0, handle.as_mut_ptr().cast(), &mut out, &mut device);
                    assert_eq!(rc, 0, "connect");
                }
                if inn.is_null() {
                    on_gpu(1);
                    let rc = net.accept.expect("accept")(listener, &mut inn, &mut device);
                    assert_eq!(rc, 0, "accept");
                }
                assert!(Instant::now() < end, "not connected");
            }
            assert_eq!(net.close_listen.expect("closeListen")(listener), 0);
        }
        let register = |comm: *mut c_void, gpu: usize| {
            on_gpu(gpu);
            let buffer = Buffer::new(kind, WINDOW * size, gpu).expect("memory");
            let what = if kind.is_device() {
                NCCL_PTR_CUDA
            } else {
                NCCL_PTR_HOST
            };
            let mut mhandle = std::ptr::null_mut();
            let data = buffer.address() as *mut c_void;
            // SAFETY: the memory exists, and `End` keeps it; the comm is open.
            let rc = unsafe {
                net.reg_mr.expect("regMr")(comm, data, WINDOW * size, what, &mut mhandle)
            };
            assert_eq!(rc, 0, "regMr");
            End {
                comm,
                mhandle,
                buffer,
            }
        };
        let send = register(out, 0);
        let recv = register(inn, 1);
        Pair { net, send, recv }
    }

    fn isend(&self, slot: usize, size: usize) -> *mut c_void {
        let mut request = std::ptr::null_mut();
        let data = (self.send.buffer.address() + slot * size) as *mut c_void;
        let isend = self.net.isend.expect("isend");
        // SAFETY: the comm is open, and the memory registered.
        let rc = inside(|| unsafe {
            isend(
                self.send.comm,
                data,
                size as c_int,
                0,
                self.send.mhandle,
                &mut request,
            )
        });
        assert_eq!(rc, 0, "isend");
        request
    }

    fn irecv(&self, slot: usize, size: usize) -> *mut c_void {
        let mut request = std::ptr::null_mut();
        let mut data = (self.recv.buffer.address() + slot * size) as *mut c_void;
        let (mut bytes, mut tag, mut mhandle) = (size as c_int, 0, self.recv.mhandle);
        let irecv = self.net.irecv.expect("irecv");
        // SAFETY: as for `isend`; the arrays have one entry.
        let rc = inside(|| unsafe {
            irecv(
                self.recv.comm,
                1,
                &mut data,
                &mut bytes,
                &mut tag,
                &mut mhandle,
                &mut request,
            )
        });
        assert_eq!(rc, 0, "irecv");
        request
    }

    /// NCCL flushes what it has received into a GPU; there must be nothing to wait for.
    fn flush(&self, slot: usize, size: usize) {
        let mut request = std::ptr::null_mut();
        let mut data = (self.recv.buffer.address() + slot * size) as *mut c_void;
        let (mut bytes, mut mhandle) = (size as c_int, self.recv.mhandle);
        let iflush = self.net.iflush.expect("iflush");
        // SAFETY: as for `irecv`.
        let rc = inside(|| unsafe {
            iflush(
                self.recv.comm,
                1,
                &mut data,
                &mut bytes,
                &mut mhandle,
                &mut request,
            )
        });
        assert!(rc == 0 && request.is_null(), "iflush");
    }

    fn test(&self, request: *mut c_void, size: usize) -> bool {
        let (mut done, mut bytes) = (-1, [-1; 32]);
        let test = self.net.test.expect("test");
        // SAFETY: the request is not over; the places are what the interface promises.
        let rc = inside(|| unsafe { test(request, &mut done, bytes.as_mut_ptr()) });
        assert_eq!(rc, 0, "test");
        assert!(done == 0 || (done == 1 && bytes[0] as usize == size));
        done == 1
    }

    /// Moves messages, [`WINDOW`] in flight.
    fn run(&self, messages: usize, size: usize) {
        let none = std::ptr::null_mut();
        let (mut sends, mut recvs) = ([none; WINDOW], [none; WINDOW]);
        let (mut posted, mut received, mut sending, mut sent) = (0, 0, 0, 0);
        let end = Instant::now() + Duration::from_secs(60);
        while received < messages || sent < messages {
            let mut moved = false;
            while posted < messages && posted < received + WINDOW {
                let r = self.irecv(posted % WINDOW, size);
                if r.is_null() {
                    break;
                }
                recvs[posted % WINDOW] = r;
                posted += 1;
                moved = true;
            }
            while sending < messages && sending < sent + WINDOW {
                let r = self.isend(sending % WINDOW, size);
                if r.is_null() {
                    break;
                }
                sends[sending % WINDOW] = r;
                sending += 1;
                moved = true;
            }
            while sent < sending && self.test(sends[sent % WINDOW], size) {
                sent += 1;
                moved = true;
            }
            while received < posted && self.test(recvs[received % WINDOW], size) {
                if self.recv.buffer.kind().is_device() {
                    self.flush(received % WINDOW, size);
                }
                received += 1;
                moved = true;
            }
            if !moved {
                // A machine with few cores must run the double's engines as well.
                std::thread::yield_now();
                assert!(Instant::now() < end, "nothing moves");
            }
        }
    }

    fn close(self) {
        // SAFETY: what is given up here came from the plugin and is used no more.
        unsafe {
            let dereg = self.net.dereg_mr.expect("deregMr");
            assert_eq!(dereg(self.recv.comm, self.recv.mhandle), 0);
            assert_eq!(dereg(self.send.comm, self.send.mhandle), 0);
            assert_eq!(self.net.close_send.expect("closeSend")(self.send.comm), 0);
            assert_eq!(self.net.close_recv.expect("closeRecv")(self.recv.comm), 0);
        }
    }
}

/// One test at a time has the selector and the counts.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn counts() -> [u64; 3] {
    [&ALLOCATIONS, &FREES, &SYSCALLS].map(|c| c.load(Ordering::SeqCst))
}

/// That all three counters see what the plugin does: listening allocates and calls the system.
fn counters_work() {
    let net = net();
    let before = counts();
    let mut handle = [0u8; 128];
    let mut listener = std::ptr::null_mut();
    let (listen, close) = (
        net.listen.expect("listen"),
        net.close_listen.expect("close"),
    );
    // SAFETY: places for what the interface promises; the listener is closed once.
    inside(|| unsafe { assert_eq!(listen(0, handle.as_mut_ptr().cast(), &mut listener), 0) });
    // SAFETY: as above.
    inside(|| unsafe { assert_eq!(close(listener), 0) });
    let after = counts();
    for (what, i) in [("allocation", 0), ("free", 1), ("system call", 2)] {
        assert!(after[i] > before[i], "no {what} of the plugin's was seen");
    }
}

const MESSAGES: usize = 10_000;

fn quiet(kind: Kind, size: usize) {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    net();
    let _watch = match Watch::start() {
        Ok(w) => w,
        Err(e) => {
            // Linux has it from 5.11 on; some sandboxes do not.
            let release = std::fs::read_to_string("/proc/sys/kernel/osrelease");
            panic!("system calls cannot be counted here ({release:?}): {e}");
        }
    };
    counters_work();
    let pair = Pair::open(kind, size);
    let key = Key {
        seed: 2,
        rank: 0,
        connection: 0,
        message: size,
    };
    let mut image = vec![0u8; WINDOW * size];
    pattern::fill(key, &mut image);
    pair.send.buffer.write(0, &image).expect("written");
    pair.recv.buffer.set(0).expect("cleared");
    // The region may still be on its way to the sender: that is no established connection yet.
    pair.run(1, size);
    let calls = DRIVER_CALLS.load(Ordering::Relaxed);
    let before = counts();
    pair.run(MESSAGES, size);
    let after = counts();
    let calls = DRIVER_CALLS.load(Ordering::Relaxed) - calls;
    let numbers: Vec<u32> = NUMBERS[(before[2] as usize).min(16)..(after[2] as usize).min(16)]
        .iter()
        .map(|n| n.load(Ordering::SeqCst))
        .collect();
    assert_eq!(
        after,
        before,
        "{MESSAGES} messages of {size} bytes, {}: allocations, frees, system calls (of these numbers: \
         {numbers:?})",
        kind.name()
    );
    // What was not counted are calls of the driver: few for each message, and none for host memory.
    let most = if kind.is_device() { 5 * MESSAGES } else { 0 };
    assert!(
        calls <= most as u64,
        "{calls} driver calls for {MESSAGES} messages"
    );
    assert!(!kind.is_device() || calls >= 2 * MESSAGES as u64, "{calls}");
    let mut found = vec![0u8; WINDOW * size];
    pair.recv.buffer.read(0, &mut found).expect("read");
    assert!(found == image, "the data differs");
    pair.close();
}

#[test]
fn host_memory_small() {
    quiet(Kind::Malloc, 8);
}

#[test]
fn host_memory_large() {
    quiet(Kind::Malloc, 200_000);
}

#[test]
fn gpu_memory_small() {
    quiet(Kind::Vmm, 8);
}

#[test]
fn gpu_memory_large() {
    quiet(Kind::Vmm, 200_000);
}
