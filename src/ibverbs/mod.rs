//! libibverbs, loaded at run time: the only files that name its symbols.
//!
//! A machine without it loads the plugin all the same. Symbols are taken by version, because the
//! library carries older ones of the same names. What the library gives out is owned here by values
//! that hold what they were made from, so that nothing is given back before what depends on it.
//! libibverbs lets every thread use every object, so all of them may be sent and shared.
//!
//! Source for signatures: rdma-core's man pages (section 3).

pub mod devices;
pub mod filter;
pub mod sys;

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use nix::errno::Errno;

use crate::error::{Error, Result, ResultCode};

/// Where the kernel shows its RDMA devices.
pub const SYSFS: &str = "/sys/class/infiniband";
const LIBRARY: &CStr = c"libibverbs.so.1";
/// How often a queue pair is told its peer's address before that counts as unknown: the kernel gives up
/// after a second or so, and the first look at a neighbour can take longer.
const RESOLVING: u32 = 4;
/// Access flags that a library or a device that does not know them may pass over.
const ACCESS_OPTIONAL: u32 = 0x3ff0_0000;

macro_rules! table {
    (
        required { $($field:ident = $symbol:literal ( $($arg:ty),* ) $(-> $ret:ty)?;)* }
        optional { $($o_field:ident = $o_symbol:literal $version:literal ( $($o_arg:ty),* ) -> $o_ret:ty;)* }
    ) => {
        #[derive(Debug)]
        struct Table {
            $($field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            $($o_field: Option<unsafe extern "C" fn($($o_arg),*) -> $o_ret>,)*
        }

        impl Table {
            /// # Safety
            ///
            /// `library` is a handle of libibverbs that is never closed.
            unsafe fn load(library: *mut c_void) -> std::result::Result<Table, String> {
                /// # Safety
                ///
                /// As for `load`.
                unsafe fn find(library: *mut c_void, name: &str, version: &str) -> *mut c_void {
                    let (Ok(name), Ok(version)) = (CString::new(name), CString::new(version)) else {
                        return null_mut();
                    };
                    // SAFETY: the handle is open, and both strings live through the call.
                    unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) }
                }
                Ok(Table {
                    $($field: {
                        // SAFETY: as this function's caller promises.
                        let p = unsafe { find(library, $symbol, "IBVERBS_1.1") };
                        if p.is_null() {
                            return Err(format!(
                                "the library has no {} of version IBVERBS_1.1: it is no libibverbs \
                                 of rdma-core; install that",
                                $symbol
                            ));
                        }
                        // SAFETY: the symbol is the function of that name and version, whose C
                        // signature is the one of the field.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) $(-> $ret)?,
                            >(p)
                        }
                    },)*
                    $($o_field: {
                        // SAFETY: as this function's caller promises.
                        let p = unsafe { find(library, $o_symbol, $version) };
                        // SAFETY: as above; NULL becomes None.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                Option<unsafe extern "C" fn($($o_arg),*) -> $o_ret>,
                            >(p)
                        }
                    },)*
                })
            }
        }
    };
}

table! {
    required {
        fork_init = "ibv_fork_init"() -> c_int;
        get_device_list = "ibv_get_device_list"(*mut c_int) -> *mut *mut sys::Device;
        free_device_list = "ibv_free_device_list"(*mut *mut sys::Device);
        get_device_name = "ibv_get_device_name"(*mut sys::Device) -> *const c_char;
        open_device = "ibv_open_device"(*mut sys::Device) -> *mut sys::Context;
        close_device = "ibv_close_device"(*mut sys::Context) -> c_int;
        query_device = "ibv_query_device"(*mut sys::Context, *mut sys::DeviceAttr) -> c_int;
        query_port = "ibv_query_port"(*mut sys::Context, u8, *mut sys::PortAttr) -> c_int;
        query_gid = "ibv_query_gid"(*mut sys::Context, u8, c_int, *mut sys::Gid) -> c_int;
        get_async_event = "ibv_get_async_event"(*mut sys::Context, *mut sys::AsyncEvent) -> c_int;
        ack_async_event = "ibv_ack_async_event"(*mut sys::AsyncEvent);
        alloc_pd = "ibv_alloc_pd"(*mut sys::Context) -> *mut sys::Pd;
        dealloc_pd = "ibv_dealloc_pd"(*mut sys::Pd) -> c_int;
        reg_mr = "ibv_reg_mr"(*mut sys::Pd, *mut c_void, usize, c_int) -> *mut sys::Mr;
        dereg_mr = "ibv_dereg_mr"(*mut sys::Mr) -> c_int;
        create_cq = "ibv_create_cq"(
            *mut sys::Context, c_int, *mut c_void, *mut sys::CompChannel, c_int
        ) -> *mut sys::Cq;
        destroy_cq = "ibv_destroy_cq"(*mut sys::Cq) -> c_int;
        create_qp = "ibv_create_qp"(*mut sys::Pd, *mut sys::QpInitAttr) -> *mut sys::Qp;
        modify_qp = "ibv_modify_qp"(*mut sys::Qp, *mut sys::QpAttr, c_int) -> c_int;
        destroy_qp = "ibv_destroy_qp"(*mut sys::Qp) -> c_int;
        wc_status_str = "ibv_wc_status_str"(c_int) -> *const c_char;
        event_type_str = "ibv_event_type_str"(c_int) -> *const c_char;
    }
    optional {
        reg_mr_iova2 = "ibv_reg_mr_iova2" "IBVERBS_1.8" (
            *mut sys::Pd, *mut c_void, usize, u64, u32
        ) -> *mut sys::Mr;
        reg_dmabuf_mr = "ibv_reg_dmabuf_mr" "IBVERBS_1.12" (
            *mut sys::Pd, u64, usize, u64, c_int, c_int
        ) -> *mut sys::Mr;
    }
}

/// The library of this process. Never unloaded.
#[derive(Debug)]
pub struct Verbs {
    table: Table,
}

/// The library, or why there is none.
pub fn verbs() -> std::result::Result<&'static Verbs, &'static str> {
    static VERBS: OnceLock<std::result::Result<Verbs, String>> = OnceLock::new();
    VERBS
        .get_or_init(|| Verbs::load(LIBRARY))
        .as_ref()
        .map_err(String::as_str)
}

#[cold]
fn failed(what: impl FnOnce() -> String, errno: Errno) -> Error {
    let what = what();
    match errno {
        Errno::ENOMEM => {
            let limit = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_MEMLOCK)
                .map(|(soft, _)| soft)
                .ok();
            Error::new(
                ResultCode::SYSTEM,
                format!("{what}: {} (ENOMEM); {}", errno.desc(), memlock_cure(limit)),
            )
        }
        _ => Error::system(what, errno),
    }
}

/// What to do about memory that could not be locked.
fn memlock_cure(limit: Option<u64>) -> String {
    match limit {
        Some(libc::RLIM_INFINITY) => {
            "locked memory is not limited (RLIMIT_MEMLOCK), so the machine or the device has no \
             room left"
                .into()
        }
        Some(bytes) => format!(
            "this process may lock {bytes} bytes (RLIMIT_MEMLOCK): raise that with `ulimit -l \
             unlimited`, in /etc/security/limits.conf, with LimitMEMLOCK=infinity of a service, or \
             with --ulimit memlock=-1 of a container"
        ),
        None => "check the limit of locked memory (ulimit -l)".into(),
    }
}

/// For functions that return 0, an errno, or -1 with errno set.
#[inline]
fn check(code: c_int, what: impl FnOnce() -> String) -> Result<()> {
    match code {
        0 => Ok(()),
        errno if errno > 0 => Err(failed(what, Errno::from_raw(errno))),
        _ => Err(failed(what, Errno::last())),
    }
}

/// For functions that return NULL with errno set.
fn checked<T>(raw: *mut T, what: impl FnOnce() -> String) -> Result<*mut T> {
    if raw.is_null() {
        Err(failed(what, Errno::last()))
    } else {
        Ok(raw)
    }
}

impl Verbs {
    fn load(library: &CStr) -> std::result::Result<Verbs, String> {
        let name = library.to_string_lossy();
        // SAFETY: loading libibverbs runs its constructors, which every RDMA program runs.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: takes nothing; the text is this thread's until its next such call.
            let text = unsafe { libc::dlerror() };
            let text = if text.is_null() {
                "no reason given".into()
            } else {
                // SAFETY: not NULL, hence a string, which is copied at once.
                unsafe { CStr::from_ptr(text) }.to_string_lossy()
            };
            return Err(format!("no RDMA library ({name}): {text}"));
        }
        // The handle is never closed: the library's drivers keep state for the process.
        // SAFETY: so it is as `load` asks, if it is libibverbs; else a symbol is missing.
        let table = unsafe { Table::load(handle) }.map_err(|e| format!("{name}: {e}"))?;
        Ok(Verbs { table })
    }

    /// Makes registered memory safe against fork on kernels before 5.12. It must come before any
    /// registration, and it makes each of them slower.
    pub fn fork_init(&self) -> Result<()> {
        // SAFETY: takes no pointers.
        let code = unsafe { (self.table.fork_init)() };
        check(code, || "ibv_fork_init failed".into())
    }

    /// The devices that the kernel and the library have drivers for. None where the kernel has no
    /// RDMA at all.
    pub fn devices(&'static self) -> Result<DeviceList> {
        let mut n = 0;
        // SAFETY: `n` lives through the call.
        let raw = unsafe { (self.table.get_device_list)(&mut n) };
        if raw.is_null() && matches!(Errno::last(), Errno::ENOSYS | Errno::ENOENT) {
            n = 0;
        } else {
            checked(raw, || "cannot list the RDMA devices".into())?;
        }
        Ok(DeviceList {
            verbs: self,
            raw,
            len: usize::try_from(n).unwrap_or(0),
        })
    }

    /// Opens the device of that name.
    pub fn open(&'static self, name: &str) -> Result<Context> {
        let devices = self.devices()?;
        let device = devices.iter().find(|d| d.name() == name);
        match device {
            Some(device) => device.open(),
            None => Err(Error::new(
                ResultCode::SYSTEM,
                format!("there is no RDMA device {name}"),
            )),
        }
    }

    /// What a completion's status means.
    #[cold]
    pub fn wc_status(&self, status: c_int) -> String {
        // SAFETY: takes any integer; gives a string of the library's.
        unsafe { text(status, (self.table.wc_status_str)(status)) }
    }

    /// What an event's type means.
    #[cold]
    pub fn event_type(&self, kind: c_int) -> String {
        // SAFETY: takes any integer; gives a string of the library's.
        unsafe { text(kind, (self.table.event_type_str)(kind)) }
    }

    /// Whether the library can register memory by a dma-buf. The device may refuse yet.
    pub fn has_dmabuf(&self) -> bool {
        self.table.reg_dmabuf_mr.is_some()
    }
}

/// # Safety
///
/// `p` is NULL or a string that is never freed.
unsafe fn text(code: c_int, p: *const c_char) -> String {
    if p.is_null() {
        return format!("{code}");
    }
    // SAFETY: a string, as the caller promises.
    let text = unsafe { CStr::from_ptr(p) }.to_string_lossy();
    format!("{text} ({code})")
}

/// The devices at one moment.
#[derive(Debug)]
pub struct DeviceList {
    verbs: &'static Verbs,
    raw: *mut *mut sys::Device,
    len: usize,
}

impl DeviceList {
    /// How many.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// One after the other.
    pub fn iter(&self) -> impl Iterator<Item = Device<'_>> {
        (0..self.len).map(|i| Device {
            list: self,
            // SAFETY: the array has `len` entries and lives as long as the list.
            raw: unsafe { *self.raw.add(i) },
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the array is the library's and is given back once.
            unsafe { (self.verbs.table.free_device_list)(self.raw) };
        }
    }
}

/// A device of a list.
#[derive(Clone, Copy, Debug)]
pub struct Device<'l> {
    list: &'l DeviceList,
    raw: *mut sys::Device,
}

impl Device<'_> {
    /// Its name, as in `/sys/class/infiniband`.
    pub fn name(&self) -> String {
        // SAFETY: the device lives as long as the list; the name is a string within it.
        unsafe {
            let name = (self.list.verbs.table.get_device_name)(self.raw);
            if name.is_null() {
                return String::new();
            }
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }

    /// Opens it. What was opened outlives the list.
    pub fn open(&self) -> Result<Context> {
        let verbs = self.list.verbs;
        let name = self.name();
        // SAFETY: the device lives as long as the list.
        let raw = unsafe { (verbs.table.open_device)(self.raw) };
        let raw = checked(raw, || {
            format!("cannot open the RDMA device {name} (is /dev/infiniband there and allowed?)")
        })?;
        Ok(Context { verbs, raw, name })
    }
}

macro_rules! owned {
    ($($type:ident: $function:ident;)*) => {$(
        // SAFETY: libibverbs lets every thread use every object.
        unsafe impl Send for $type {}
        // SAFETY: as above.
        unsafe impl Sync for $type {}

        impl $type {
            /// Gives it back to the library. Dropping does the same and logs a failure.
            pub fn destroy(mut self) -> Result<()> {
                self.release()
            }

            fn release(&mut self) -> Result<()> {
                let raw = std::mem::replace(&mut self.raw, null_mut());
                if raw.is_null() {
                    return Ok(());
                }
                let context = self.device();
                // SAFETY: the library gave it, it is given back once, and what was made from it
                // holds it, hence is gone.
                let code = unsafe { (context.verbs.table.$function)(raw) };
                check(code, || {
                    format!(concat!("ibv_", stringify!($function), " failed for {}"), context.name)
                })
            }
        }

        impl Drop for $type {
            fn drop(&mut self) {
                if let Err(e) = self.release() {
                    ::log::warn!("{e}");
                }
            }
        }
    )*};
}

owned! {
    Context: close_device;
    Pd: dealloc_pd;
    Mr: dereg_mr;
    Cq: destroy_cq;
    Qp: destroy_qp;
}

/// An open device.
#[derive(Debug)]
pub struct Context {
    verbs: &'static Verbs,
    raw: *mut sys::Context,
    name: String,
}

/// What an asynchronous event is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum About {
    /// The device as a whole.
    Device,
    /// A port.
    Port(u8),
    /// The queue pair of that number.
    Qp(u32),
    /// The completion queue with that [`Cq::id`].
    Cq(usize),
    /// A shared receive queue.
    Srq,
}

/// An asynchronous event, already acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// `sys::EVENT_*`
    pub kind: c_int,
    /// What it is about.
    pub about: About,
}

impl Context {
    fn device(&self) -> &Context {
        self
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The library.
    pub fn verbs(&self) -> &'static Verbs {
        self.verbs
    }

    /// The device's limits and identity.
    pub fn query_device(&self) -> Result<sys::DeviceAttr> {
        let mut attr = MaybeUninit::<sys::DeviceAttr>::zeroed();
        // SAFETY: the context is open, and `attr` is as long as the library's struct.
        let code = unsafe { (self.verbs.table.query_device)(self.raw, attr.as_mut_ptr()) };
        check(code, || {
            format!("cannot query the RDMA device {}", self.name)
        })?;
        // SAFETY: all integers, zeroed before and then written.
        Ok(unsafe { attr.assume_init() })
    }

    /// A port's state. Not all of it: see [`sys::PortAttr`].
    pub fn query_port(&self, port: u8) -> Result<sys::PortAttr> {
        let mut attr = sys::PortAttr::default();
        // SAFETY: the context is open, and `attr` is longer than what the library writes.
        let code = unsafe { (self.verbs.table.query_port)(self.raw, port, &mut attr) };
        check(code, || {
            format!("cannot query port {port} of {}", self.name)
        })?;
        Ok(attr)
    }

    /// An entry of a port's table of GIDs. A free one is all zeros, or an error.
    pub fn query_gid(&self, port: u8, index: c_int) -> Result<sys::Gid> {
        let mut gid = sys::Gid::default();
        // SAFETY: the context is open, and `gid` lives through the call.
        let code = unsafe { (self.verbs.table.query_gid)(self.raw, port, index, &mut gid) };
        check(code, || {
            format!("cannot read GID {index} of {}:{port}", self.name)
        })?;
        Ok(gid)
    }

    /// What an entry of a port's table of GIDs is good for; none if the entry is free.
    pub fn gid_type(&self, port: u8, index: c_int) -> Result<Option<GidType>> {
        gid_type(Path::new(SYSFS), &self.name, port, index)
    }

    /// The file that becomes readable when there is an asynchronous event.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the file stays open as long as the context.
        unsafe { BorrowedFd::borrow_raw((*self.raw).async_fd) }
    }

    /// From now on [`Context::async_event`] does not wait.
    pub fn set_async_nonblocking(&self) -> Result<()> {
        use nix::fcntl::{fcntl, FcntlArg, OFlag};
        let set = |fd| {
            let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
            fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))
        };
        set(self.async_fd())
            .map(|_| ())
            .map_err(|e| failed(|| format!("cannot set up the events of {}", self.name), e))
    }

    /// The next asynchronous event, acknowledged at once; none if there is none yet.
    pub fn async_event(&self) -> Result<Option<Event>> {
        let mut raw = MaybeUninit::<sys::AsyncEvent>::zeroed();
        // SAFETY: the context is open, and `raw` is as long as the library's struct.
        let code = unsafe { (self.verbs.table.get_async_event)(self.raw, raw.as_mut_ptr()) };
        if code != 0 {
            return match Errno::last() {
                Errno::EAGAIN | Errno::EINTR => Ok(None),
                e => Err(failed(
                    || format!("cannot read the events of {}", self.name),
                    e,
                )),
            };
        }
        // SAFETY: written by the library.
        let mut raw = unsafe { raw.assume_init() };
        let kind = raw.event_type;
        let about = match kind {
            sys::EVENT_CQ_ERR => {
                // SAFETY: the element of this event is a completion queue.
                About::Cq(unsafe { raw.element.cq } as usize)
            }
            sys::EVENT_QP_FATAL
            | sys::EVENT_QP_REQ_ERR
            | sys::EVENT_QP_ACCESS_ERR
            | sys::EVENT_COMM_EST
            | sys::EVENT_SQ_DRAINED
            | sys::EVENT_PATH_MIG
            | sys::EVENT_PATH_MIG_ERR
            | sys::EVENT_QP_LAST_WQE_REACHED => {
                // SAFETY: the element of these events is a queue pair, whose destruction waits
                // until the event is acknowledged.
                About::Qp(unsafe { (*raw.element.qp).qp_num })
            }
            sys::EVENT_SRQ_ERR | sys::EVENT_SRQ_LIMIT_REACHED => About::Srq,
            sys::EVENT_PORT_ACTIVE
            | sys::EVENT_PORT_ERR
            | sys::EVENT_LID_CHANGE
            | sys::EVENT_PKEY_CHANGE
            | sys::EVENT_SM_CHANGE
            | sys::EVENT_CLIENT_REREGISTER
            | sys::EVENT_GID_CHANGE => {
                // SAFETY: the element of these events is a number.
                About::Port(u8::try_from(unsafe { raw.element.port_num }).unwrap_or(0))
            }
            _ => About::Device,
        };
        // SAFETY: the event that was just read, acknowledged once.
        unsafe { (self.verbs.table.ack_async_event)(&mut raw) };
        Ok(Some(Event { kind, about }))
    }

    /// A protection domain: memory and queue pairs of the same one may work together.
    pub fn alloc_pd(self: &Arc<Self>) -> Result<Pd> {
        // SAFETY: the context is open.
        let raw = unsafe { (self.verbs.table.alloc_pd)(self.raw) };
        let raw = checked(raw, || {
            format!("cannot make a protection domain of {}", self.name)
        })?;
        Ok(Pd {
            raw,
            context: self.clone(),
        })
    }

    /// A completion queue of at least that many entries, to be polled.
    pub fn create_cq(self: &Arc<Self>, entries: usize) -> Result<Cq> {
        let what = || {
            format!(
                "cannot make a completion queue of {entries} on {}",
                self.name
            )
        };
        let n = c_int::try_from(entries).map_err(|_| failed(what, Errno::EINVAL))?;
        // SAFETY: the context is open; there is no channel.
        let raw = unsafe { (self.verbs.table.create_cq)(self.raw, n, null_mut(), null_mut(), 0) };
        let raw = checked(raw, what)?;
        let mut cq = Cq {
            raw,
            poll: no_poll,
            context: self.clone(),
        };
        // SAFETY: the context is open, and its table does not change after that.
        cq.poll = unsafe { (*self.raw).ops.poll_cq }.ok_or_else(|| missing("poll_cq", self))?;
        Ok(cq)
    }
}

unsafe extern "C" fn no_poll(_: *mut sys::Cq, _: c_int, _: *mut sys::Wc) -> c_int {
    -1
}

#[cold]
fn missing(what: &str, context: &Context) -> Error {
    Error::internal(format!("the library has no {what} for {}", context.name))
}

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    raw: *mut sys::Pd,
    context: Arc<Context>,
}

impl Pd {
    fn device(&self) -> &Context {
        &self.context
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Registers memory of this process. Access flags that only give leave are left out where the
    /// library does not know them.
    ///
    /// # Safety
    ///
    /// Until the region is given back, nothing in `length` bytes at `addr` may count on being left
    /// alone by the device and, as far as `access` goes, by the peers that learn its key.
    pub unsafe fn reg_mr(
        self: &Arc<Self>,
        addr: *mut u8,
        length: usize,
        access: u32,
    ) -> Result<Mr> {
        let table = &self.context.verbs.table;
        let at = addr.cast::<c_void>();
        let plain = (access & !ACCESS_OPTIONAL) as c_int;
        let raw = match table.reg_mr_iova2 {
            Some(reg) if access & ACCESS_OPTIONAL != 0 => {
                // SAFETY: the domain is there; the kernel checks that the memory is.
                unsafe { reg(self.raw, at, length, addr as u64, access) }
            }
            // SAFETY: as above.
            _ => unsafe { (table.reg_mr)(self.raw, at, length, plain) },
        };
        self.registered(raw, || format!("{length} bytes at {addr:?}"))
    }

    /// Registers memory by a dma-buf: `length` bytes from `offset` in it, which requests will name
    /// by addresses from `iova` on. Not every device, kernel or library can.
    ///
    /// # Safety
    ///
    /// As for [`Pd::reg_mr`].
    pub unsafe fn reg_dmabuf_mr(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        iova: u64,
        access: u32,
    ) -> Result<Mr> {
        let what = || format!("{length} bytes of a dma-buf");
        let fd = fd.as_raw_fd();
        let raw = match self.context.verbs.table.reg_dmabuf_mr {
            // SAFETY: the domain is there, and the file is open through the call.
            Some(reg) => unsafe { reg(self.raw, offset, length, iova, fd, access as c_int) },
            None => {
                Errno::EOPNOTSUPP.set();
                null_mut()
            }
        };
        self.registered(raw, what)
    }

    fn registered(
        self: &Arc<Self>,
        raw: *mut sys::Mr,
        what: impl FnOnce() -> String,
    ) -> Result<Mr> {
        let raw = checked(raw, || {
            format!("cannot register {} with {}", what(), self.context.name)
        })?;
        Ok(Mr {
            raw,
            pd: self.clone(),
        })
    }

    /// A queue pair for a reliable connection, in the state RESET.
    pub fn create_qp(
        self: &Arc<Self>,
        send_cq: &Arc<Cq>,
        recv_cq: &Arc<Cq>,
        cap: sys::QpCap,
        signal_all: bool,
    ) -> Result<Qp> {
        let mut attr = sys::QpInitAttr {
            qp_context: null_mut(),
            send_cq: send_cq.raw,
            recv_cq: recv_cq.raw,
            srq: null_mut(),
            cap,
            qp_type: sys::QPT_RC,
            sq_sig_all: signal_all.into(),
        };
        // SAFETY: the domain and the queues are there, and `attr` lives through the call.
        let raw = unsafe { (self.context.verbs.table.create_qp)(self.raw, &mut attr) };
        let raw = checked(raw, || {
            format!(
                "cannot make a queue pair of {cap:?} on {}",
                self.context.name
            )
        })?;
        let mut qp = Qp {
            raw,
            cap: attr.cap,
            send: no_send,
            recv: no_recv,
            pd: self.clone(),
            _cqs: [send_cq.clone(), recv_cq.clone()],
        };
        // SAFETY: the context is open, and its table does not change after that.
        let ops = unsafe { &(*self.context.raw).ops };
        qp.send = ops
            .post_send
            .ok_or_else(|| missing("post_send", &self.context))?;
        qp.recv = ops
            .post_recv
            .ok_or_else(|| missing("post_recv", &self.context))?;
        Ok(qp)
    }
}

unsafe extern "C" fn no_send(
    _: *mut sys::Qp,
    _: *mut sys::SendWr,
    _: *mut *mut sys::SendWr,
) -> c_int {
    libc::ENOSYS
}

unsafe extern "C" fn no_recv(
    _: *mut sys::Qp,
    _: *mut sys::RecvWr,
    _: *mut *mut sys::RecvWr,
) -> c_int {
    libc::ENOSYS
}

/// Registered memory.
#[derive(Debug)]
pub struct Mr {
    raw: *mut sys::Mr,
    pd: Arc<Pd>,
}

impl Mr {
    fn device(&self) -> &Context {
        &self.pd.context
    }

    /// What our own requests name it by.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is there until it is given back, and nothing writes to it.
        unsafe { (*self.raw).lkey }
    }

    /// What the peer's requests name it by.
    pub fn rkey(&self) -> u32 {
        // SAFETY: as in `lkey`.
        unsafe { (*self.raw).rkey }
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    raw: *mut sys::Cq,
    poll: unsafe extern "C" fn(*mut sys::Cq, c_int, *mut sys::Wc) -> c_int,
    context: Arc<Context>,
}

impl Cq {
    fn device(&self) -> &Context {
        &self.context
    }

    /// What [`About::Cq`] names it by.
    pub fn id(&self) -> usize {
        self.raw as usize
    }

    /// Takes completions, as many as there are and as `into` has room for; their number.
    #[inline]
    pub fn poll(&self, into: &mut [sys::Wc]) -> Result<usize> {
        let room = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is there, and the library writes to at most `room` entries.
        let n = unsafe { (self.poll)(self.raw, room, into.as_mut_ptr()) };
        usize::try_from(n).map_err(|_| self.poll_failed())
    }

    #[cold]
    fn poll_failed(&self) -> Error {
        Error::new(
            ResultCode::SYSTEM,
            format!("cannot poll a completion queue of {}", self.context.name),
        )
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    raw: *mut sys::Qp,
    cap: sys::QpCap,
    send: unsafe extern "C" fn(*mut sys::Qp, *mut sys::SendWr, *mut *mut sys::SendWr) -> c_int,
    recv: unsafe extern "C" fn(*mut sys::Qp, *mut sys::RecvWr, *mut *mut sys::RecvWr) -> c_int,
    pd: Arc<Pd>,
    _cqs: [Arc<Cq>; 2],
}

impl Qp {
    fn device(&self) -> &Context {
        &self.pd.context
    }

    /// The number that the peer names it by.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is there, and its number does not change.
        unsafe { (*self.raw).qp_num }
    }

    /// The sizes that it got: at least those asked for.
    pub fn cap(&self) -> sys::QpCap {
        self.cap
    }

    /// Changes the attributes that `mask` (`sys::QP_*`) names.
    pub fn modify(&self, attr: &sys::QpAttr, mask: c_int) -> Result<()> {
        let mut attr = *attr;
        let context = self.device();
        let mut code = libc::ETIMEDOUT;
        for _ in 0..RESOLVING {
            // SAFETY: the queue pair is there, and `attr` lives through the call.
            code = unsafe { (context.verbs.table.modify_qp)(self.raw, &mut attr, mask) };
            if code != libc::ETIMEDOUT {
                break;
            }
        }
        check(code, || {
            let cure = if code == libc::ETIMEDOUT {
                " (the peer's address did not resolve: is there a route between the two GIDs?)"
            } else {
                ""
            };
            format!(
                "cannot bring queue pair {} of {} to state {}{cure}",
                self.number(),
                context.name,
                attr.qp_state
            )
        })
    }

    /// Posts one send, write or read.
    ///
    /// # Safety
    ///
    /// `wr` is one request or a list of them. The lists of pieces are as long as said, and the
    /// memory that pieces with [`sys::SEND_INLINE`] name may be read during the call. Memory that
    /// other pieces name is left alone, and stays registered, until the request completes.
    #[inline]
    pub unsafe fn post_send(&self, wr: &mut sys::SendWr) -> Result<()> {
        let mut bad = null_mut();
        // SAFETY: the queue pair is there; the rest is as the caller promises.
        let code = unsafe { (self.send)(self.raw, wr, &mut bad) };
        check(code, || self.post_failed("send"))
    }

    /// Posts one receive.
    ///
    /// # Safety
    ///
    /// As for [`Qp::post_send`].
    #[inline]
    pub unsafe fn post_recv(&self, wr: &mut sys::RecvWr) -> Result<()> {
        let mut bad = null_mut();
        // SAFETY: the queue pair is there; the rest is as the caller promises.
        let code = unsafe { (self.recv)(self.raw, wr, &mut bad) };
        check(code, || self.post_failed("receive"))
    }

    #[cold]
    fn post_failed(&self, what: &str) -> String {
        let device = &self.device().name;
        format!(
            "cannot post a {what} to queue pair {} of {device}",
            self.number()
        )
    }
}

/// What a GID is good for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidType {
    /// InfiniBand, or RoCE v1: the kernel calls both the same.
    InfiniBandOrRoceV1,
    /// RoCE v2: over UDP.
    RoceV2,
}

impl GidType {
    /// From the kernel's text.
    fn parse(text: &str) -> Option<GidType> {
        match text.trim() {
            "IB/RoCE v1" => Some(GidType::InfiniBandOrRoceV1),
            "RoCE v2" => Some(GidType::RoceV2),
            _ => None,
        }
    }
}

/// The type of a GID as the kernel shows it below `sysfs`; none if that entry of the table is free
/// or of a type that we do not know.
fn gid_type(sysfs: &Path, device: &str, port: u8, index: c_int) -> Result<Option<GidType>> {
    let path = sysfs.join(format!("{device}/ports/{port}/gid_attrs/types/{index}"));
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(GidType::parse(&text)),
        Err(e) => match Errno::from_raw(e.raw_os_error().unwrap_or(0)) {
            // The kernel's answers for a free entry and for one beyond the table.
            Errno::EINVAL | Errno::ENOENT => Ok(None),
            errno => Err(failed(|| format!("cannot read {}", path.display()), errno)),
        },
    }
}

#[cfg(test)]
mod tests;
