//! The plugin as a file: what it exports and needs, that it loads anywhere, and that no call through
//! its tables, however wrong, takes the program down.
//!
//! The library is the one that VCCL_PLUGIN names, or else the one that ci/build made.

use std::{
    collections::BTreeSet,
    env,
    ffi::{c_char, c_int, c_ulong, c_void, CStr},
    fs, mem,
    path::{Path, PathBuf},
    process::Command,
    ptr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use vccl::abi::{
    self,
    types::{LogFn, HANDLE_LEN, NCCL_LOG_WARN, NCCL_PTR_HOST, OPTIONAL_RECV_COMPLETION},
};

const NULL: *mut c_void = ptr::null_mut();

fn dist() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/dist")
}

fn plugin() -> PathBuf {
    let path = env::var_os("VCCL_PLUGIN")
        .map_or_else(|| dist().join("lib/libnccl-net-vccl.so"), PathBuf::from);
    assert!(
        path.is_file(),
        "{} is missing: run ci/build first, or set VCCL_PLUGIN to a built plugin",
        path.display()
    );
    path
}

fn open() -> Library {
    let path = plugin();
    // SAFETY: vccl's initialisers are those of the Rust standard library.
    unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }
        .unwrap_or_else(|error| panic!("{} does not load: {error}", path.display()))
}

fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program)
        .args(args)
        .arg(plugin())
        .output()
        .unwrap_or_else(|error| panic!("{program} (of binutils) does not run: {error}"));
    assert!(
        output.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Runs an ignored test of this file in a process of its own.
fn in_a_process(test: &str, double: bool) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([
        "--exact",
        test,
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    if double {
        let double = dist().join("double");
        assert!(
            double.join("libcuda.so.1").is_file(),
            "{} has no libcuda.so.1: run ci/build first",
            double.display()
        );
        let mut paths = vec![double];
        paths.extend(env::split_paths(
            &env::var_os("LD_LIBRARY_PATH").unwrap_or_default(),
        ));
        command.env("LD_LIBRARY_PATH", env::join_paths(paths).unwrap());
    }
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{test}: {}\n{stdout}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

// ---- the file ----

#[test]
fn exports_the_tables_and_nothing_else() {
    let symbols = output("nm", &["-D", "--defined-only"]);
    let found: BTreeSet<&str> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    let expected: Vec<String> = (6..=12)
        .map(|version| format!("ncclNetPlugin_v{version}"))
        .collect();
    assert_eq!(found, expected.iter().map(String::as_str).collect());
}

#[test]
fn needs_the_c_library_alone() {
    let dynamic = output("readelf", &["-dW"]);
    let in_brackets = |line: &str| {
        let (_, rest) = line.split_once('[').unwrap();
        rest.split_once(']').unwrap().0.to_string()
    };
    for line in dynamic.lines().filter(|line| line.contains("(NEEDED)")) {
        let needed = in_brackets(line);
        assert!(
            [
                "libc.so.",
                "libgcc_s.so.",
                "libm.so.",
                "libdl.so.",
                "libpthread.so.",
                "ld-linux"
            ]
            .iter()
            .any(|allowed| needed.starts_with(allowed)),
            "needs {needed}, which not every node has"
        );
    }
    let soname = dynamic
        .lines()
        .find(|line| line.contains("(SONAME)"))
        .expect("no SONAME");
    assert_eq!(in_brackets(soname), "libnccl-net-vccl.so");
    let flags = dynamic
        .lines()
        .find(|line| line.contains("(FLAGS_1)"))
        .expect("no FLAGS_1");
    assert!(flags.contains("NODELETE"), "NCCL would unload it: {flags}");
    assert!(
        flags.contains("NOW"),
        "a missing symbol would show late: {flags}"
    );
}

#[test]
fn loads_without_cuda() {
    in_a_process("child_loads_without_cuda", false);
}

#[test]
#[ignore = "run by loads_without_cuda"]
fn child_loads_without_cuda() {
    let library = open();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains(plugin().file_name().unwrap().to_str().unwrap()));
    for unwanted in ["libcuda", "libibverbs"] {
        assert!(
            !maps.contains(unwanted),
            "loading the plugin loaded {unwanted}"
        );
    }
    drop(library);
}

// ---- a logger ----

static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());
static TURN: Mutex<()> = Mutex::new(());

/// The library has one logger, so the tests that look at it take turns.
fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The one argument after the format is what vccl passes; stable Rust defines no variadic function.
unsafe extern "C" fn record(
    level: c_int,
    _flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    fmt: *const c_char,
    text: *const c_char,
) {
    // SAFETY: vccl passes strings for C.
    let (fmt, text) = unsafe { (CStr::from_ptr(fmt), CStr::from_ptr(text)) };
    if level == NCCL_LOG_WARN {
        let text = if fmt == c"%s" {
            text.to_string_lossy().into_owned()
        } else {
            format!("format {fmt:?}")
        };
        WARNINGS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(text);
    }
}

fn logger() -> Option<LogFn> {
    type Fixed =
        unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
    // SAFETY: Linux passes six integer and pointer arguments alike in both kinds of call.
    Some(unsafe { mem::transmute::<Fixed, LogFn>(record) })
}

fn warnings() -> Vec<String> {
    mem::take(&mut *WARNINGS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// `code` is of a call that must have failed, saying `what` and nothing else.
#[track_caller]
fn failed(code: c_int, entry: &str, what: &str) {
    let warnings = warnings();
    assert_ne!(code, 0, "{entry} succeeded where it should say: {what}");
    assert!((1..=6).contains(&code), "{entry} returned {code}");
    assert_eq!(warnings.len(), 1, "{entry}: {warnings:?}");
    let start = format!("vccl: {entry}: ");
    assert!(
        warnings[0].starts_with(&start),
        "{:?} does not start with {start:?}",
        warnings[0]
    );
    assert!(
        warnings[0].contains(what),
        "{:?} does not say {what:?}",
        warnings[0]
    );
}

#[track_caller]
fn succeeded(code: c_int) {
    assert_eq!(code, 0, "{:?}", warnings());
}

// ---- one way to call all versions ----

/// A context is passed to every call that takes one in some version, and ignored by the others.
trait Table: Sync {
    fn name(&self) -> &CStr;
    fn init(&self, ctx: *mut *mut c_void, log: Option<LogFn>) -> c_int;
    fn devices(&self, ndev: *mut c_int) -> c_int;
    /// With room for the properties, or with NULL.
    fn properties(&self, dev: c_int, room: bool) -> c_int;
    fn listen(
        &self,
        ctx: *mut c_void,
        dev: c_int,
        handle: *mut c_void,
        comm: *mut *mut c_void,
    ) -> c_int;
    fn connect(
        &self,
        ctx: *mut c_void,
        dev: c_int,
        handle: *mut c_void,
        comm: *mut *mut c_void,
    ) -> c_int;
    fn accept(&self, listener: *mut c_void, comm: *mut *mut c_void) -> c_int;
    fn reg_mr(
        &self,
        comm: *mut c_void,
        data: *mut c_void,
        size: i32,
        kind: c_int,
        mr: *mut *mut c_void,
    ) -> c_int;
    fn reg_mr_dma_buf(&self, comm: *mut c_void, data: *mut c_void, mr: *mut *mut c_void) -> c_int;
    fn dereg_mr(&self, comm: *mut c_void, mr: *mut c_void) -> c_int;
    fn isend(
        &self,
        comm: *mut c_void,
        data: *mut c_void,
        size: i32,
        mr: *mut c_void,
        request: *mut *mut c_void,
    ) -> c_int;
    /// Arrays of `n` times the same, or NULL for each argument that is `None`.
    fn irecv(
        &self,
        comm: *mut c_void,
        n: c_int,
        receive: Receive,
        request: *mut *mut c_void,
    ) -> c_int;
    fn iflush(&self, comm: *mut c_void, n: c_int, arrays: bool, request: *mut *mut c_void)
        -> c_int;
    fn test(&self, request: *mut c_void, done: *mut c_int, size: *mut c_int) -> c_int;
    fn close_send(&self, comm: *mut c_void) -> c_int;
    fn close_recv(&self, comm: *mut c_void) -> c_int;
    fn close_listen(&self, comm: *mut c_void) -> c_int;
    /// `None` where the version has none.
    fn finalize(&self, ctx: *mut c_void) -> Option<c_int>;
    /// `None` where the version has none.
    fn set_net_attr(&self, ctx: *mut c_void, room: bool) -> Option<c_int>;
    /// `makeVDevice` of no devices, where the version has it.
    fn make_v_device(&self, dev: *mut c_int, room: bool) -> Option<c_int>;
    /// Whether what a plugin without offload does not have is NULL.
    fn has_no_extras(&self) -> bool;
}

#[derive(Clone, Copy)]
struct Receive {
    data: Option<*mut c_void>,
    size: Option<i32>,
    tag: Option<c_int>,
    mr: Option<*mut c_void>,
}

/// NULL, or an array of `n` times `value`.
fn array<T: Copy>(value: Option<T>, n: c_int) -> (Vec<T>, *mut T) {
    let mut array: Vec<T> = value.into_iter().cycle().take(n.max(1) as usize).collect();
    let start = if array.is_empty() {
        ptr::null_mut()
    } else {
        array.as_mut_ptr()
    };
    (array, start)
}

macro_rules! table {
    (
        $version:ident, mr: $mr:ty, size: $size:ty,
        init: |$c:ident, $log:ident| [$($init:expr),*], context: |$ctx:ident| [$($pass:ident)?], config[$($config:expr)?],
        device[$($device:expr)?], profile[$($profile:expr)?],
        finalize[$($finalize:ident)?], attr[$($attr:ident)?], join[$($join:ident)?],
        extras[$($extra:ident)*]
    ) => {
        // "See above" in what follows: these are the calls that NCCL makes, and the wrong ones that this
        // file is about; all pointers are NULL, or good, or to junk of ours that can be read.
        impl Table for abi::$version::Net {
            fn name(&self) -> &CStr {
                // SAFETY: a plugin's name is a string for C that stays.
                unsafe { CStr::from_ptr(self.name) }
            }
            fn init(&self, $c: *mut *mut c_void, $log: Option<LogFn>) -> c_int {
                let _ = $c;
                // SAFETY: see above.
                unsafe { self.init.unwrap()($($init),*) }
            }
            fn devices(&self, ndev: *mut c_int) -> c_int {
                // SAFETY: see above.
                unsafe { self.devices.unwrap()(ndev) }
            }
            fn properties(&self, dev: c_int, room: bool) -> c_int {
                let mut props = mem::MaybeUninit::uninit();
                let place = if room { props.as_mut_ptr() } else { ptr::null_mut() };
                // SAFETY: see above.
                unsafe {
                    let code = self.get_properties.unwrap()(dev, place);
                    if code == 0 {
                        assert!(!CStr::from_ptr(props.assume_init().name).is_empty());
                    }
                    code
                }
            }
            fn listen(&self, $ctx: *mut c_void, dev: c_int, handle: *mut c_void, comm: *mut *mut c_void) -> c_int {
                let _ = $ctx;
                // SAFETY: see above.
                unsafe { self.listen.unwrap()($($pass,)? dev, handle, comm) }
            }
            fn connect(&self, $ctx: *mut c_void, dev: c_int, handle: *mut c_void, comm: *mut *mut c_void) -> c_int {
                let _ = $ctx;
                // SAFETY: see above.
                unsafe { self.connect.unwrap()($($pass,)? dev, $($config,)? handle, comm, $($device)?) }
            }
            fn accept(&self, listener: *mut c_void, comm: *mut *mut c_void) -> c_int {
                // SAFETY: see above.
                unsafe { self.accept.unwrap()(listener, comm, $($device)?) }
            }
            fn reg_mr(&self, comm: *mut c_void, data: *mut c_void, size: i32, kind: c_int, mr: *mut *mut c_void) -> c_int {
                // SAFETY: see above.
                unsafe { self.reg_mr.unwrap()(comm, data, size as $mr, kind, mr) }
            }
            fn reg_mr_dma_buf(&self, comm: *mut c_void, data: *mut c_void, mr: *mut *mut c_void) -> c_int {
                // SAFETY: see above.
                unsafe { self.reg_mr_dma_buf.unwrap()(comm, data, 64, NCCL_PTR_HOST, 0, -1, mr) }
            }
            fn dereg_mr(&self, comm: *mut c_void, mr: *mut c_void) -> c_int {
                // SAFETY: see above.
                unsafe { self.dereg_mr.unwrap()(comm, mr) }
            }
            fn isend(&self, comm: *mut c_void, data: *mut c_void, size: i32, mr: *mut c_void, request: *mut *mut c_void) -> c_int {
                // SAFETY: see above.
                unsafe { self.isend.unwrap()(comm, data, size as $size, 1, mr, $($profile as *mut c_void,)? request) }
            }
            fn irecv(&self, comm: *mut c_void, n: c_int, receive: Receive, request: *mut *mut c_void) -> c_int {
                let (_data, data) = array(receive.data, n);
                let (_sizes, sizes) = array(receive.size.map(|size| size as $size), n);
                let (_tags, tags) = array(receive.tag, n);
                let (_mrs, mrs) = array(receive.mr, n);
                // SAFETY: see above.
                unsafe { self.irecv.unwrap()(comm, n, data, sizes, tags, mrs, $($profile as *mut *mut c_void,)? request) }
            }
            fn iflush(&self, comm: *mut c_void, n: c_int, arrays: bool, request: *mut *mut c_void) -> c_int {
                let (_data, data) = array(arrays.then_some(NULL), n);
                let (_sizes, sizes) = array(arrays.then_some(0), n);
                let (_mrs, mrs) = array(arrays.then_some(NULL), n);
                // SAFETY: see above.
                unsafe { self.iflush.unwrap()(comm, n, data, sizes, mrs, request) }
            }
            fn test(&self, request: *mut c_void, done: *mut c_int, size: *mut c_int) -> c_int {
                // SAFETY: see above.
                unsafe { self.test.unwrap()(request, done, size) }
            }
            fn close_send(&self, comm: *mut c_void) -> c_int {
                // SAFETY: see above.
                unsafe { self.close_send.unwrap()(comm) }
            }
            fn close_recv(&self, comm: *mut c_void) -> c_int {
                // SAFETY: see above.
                unsafe { self.close_recv.unwrap()(comm) }
            }
            fn close_listen(&self, comm: *mut c_void) -> c_int {
                // SAFETY: see above.
                unsafe { self.close_listen.unwrap()(comm) }
            }
            #[allow(unreachable_code, unused_variables)]
            fn finalize(&self, ctx: *mut c_void) -> Option<c_int> {
                // SAFETY: see above.
                $(return Some(unsafe { self.$finalize.unwrap()(ctx) });)?
                None
            }
            #[allow(unreachable_code, unused_variables)]
            fn set_net_attr(&self, ctx: *mut c_void, room: bool) -> Option<c_int> {
                $(
                    let mut attr = mem::MaybeUninit::zeroed();
                    let place = if room { attr.as_mut_ptr() } else { ptr::null_mut() };
                    // SAFETY: see above.
                    return Some(unsafe { self.$attr.unwrap()(ctx, place) });
                )?
                None
            }
            #[allow(unreachable_code, unused_variables)]
            fn make_v_device(&self, dev: *mut c_int, room: bool) -> Option<c_int> {
                $(
                    let mut props = mem::MaybeUninit::zeroed();
                    let place = if room { props.as_mut_ptr() } else { ptr::null_mut() };
                    // SAFETY: see above.
                    return Some(unsafe { self.$join.unwrap()(dev, place) });
                )?
                None
            }
            fn has_no_extras(&self) -> bool {
                true $(&& self.$extra.is_none())*
            }
        }
    };
}

table! { v6, mr: i32, size: i32, init: |c, log| [log], context: |c| [], config[], device[], profile[],
finalize[], attr[], join[], extras[] }
table! { v7, mr: i32, size: i32, init: |c, log| [log], context: |c| [], config[], device[ptr::null_mut()], profile[],
finalize[], attr[], join[], extras[get_device_mr irecv_consumed] }
table! { v8, mr: usize, size: i32, init: |c, log| [log], context: |c| [], config[], device[ptr::null_mut()], profile[],
finalize[], attr[], join[], extras[get_device_mr irecv_consumed] }
table! { v9, mr: usize, size: usize, init: |c, log| [log], context: |c| [], config[], device[ptr::null_mut()], profile[],
finalize[], attr[], join[make_v_device], extras[get_device_mr irecv_consumed] }
table! { v10, mr: usize, size: usize, init: |c, log| [log, None], context: |c| [], config[ptr::null_mut()],
device[ptr::null_mut()], profile[NULL],
finalize[], attr[], join[make_v_device], extras[get_device_mr irecv_consumed] }
table! { v11, mr: usize, size: usize, init: |c, log| [c, 7, ptr::null_mut(), log, None], context: |c| [c], config[],
device[ptr::null_mut()], profile[NULL],
finalize[finalize], attr[set_net_attr], join[make_v_device], extras[get_device_mr irecv_consumed] }
table! { v12, mr: usize, size: usize, init: |c, log| [c, 7, ptr::null_mut(), log, None], context: |c| [c], config[],
device[ptr::null_mut()], profile[NULL],
finalize[finalize], attr[set_net_attr], join[make_v_device], extras[get_device_mr irecv_consumed] }

/// The tables of a library that stays open for as long as they are used.
fn tables(library: &Library) -> Vec<(u32, &dyn Table)> {
    fn table<'a, T: Table + 'a>(library: &'a Library, symbol: &str) -> &'a dyn Table {
        // SAFETY: the symbol of each version is a table of that version, for as long as the library.
        unsafe {
            let symbol = library
                .get::<*const T>(symbol)
                .unwrap_or_else(|error| panic!("{symbol}: {error}"));
            &*symbol.as_raw_ptr().cast::<T>()
        }
    }
    vec![
        (6, table::<abi::v6::Net>(library, "ncclNetPlugin_v6")),
        (7, table::<abi::v7::Net>(library, "ncclNetPlugin_v7")),
        (8, table::<abi::v8::Net>(library, "ncclNetPlugin_v8")),
        (9, table::<abi::v9::Net>(library, "ncclNetPlugin_v9")),
        (10, table::<abi::v10::Net>(library, "ncclNetPlugin_v10")),
        (11, table::<abi::v11::Net>(library, "ncclNetPlugin_v11")),
        (12, table::<abi::v12::Net>(library, "ncclNetPlugin_v12")),
    ]
}

// ---- wrong calls ----

/// Something that is no NULL and no result, for places that a call should have overwritten.
fn sentinel() -> *mut c_void {
    ptr::without_provenance_mut(0x5e)
}

/// Calls `call` with a place for a pointer and requires that a failure leaves NULL in it.
#[track_caller]
fn failed_out(entry: &str, what: &str, call: impl FnOnce(*mut *mut c_void) -> c_int) {
    let mut place = sentinel();
    failed(call(&mut place), entry, what);
    assert!(place.is_null(), "{entry}: a failure left {place:p} behind");
}

fn no_arrays() -> Receive {
    Receive {
        data: None,
        size: None,
        tag: None,
        mr: None,
    }
}

#[test]
fn null_everywhere() {
    let _turn = turn();
    let library = open();
    for (version, net) in tables(&library) {
        assert_eq!(net.name(), c"vccl");
        assert!(net.has_no_extras());
        let mut ctx = NULL;
        succeeded(net.init(&mut ctx, logger()));
        assert_eq!(ctx.is_null(), version < 11);
        warnings();
        let none = ptr::null_mut();
        let mut handle = [0u8; HANDLE_LEN];
        let handle = handle.as_mut_ptr().cast::<c_void>();

        failed(net.devices(ptr::null_mut()), "devices", "ndev is NULL");
        failed(net.properties(0, false), "getProperties", "props is NULL");
        let mut dev = 0;
        if let Some(code) = net.make_v_device(ptr::null_mut(), true) {
            failed(code, "makeVDevice", "dev is NULL");
            let code = net.make_v_device(&mut dev, false).unwrap();
            failed(code, "makeVDevice", "props is NULL");
            let code = net.make_v_device(&mut dev, true).unwrap();
            failed(code, "makeVDevice", "only devices with an RDMA port");
        }
        assert_eq!(dev, 0);
        failed(
            net.listen(ctx, 0, handle, none),
            "listen",
            "listenComm is NULL",
        );
        failed_out("listen", "handle is NULL", |comm| {
            net.listen(ctx, 0, NULL, comm)
        });
        failed(
            net.connect(ctx, 0, handle, none),
            "connect",
            "sendComm is NULL",
        );
        failed_out("connect", "handle is NULL", |comm| {
            net.connect(ctx, 0, NULL, comm)
        });
        failed(net.accept(NULL, none), "accept", "recvComm is NULL");
        failed_out(
            "accept",
            "listenComm must be a listen communicator, but is NULL",
            |comm| net.accept(NULL, comm),
        );
        failed(
            net.reg_mr(NULL, handle, 1, NCCL_PTR_HOST, none),
            "regMr",
            "mhandle is NULL",
        );
        failed_out(
            "regMr",
            "comm must be a send or receive communicator, but is NULL",
            |mr| net.reg_mr(NULL, handle, 1, NCCL_PTR_HOST, mr),
        );
        failed_out("regMrDmaBuf", "comm must be", |mr| {
            net.reg_mr_dma_buf(NULL, handle, mr)
        });
        failed(net.dereg_mr(NULL, NULL), "deregMr", "comm must be");
        failed(
            net.isend(NULL, handle, 1, NULL, none),
            "isend",
            "request is NULL",
        );
        failed_out("isend", "sendComm must be", |request| {
            net.isend(NULL, handle, 1, NULL, request)
        });
        failed(
            net.irecv(NULL, 1, no_arrays(), none),
            "irecv",
            "request is NULL",
        );
        failed_out("irecv", "recvComm must be", |request| {
            net.irecv(NULL, 1, no_arrays(), request)
        });
        failed(net.iflush(NULL, 1, true, none), "iflush", "request is NULL");
        failed_out("iflush", "recvComm must be", |request| {
            net.iflush(NULL, 1, true, request)
        });
        let mut done = 1;
        failed(
            net.test(NULL, ptr::null_mut(), ptr::null_mut()),
            "test",
            "done is NULL",
        );
        failed(
            net.test(NULL, &mut done, ptr::null_mut()),
            "test",
            "request must be a request, but is NULL",
        );
        assert_eq!(done, 0);
        failed(net.close_send(NULL), "closeSend", "sendComm must be");
        failed(net.close_recv(NULL), "closeRecv", "recvComm must be");
        failed(net.close_listen(NULL), "closeListen", "listenComm must be");
        if version >= 11 {
            failed(net.init(ptr::null_mut(), logger()), "init", "ctx is NULL");
            failed_out("listen", "ctx must be a context, but is NULL", |comm| {
                net.listen(NULL, 0, handle, comm)
            });
            failed(
                net.set_net_attr(NULL, true).unwrap(),
                "setNetAttr",
                "ctx must be",
            );
            failed(
                net.set_net_attr(ctx, false).unwrap(),
                "setNetAttr",
                "netAttr is NULL",
            );
            succeeded(net.set_net_attr(ctx, true).unwrap());
            failed(
                net.finalize(NULL).unwrap(),
                "finalize",
                "ctx must be a context, but is NULL",
            );
            succeeded(net.finalize(ctx).unwrap());
        }
    }
}

#[test]
fn junk_everywhere() {
    let _turn = turn();
    let library = open();
    let mut junk = [0x0101_0101_0101_0101u64; 32];
    let junk = junk.as_mut_ptr().cast::<c_void>();
    let odd = junk.wrapping_byte_add(3);
    for (version, net) in tables(&library) {
        let mut ctx = NULL;
        succeeded(net.init(&mut ctx, logger()));
        warnings();
        for (bad, what) in [
            (junk, "but is no handle of vccl"),
            (odd, "but is the misaligned pointer"),
        ] {
            failed_out("accept", what, |comm| net.accept(bad, comm));
            failed_out("regMr", what, |mr| {
                net.reg_mr(bad, junk, 1, NCCL_PTR_HOST, mr)
            });
            failed_out("regMrDmaBuf", what, |mr| net.reg_mr_dma_buf(bad, junk, mr));
            failed(net.dereg_mr(bad, bad), "deregMr", what);
            failed_out("isend", what, |request| {
                net.isend(bad, junk, 1, bad, request)
            });
            failed_out("irecv", what, |request| {
                net.irecv(bad, 1, no_arrays(), request)
            });
            failed_out("iflush", what, |request| net.iflush(bad, 1, true, request));
            failed(net.test(bad, &mut 0, ptr::null_mut()), "test", what);
            failed(net.close_send(bad), "closeSend", what);
            failed(net.close_recv(bad), "closeRecv", what);
            failed(net.close_listen(bad), "closeListen", what);
        }
        failed(net.properties(-1, true), "getProperties", "-1");
        failed(net.properties(1 << 20, true), "getProperties", "1048576");
        if version >= 11 {
            failed(
                net.set_net_attr(junk, true).unwrap(),
                "setNetAttr",
                "no handle of vccl",
            );
            failed(net.finalize(junk).unwrap(), "finalize", "no handle of vccl");
            succeeded(net.finalize(ctx).unwrap());
            // Without this context, the logger is gone; with another it is back.
            let mut again = NULL;
            succeeded(net.init(&mut again, logger()));
            warnings();
            failed(
                net.finalize(ctx).unwrap(),
                "finalize",
                "a context that is closed already",
            );
            failed(
                net.set_net_attr(ctx, true).unwrap(),
                "setNetAttr",
                "closed already",
            );
            failed(
                net.set_net_attr(junk, true).unwrap(),
                "setNetAttr",
                "no handle of vccl",
            );
            succeeded(net.finalize(again).unwrap());
        }
    }
}

#[test]
fn handles_of_the_wrong_kind_and_closed_ones() {
    in_a_process("child_handles", true);
}

/// Repeats `call` until it leaves something in the place.
#[track_caller]
fn until_there(mut call: impl FnMut(*mut *mut c_void) -> c_int) -> *mut c_void {
    let start = Instant::now();
    loop {
        let mut place = NULL;
        succeeded(call(&mut place));
        if !place.is_null() {
            return place;
        }
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "nothing came in 20 seconds"
        );
        std::thread::yield_now();
    }
}

#[test]
#[ignore = "run by handles_of_the_wrong_kind_and_closed_ones"]
fn child_handles() {
    let library = open();
    for (version, net) in tables(&library) {
        let mut ctx = NULL;
        succeeded(net.init(&mut ctx, logger()));
        let mut ndev = -1;
        succeeded(net.devices(&mut ndev));
        assert!(
            ndev > 0,
            "no device, not even with the CUDA double: {:?}",
            warnings()
        );
        succeeded(net.properties(0, true));
        failed(
            net.properties(ndev, true),
            "getProperties",
            &ndev.to_string(),
        );

        let mut handle = [0u8; HANDLE_LEN];
        let handle = handle.as_mut_ptr().cast::<c_void>();
        let listener = until_there(|comm| net.listen(ctx, 0, handle, comm));
        let (mut sender, mut receiver) = (NULL, NULL);
        let start = Instant::now();
        while sender.is_null() || receiver.is_null() {
            if sender.is_null() {
                succeeded(net.connect(ctx, 0, handle, &mut sender));
            }
            if receiver.is_null() {
                succeeded(net.accept(listener, &mut receiver));
            }
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "no connection in 20 seconds"
            );
        }
        let mut from = vec![3u8; 4096];
        let mut to = vec![0u8; 4096];
        let (from, to) = (
            from.as_mut_ptr().cast::<c_void>(),
            to.as_mut_ptr().cast::<c_void>(),
        );
        let from_mr = until_there(|mr| net.reg_mr(sender, from, 4096, NCCL_PTR_HOST, mr));
        let to_mr = until_there(|mr| net.reg_mr(receiver, to, 4096, NCCL_PTR_HOST, mr));
        let good = Receive {
            data: Some(to),
            size: Some(4096),
            tag: Some(1),
            mr: Some(to_mr),
        };
        warnings();

        // Each handle where another kind should be.
        failed_out("accept", "but is a send communicator", |comm| {
            net.accept(sender, comm)
        });
        failed_out("regMr", "but is a listen communicator", |mr| {
            net.reg_mr(listener, to, 1, NCCL_PTR_HOST, mr)
        });
        failed_out("regMrDmaBuf", "but is a memory registration", |mr| {
            net.reg_mr_dma_buf(to_mr, to, mr)
        });
        failed(
            net.dereg_mr(receiver, receiver),
            "deregMr",
            "but is a receive communicator",
        );
        failed_out("isend", "but is a receive communicator", |request| {
            net.isend(receiver, from, 1, from_mr, request)
        });
        failed_out(
            "isend",
            "mhandle must be a memory registration, but is a send",
            |request| net.isend(sender, from, 1, sender, request),
        );
        failed_out("irecv", "but is a send communicator", |request| {
            net.irecv(sender, 1, good, request)
        });
        failed_out(
            "irecv",
            "mhandles[0] must be a memory registration, but is a listen",
            |request| {
                net.irecv(
                    receiver,
                    1,
                    Receive {
                        mr: Some(listener),
                        ..good
                    },
                    request,
                )
            },
        );
        failed_out("iflush", "but is a send communicator", |request| {
            net.iflush(sender, 1, true, request)
        });
        failed(
            net.test(receiver, &mut 0, ptr::null_mut()),
            "test",
            "but is a receive communicator",
        );
        failed(
            net.close_send(receiver),
            "closeSend",
            "but is a receive communicator",
        );
        failed(
            net.close_recv(listener),
            "closeRecv",
            "but is a listen communicator",
        );
        failed(
            net.close_listen(sender),
            "closeListen",
            "but is a send communicator",
        );
        if version >= 11 {
            failed(
                net.finalize(sender).unwrap(),
                "finalize",
                "but is a send communicator",
            );
        }

        // Arguments that are out of range or missing.
        for n in [-1, 0, 2] {
            failed_out("irecv", &format!("n is {n},"), |request| {
                net.irecv(receiver, n, good, request)
            });
        }
        failed_out("iflush", "n is 2,", |request| {
            net.iflush(receiver, 2, true, request)
        });
        failed_out("iflush", "data is NULL", |request| {
            net.iflush(receiver, 1, false, request)
        });
        for (receive, what) in [
            (Receive { data: None, ..good }, "data is NULL"),
            (
                Receive {
                    data: Some(NULL),
                    ..good
                },
                "data is NULL",
            ),
            (Receive { size: None, ..good }, "sizes is NULL"),
            (
                Receive {
                    size: Some(-5),
                    ..good
                },
                "sizes[0] is negative: -5",
            ),
            (Receive { tag: None, ..good }, "tags is NULL"),
            (Receive { mr: None, ..good }, "mhandles is NULL"),
            (
                Receive {
                    mr: Some(NULL),
                    ..good
                },
                "mhandles[0] must be a memory registration, but is NULL",
            ),
        ] {
            failed_out("irecv", what, |request| {
                net.irecv(receiver, 1, receive, request)
            });
        }
        failed_out("isend", "data is NULL", |request| {
            net.isend(sender, NULL, 1, from_mr, request)
        });
        failed_out("isend", "size is negative: -1", |request| {
            net.isend(sender, from, -1, from_mr, request)
        });
        failed_out("isend", "mhandle must be", |request| {
            net.isend(sender, from, 1, NULL, request)
        });
        failed_out("regMr", "data is NULL", |mr| {
            net.reg_mr(sender, NULL, 1, NCCL_PTR_HOST, mr)
        });
        failed_out("regMr", "size is negative: -1", |mr| {
            net.reg_mr(sender, from, -1, NCCL_PTR_HOST, mr)
        });

        // A message still gets through. A hint in the place of the request changes nothing.
        let receiving = until_there(|request| {
            // SAFETY: the place that `until_there` made.
            unsafe { *request = ptr::without_provenance_mut(OPTIONAL_RECV_COMPLETION) };
            net.irecv(receiver, 1, good, request)
        });
        let sending = until_there(|request| net.isend(sender, from, 4096, from_mr, request));
        for request in [sending, receiving] {
            let (mut done, mut size) = (0, 0);
            let start = Instant::now();
            while done == 0 {
                // A size is welcome or not.
                succeeded(net.test(request, &mut done, &mut size));
                assert!(
                    start.elapsed() < Duration::from_secs(20),
                    "no message in 20 seconds"
                );
            }
        }
        let mut request = sentinel();
        succeeded(net.iflush(receiver, 1, true, &mut request));
        assert!(request.is_null());

        // Each handle after its end.
        let closed = "closed already";
        succeeded(net.dereg_mr(sender, from_mr));
        succeeded(net.dereg_mr(receiver, to_mr));
        warnings();
        failed(net.dereg_mr(sender, from_mr), "deregMr", closed);
        failed_out("isend", closed, |request| {
            net.isend(sender, from, 1, from_mr, request)
        });
        failed_out("irecv", closed, |request| {
            net.irecv(receiver, 1, good, request)
        });
        succeeded(net.close_send(sender));
        succeeded(net.close_recv(receiver));
        succeeded(net.close_listen(listener));
        warnings();
        failed(net.close_send(sender), "closeSend", closed);
        failed(net.close_recv(receiver), "closeRecv", closed);
        failed(net.close_listen(listener), "closeListen", closed);
        failed_out("accept", closed, |comm| net.accept(listener, comm));
        failed_out("isend", closed, |request| {
            net.isend(sender, from, 1, from_mr, request)
        });
        failed_out("irecv", closed, |request| {
            net.irecv(receiver, 1, good, request)
        });
        failed_out("iflush", closed, |request| {
            net.iflush(receiver, 1, true, request)
        });
        failed_out("regMr", closed, |mr| {
            net.reg_mr(sender, from, 1, NCCL_PTR_HOST, mr)
        });
        failed(net.dereg_mr(receiver, to_mr), "deregMr", closed);
        if let Some(code) = net.finalize(ctx) {
            succeeded(code);
        }
    }
}

// ---- again and again ----

#[test]
fn loading_100_times_leaks_nothing() {
    in_a_process("child_loads_100_times", false);
}

#[test]
fn loading_100_times_leaks_nothing_with_cuda() {
    in_a_process("child_loads_100_times", true);
}

/// Threads, open files, and KiB of memory of this process.
fn footprint() -> (usize, usize, u64) {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let rss = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    (
        fs::read_dir("/proc/self/task").unwrap().count(),
        fs::read_dir("/proc/self/fd").unwrap().count(),
        rss.trim().trim_end_matches(" kB").parse().unwrap(),
    )
}

#[test]
#[ignore = "run by loading_100_times_leaks_nothing"]
fn child_loads_100_times() {
    let mut before = None;
    for round in 0..110 {
        let library = open();
        for (_, net) in tables(&library) {
            let (mut ctx, mut ndev) = (NULL, -1);
            succeeded(net.init(&mut ctx, logger()));
            succeeded(net.devices(&mut ndev));
            assert!(ndev >= 0);
            if let Some(code) = net.finalize(ctx) {
                succeeded(code);
            }
        }
        library.close().unwrap();
        warnings();
        if round == 9 {
            before = Some(footprint());
        }
    }
    let (threads, files, memory) = before.unwrap();
    let after = footprint();
    assert_eq!(
        (after.0, after.1),
        (threads, files),
        "threads and open files"
    );
    assert!(
        after.2 < memory + 2048,
        "100 rounds grew memory from {memory} to {} KiB",
        after.2
    );
}
