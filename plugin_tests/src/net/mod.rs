//! A net plugin of any ABI version, called as NCCL calls it.
//!
//! [`Plugin`] loads the library, [`Session`] is what one NCCL communicator holds of it, and
//! [`Progress`] has the four functions that only NCCL's progress thread calls. What NCCL leaves
//! uninitialized when it calls is filled with junk here, so that a plugin that forgets to write a
//! result is found out.

mod table;

use std::ffi::{c_int, c_void, CStr, OsStr};
use std::path::Path;
use std::sync::{Arc, Mutex};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use vccl::abi::types::{HANDLE_LEN, NCCL_PTR_CUDA, NCCL_PTR_HOST, OPTIONAL_RECV_COMPLETION};
use vccl::error::ResultCode;

use crate::cuda::DoubleHooks;
use crate::error::{Error, Result};
use crate::logs;
use crate::memory::Buffer;
use crate::{ensure, fail};

use table::Table;

/// The ABI versions that the driver knows, newest first, as NCCL looks for them.
pub const VERSIONS: [u32; 7] = [12, 11, 10, 9, 8, 7, 6];

/// The most requests that NCCL keeps open for each receive that a plugin can group.
pub const MAX_REQUESTS: usize = 32;

/// The most steps that NCCL has in flight on one connection.
pub const STEPS: usize = 8;

/// The largest message that NCCL sends through a plugin that does not name a larger one.
pub const MAX_MESSAGE: usize = 1 << 30;

/// Left where NCCL leaves an old pointer; no plugin can return it.
const STALE: usize = 0xdead_beef_0000;

/// The properties of a device, of whatever version.
#[derive(Debug, Clone)]
pub struct Properties {
    /// Name of the device.
    pub name: String,
    /// Path under /sys, if the plugin names one.
    pub pci_path: Option<String>,
    /// Identifier of the card.
    pub guid: u64,
    /// Sum of `NCCL_PTR_*`.
    pub ptr_support: i32,
    /// Mbit/s.
    pub speed: i32,
    /// Port number.
    pub port: i32,
    /// Microseconds.
    pub latency: f32,
    /// How many communicators can exist.
    pub max_comms: i32,
    /// How many receives one `irecv` may group.
    pub max_recvs: i32,
    /// Kind of device offload, version 7 and later.
    pub device_type: Option<i32>,
    /// Whether a registration holds for every communicator, version 8 and later.
    pub reg_is_global: Option<i32>,
    /// Whether NCCL must flush after each receive, version 9 and later.
    pub force_flush: Option<i32>,
    /// Largest point-to-point message, version 9 and later.
    pub max_p2p_bytes: Option<usize>,
    /// Largest message of a collective, version 9 and later.
    pub max_coll_bytes: Option<usize>,
    /// The physical devices behind this one, version 9 and later: how many, and the array.
    pub v_devices: Option<(i32, Vec<i32>)>,
    /// Requests in one multi-request, version 11 and later.
    pub max_multi_request: Option<i32>,
}

/// The 128 bytes that `listen` fills and that reach `connect`. NCCL passes the same storage at each
/// attempt, so a plugin may keep its state in it.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Handle(pub [u8; HANDLE_LEN]);

macro_rules! foreign {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name(usize);

        impl $name {
            fn ptr(self) -> *mut c_void {
                self.0 as *mut c_void
            }
        }
    };
}

foreign! {
    /// What `listen` returned.
    ListenComm
}
foreign! {
    /// What `connect` returned.
    SendComm
}
foreign! {
    /// What `accept` returned.
    RecvComm
}
foreign! {
    /// What `reg_mr` returned.
    MHandle
}
foreign! {
    /// What `isend`, `irecv` or `iflush` returned.
    Request
}

/// Either end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comm {
    /// The end that sends.
    Send(SendComm),
    /// The end that receives.
    Recv(RecvComm),
}

impl Comm {
    fn ptr(self) -> *mut c_void {
        match self {
            Comm::Send(c) => c.ptr(),
            Comm::Recv(c) => c.ptr(),
        }
    }
}

/// Memory that is registered with one end of a connection. Keeps the memory alive, and registered
/// until [`Session::dereg_mr`].
#[derive(Clone, Debug)]
pub struct Registered {
    /// The memory.
    pub buffer: Arc<Buffer>,
    /// Where in the memory the registration begins.
    pub offset: usize,
    /// How many bytes are registered.
    pub len: usize,
    comm: Comm,
    mhandle: MHandle,
}

impl Registered {
    fn at(&self, offset: usize, len: usize) -> *mut c_void {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "a case uses bytes {offset}+{len} of a registration of {}",
            self.len
        );
        (self.buffer.address() + self.offset + offset) as *mut c_void
    }
}

/// A loaded plugin.
#[derive(Clone)]
pub struct Plugin {
    table: Arc<dyn Table>,
    // Versions before 11 are initialized once for a process, as NCCL's own shim does.
    inits: Arc<Mutex<u32>>,
}

impl Plugin {
    /// Loads the library and takes the newest table, or that of version `abi`.
    pub fn load(path: impl AsRef<Path>, abi: Option<u32>) -> Result<Plugin> {
        let path = path.as_ref();
        // SAFETY: running the library's constructors is what loading a plugin means; NCCL does the
        // same with the same flags.
        let library = unsafe { Library::open(Some(path.as_os_str()), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|e| Error::new(format!("cannot load {}: {}", path.display(), why(&e))))?;
        let library = Arc::new(library);
        let wanted: &[u32] = match &abi {
            Some(v) => std::slice::from_ref(v),
            None => &VERSIONS,
        };
        for v in wanted {
            if let Some(table) = table::find(&library, *v) {
                return Ok(Plugin {
                    table,
                    inits: Arc::default(),
                });
            }
        }
        match abi {
            Some(v) => fail!(
                "{} has no ncclNetPlugin_v{v}; it has {}",
                path.display(),
                Plugin::versions_in(&library)
            ),
            None => fail!(
                "{} is no NCCL net plugin: it has none of ncclNetPlugin_v6 to _v12",
                path.display()
            ),
        }
    }

    fn versions_in(library: &Library) -> String {
        let found: Vec<String> = VERSIONS
            .iter()
            .filter(|v| table::has(library, **v))
            .map(|v| format!("v{v}"))
            .collect();
        if found.is_empty() {
            "none".to_string()
        } else {
            found.join(" ")
        }
    }

    /// The ABI version in use.
    pub fn abi(&self) -> u32 {
        self.table.abi()
    }

    /// The network's name, which `NCCL_NET` selects by.
    pub fn name(&self) -> String {
        let p = self.table.name();
        if p.is_null() {
            return String::new();
        }
        // SAFETY: the table's name is a C string that lives as long as the library.
        unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
    }

    /// Calls `init` as NCCL does for a new communicator.
    pub fn init(&self) -> Result<Session> {
        let mut ctx: *mut c_void = std::ptr::null_mut();
        {
            let mut inits = self.inits.lock().unwrap_or_else(|e| e.into_inner());
            if self.abi() >= 11 || *inits == 0 {
                // SAFETY: `ctx` is a place for a pointer; the logger lives as long as the process.
                let rc = unsafe { self.table.init(&mut ctx) };
                check(rc, "init", logs::mark())?;
            }
            *inits += 1;
        }
        Ok(Session {
            plugin: self.clone(),
            ctx: ctx as usize,
        })
    }
}

/// What one NCCL communicator holds of a plugin.
#[derive(Clone)]
pub struct Session {
    plugin: Plugin,
    ctx: usize,
}

/// An error with its causes: what the loader said is the cause of libloading's own text.
pub(crate) fn why(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut cause = e.source();
    while let Some(c) = cause {
        text.push_str(&format!(": {c}"));
        cause = c.source();
    }
    text
}

fn check(rc: c_int, call: &str, mark: usize) -> Result<()> {
    if rc == ResultCode::SUCCESS.0 {
        return Ok(());
    }
    let code = ResultCode(rc);
    let mut text = format!("{call} returned {}", code_name(code));
    if let Some(last) = logs::warnings_since(mark).last() {
        text.push_str(&format!(" and logged: {last}"));
    }
    Err(Error::plugin(code, text))
}

/// The name in nccl.h of a result code.
pub fn code_name(code: ResultCode) -> String {
    match code {
        ResultCode::SUCCESS => "ncclSuccess".into(),
        ResultCode::UNHANDLED_CUDA => "ncclUnhandledCudaError".into(),
        ResultCode::SYSTEM => "ncclSystemError".into(),
        ResultCode::INTERNAL => "ncclInternalError".into(),
        ResultCode::INVALID_ARGUMENT => "ncclInvalidArgument".into(),
        ResultCode::INVALID_USAGE => "ncclInvalidUsage".into(),
        ResultCode::REMOTE => "ncclRemoteError".into(),
        ResultCode(table::MISSING) => "nothing: the function is NULL in the table".into(),
        ResultCode(n) => format!("the unknown code {n}"),
    }
}

impl Session {
    fn table(&self) -> &dyn Table {
        &*self.plugin.table
    }

    fn ctx(&self) -> *mut c_void {
        self.ctx as *mut c_void
    }

    /// The ABI version in use.
    pub fn abi(&self) -> u32 {
        self.plugin.abi()
    }

    /// How many devices there are.
    pub fn devices(&self) -> Result<i32> {
        let mut n: c_int = -1;
        let mark = logs::mark();
        // SAFETY: `n` is a place for an int.
        check(unsafe { self.table().devices(&mut n) }, "devices", mark)?;
        Ok(n)
    }

    /// The properties of device `dev`.
    pub fn properties(&self, dev: i32) -> Result<Properties> {
        let mark = logs::mark();
        let (rc, props) = self.table().properties(dev);
        check(rc, "getProperties", mark)?;
        props.map_err(|field| {
            Error::new(format!(
                "getProperties({dev}) returned success and left {field} unset"
            ))
        })
    }

    /// Joins devices into a virtual one.
    pub fn join(&self, devices: &[i32]) -> Result<i32> {
        let mark = logs::mark();
        let (rc, dev) = self.table().join(devices);
        check(rc, "makeVDevice", mark)?;
        Ok(dev)
    }

    /// Listens on device `dev`.
    pub fn listen(&self, dev: i32) -> Result<(Handle, ListenComm)> {
        let mut handle = Handle([0; HANDLE_LEN]);
        let mut comm: *mut c_void = std::ptr::null_mut();
        let mark = logs::mark();
        // SAFETY: `handle` has the 128 bytes that the interface promises, `comm` is a pointer.
        let rc = unsafe {
            self.table()
                .listen(self.ctx(), dev, handle.0.as_mut_ptr().cast(), &mut comm)
        };
        check(rc, "listen", mark)?;
        ensure!(!comm.is_null(), "listen returned success and a NULL comm");
        Ok((handle, ListenComm(comm as usize)))
    }

    /// One attempt to connect; `None` means 'call again' with the same handle storage.
    pub fn connect(&self, dev: i32, handle: &mut Handle) -> Result<Option<SendComm>> {
        let mut comm: *mut c_void = std::ptr::null_mut();
        let mark = logs::mark();
        // SAFETY: `handle` has the 128 bytes that the interface promises, `comm` is a pointer.
        let rc = unsafe {
            self.table()
                .connect(self.ctx(), dev, handle.0.as_mut_ptr().cast(), &mut comm)
        };
        check(rc, "connect", mark)?;
        Ok((!comm.is_null()).then_some(SendComm(comm as usize)))
    }

    /// One attempt to accept; `None` means 'call again'.
    pub fn accept(&self, listener: ListenComm) -> Result<Option<RecvComm>> {
        let mut comm: *mut c_void = std::ptr::null_mut();
        let mark = logs::mark();
        // SAFETY: `listener` came from `listen` and is not closed; `comm` is a pointer.
        let rc = unsafe { self.table().accept(listener.ptr(), &mut comm) };
        check(rc, "accept", mark)?;
        Ok((!comm.is_null()).then_some(RecvComm(comm as usize)))
    }

    /// Registers `len` bytes of `buffer` from `offset` on.
    pub fn reg_mr(
        &self,
        comm: Comm,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
    ) -> Result<Registered> {
        let kind = if buffer.kind().is_device() {
            NCCL_PTR_CUDA
        } else {
            NCCL_PTR_HOST
        };
        self.reg_mr_as(comm, buffer, offset, len, kind)
    }

    /// The same, as memory of the kind `NCCL_PTR_*`, whatever it is.
    pub fn reg_mr_as(
        &self,
        comm: Comm,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
        kind: c_int,
    ) -> Result<Registered> {
        assert!(
            offset + len <= buffer.len(),
            "a case registers more than it has"
        );
        let data = (buffer.address() + offset) as *mut c_void;
        let mut mhandle: *mut c_void = std::ptr::null_mut();
        let mark = logs::mark();
        // SAFETY: the memory exists and `Registered` keeps it alive; the comm is open.
        let rc = unsafe {
            self.table()
                .reg_mr(comm.ptr(), data, len, kind, &mut mhandle)
        };
        check(rc, "regMr", mark)
            .map_err(|e| e.context(format!("{} of {len} bytes", buffer.kind().name())))?;
        Ok(Registered {
            buffer: buffer.clone(),
            offset,
            len,
            comm,
            mhandle: MHandle(mhandle as usize),
        })
    }

    /// Ends a registration.
    pub fn dereg_mr(&self, registered: Registered) -> Result<()> {
        let mark = logs::mark();
        // SAFETY: the handle came from `reg_mr` on the same comm and is given up here.
        let rc = unsafe {
            self.table()
                .dereg_mr(registered.comm.ptr(), registered.mhandle.ptr())
        };
        check(rc, "deregMr", mark)
    }

    /// Closes either end of a connection.
    pub fn close(&self, comm: Comm) -> Result<()> {
        let mark = logs::mark();
        match comm {
            Comm::Send(c) => {
                // SAFETY: the comm came from `connect`; the case uses it no more.
                check(
                    unsafe { self.table().close_send(c.ptr()) },
                    "closeSend",
                    mark,
                )
            }
            Comm::Recv(c) => {
                // SAFETY: the comm came from `accept`; the case uses it no more.
                check(
                    unsafe { self.table().close_recv(c.ptr()) },
                    "closeRecv",
                    mark,
                )
            }
        }
    }

    /// Closes a listener.
    pub fn close_listen(&self, listener: ListenComm) -> Result<()> {
        let mark = logs::mark();
        // SAFETY: the listener came from `listen`; the case uses it no more.
        check(
            unsafe { self.table().close_listen(listener.ptr()) },
            "closeListen",
            mark,
        )
    }

    /// Calls `finalize` where the version has it.
    pub fn finalize(self) -> Result<()> {
        let mut inits = self.plugin.inits.lock().unwrap_or_else(|e| e.into_inner());
        *inits = inits.saturating_sub(1);
        let mark = logs::mark();
        // SAFETY: `ctx` came from `init`, and the session is given up here.
        check(
            unsafe { self.table().finalize(self.ctx()) },
            "finalize",
            mark,
        )
    }
}

/// What NCCL's progress thread calls.
#[derive(Clone)]
pub struct Progress {
    session: Session,
    double: Option<DoubleHooks>,
}

/// One receive of a grouped `irecv`.
pub struct RecvPart<'a> {
    /// Registered memory.
    pub memory: &'a Registered,
    /// Where in it the message goes.
    pub offset: usize,
    /// How many bytes may come.
    pub capacity: usize,
    /// The tag that the send must have.
    pub tag: i32,
}

impl Progress {
    /// The progress thread's side of a session. With the CUDA double, each call is bracketed with
    /// its marks of the progress path.
    pub fn new(session: Session, double: Option<DoubleHooks>) -> Progress {
        Progress { session, double }
    }

    fn on_path<R>(&self, f: impl FnOnce(&dyn Table) -> R) -> R {
        let _guard = self.double.map(|d| d.enter());
        f(self.session.table())
    }

    /// Starts a send; `None` means 'call again'.
    pub fn isend(
        &self,
        comm: SendComm,
        memory: &Registered,
        offset: usize,
        size: usize,
        tag: i32,
    ) -> Result<Option<Request>> {
        let data = memory.at(offset, size);
        // NCCL passes a slot that may still hold the pointer of an earlier step.
        let mut request = STALE as *mut c_void;
        let mark = logs::mark();
        // SAFETY: the comm is open, and the registered memory lives longer than the request.
        let rc = self.on_path(|t| unsafe {
            t.isend(
                comm.ptr(),
                data,
                size,
                tag,
                memory.mhandle.ptr(),
                &mut request,
            )
        });
        check(rc, "isend", mark)?;
        ensure!(
            request as usize != STALE,
            "isend returned success and did not write *request"
        );
        Ok((!request.is_null()).then_some(Request(request as usize)))
    }

    /// Starts one receive; `None` means 'call again'.
    pub fn irecv(
        &self,
        comm: RecvComm,
        memory: &Registered,
        offset: usize,
        capacity: usize,
        tag: i32,
    ) -> Result<Option<Request>> {
        self.irecv_group(
            comm,
            &[RecvPart {
                memory,
                offset,
                capacity,
                tag,
            }],
            false,
        )
    }

    /// Starts grouped receives. With `optional`, tells the plugin (from version 9 on) that nobody
    /// will look at the completion.
    pub fn irecv_group(
        &self,
        comm: RecvComm,
        parts: &[RecvPart],
        optional: bool,
    ) -> Result<Option<Request>> {
        let mut data: Vec<*mut c_void> = parts
            .iter()
            .map(|p| p.memory.at(p.offset, p.capacity))
            .collect();
        let mut sizes: Vec<usize> = parts.iter().map(|p| p.capacity).collect();
        let mut tags: Vec<c_int> = parts.iter().map(|p| p.tag).collect();
        let mut mhandles: Vec<*mut c_void> = parts.iter().map(|p| p.memory.mhandle.ptr()).collect();
        let hint = optional && self.session.abi() >= 9;
        let before = if hint { OPTIONAL_RECV_COMPLETION } else { 0 };
        let mut request = before as *mut c_void;
        let mark = logs::mark();
        // SAFETY: the comm is open, the arrays have one entry for each part, and the registered
        // memory lives longer than the request.
        let rc = self.on_path(|t| unsafe {
            t.irecv(
                comm.ptr(),
                &mut data,
                &mut sizes,
                &mut tags,
                &mut mhandles,
                &mut request,
            )
        });
        check(rc, "irecv", mark)?;
        ensure!(
            !hint || request as usize != OPTIONAL_RECV_COMPLETION,
            "irecv returned success and left the hint in *request"
        );
        Ok((!request.is_null()).then_some(Request(request as usize)))
    }

    /// Starts a flush of a receive that is done; `None` means that there is nothing to wait for.
    pub fn iflush(
        &self,
        comm: RecvComm,
        memory: &Registered,
        offset: usize,
        size: usize,
    ) -> Result<Option<Request>> {
        let mut data = [memory.at(offset, size)];
        let mut sizes = [size as c_int];
        let mut mhandles = [memory.mhandle.ptr()];
        let mut request: *mut c_void = std::ptr::null_mut();
        let mark = logs::mark();
        // SAFETY: as for `irecv_group`, with arrays of one entry.
        let rc = self.on_path(|t| unsafe {
            t.iflush(
                comm.ptr(),
                &mut data,
                &mut sizes,
                &mut mhandles,
                &mut request,
            )
        });
        check(rc, "iflush", mark)?;
        Ok((!request.is_null()).then_some(Request(request as usize)))
    }

    /// Whether a request is done, and if so how many bytes each of its parts moved.
    pub fn test_sizes(&self, request: Request, sizes: &mut [c_int]) -> Result<bool> {
        let mut done: c_int = 0x5a5a;
        let mark = logs::mark();
        // SAFETY: the request is not done yet; `sizes` has one entry for each part.
        let rc = self.on_path(|t| unsafe { t.test(request.ptr(), &mut done, sizes.as_mut_ptr()) });
        check(rc, "test", mark)?;
        match done {
            0 => Ok(false),
            1 => Ok(true),
            n => fail!("test returned success and left done at {n:#x}"),
        }
    }

    /// Whether a request is done, and if so how many bytes it moved.
    pub fn test(&self, request: Request) -> Result<Option<usize>> {
        // NCCL passes room for every part that a request can have, whatever it asked for.
        let mut sizes: [c_int; MAX_REQUESTS] = [0; MAX_REQUESTS];
        Ok(self
            .test_sizes(request, &mut sizes)?
            .then_some(sizes[0] as usize))
    }

    /// Like [`Progress::test`], but with no place for sizes, as NCCL calls it after a flush.
    pub fn test_flush(&self, request: Request) -> Result<bool> {
        let mut done: c_int = 0x5a5a;
        let mark = logs::mark();
        // SAFETY: the request is not done yet; the interface allows a NULL `sizes`.
        let rc =
            self.on_path(|t| unsafe { t.test(request.ptr(), &mut done, std::ptr::null_mut()) });
        check(rc, "test", mark)?;
        Ok(done == 1)
    }
}

/// The name under which NCCL would look for `NCCL_NET_PLUGIN=name`.
pub fn library_name(name: &str) -> String {
    if Path::new(name).extension() == Some(OsStr::new("so")) || name.contains('/') {
        name.to_string()
    } else {
        format!("libnccl-net-{name}.so")
    }
}
