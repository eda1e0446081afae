//! The entry points that NCCL calls, one for each distinct signature among the versions. They check
//! and convert; what is asked for is done once, in [`crate::net`].
//!
//! Safety of all of them: NCCL calls as its interface says. An argument that is not NULL points at
//! what it should, arrays have `n` elements, a handle is one that these functions made, and no call
//! that uses a handle overlaps the one that closes it. Mistakes in this that can be seen are errors;
//! the rest cannot be told from correct use.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr,
    sync::{Mutex, PoisonError},
};

use super::types::{DeviceHandle, LogFn, ProfilerFn, HANDLE_LEN};
use crate::{
    error::{Error, Result},
    ffi::{address, guard, input, note_panics, out, Size},
    handle::{self, borrow, into_raw, tag, take, HandleKind},
    log::{self, Lifetime},
    net::{self, Comm, ListenComm, MemoryRegion, RecvComm, Request, SendComm},
};

/// The name by which `NCCL_NET` selects this network.
pub(super) const NAME: *const c_char = c"vccl".as_ptr();

/// What a version's property struct says of a device.
pub(super) trait Describe {
    /// The description of device `dev`.
    fn describe(dev: c_int, device: &'static net::Properties) -> Self;
}

/// What a version says of a communicator.
pub(super) trait Configuration {
    /// The traffic class that it asks for, or [`TRAFFIC_CLASS_UNDEF`](super::types::TRAFFIC_CLASS_UNDEF).
    fn traffic_class(&self) -> c_int;
}

/// The traffic class that a configuration asks for, if there is one and it does.
///
/// # Safety
/// `config` is NULL or points to a `C`.
unsafe fn traffic_class<C: Configuration + Copy>(config: *mut C) -> Option<u8> {
    if config.is_null() || !config.is_aligned() {
        return None;
    }
    // SAFETY: the caller's promise.
    let class = unsafe { config.read() }.traffic_class();
    u8::try_from(class).ok()
}

/// What a version says of the devices that a virtual one is to join.
pub(super) trait Virtual {
    /// Their numbers; none: it names more than it has room for.
    fn members(&self) -> Option<&[c_int]>;
}

/// A property struct: what every version has, and what is given in braces.
macro_rules! describe {
    ($device:expr, { $($more:tt)* }) => {
        Properties {
            name: $device.name.as_ptr().cast_mut(),
            pci_path: $device.pci_path.as_ref().map_or(std::ptr::null_mut(), |path| path.as_ptr().cast_mut()),
            guid: $device.guid,
            ptr_support: $device.ptr_support,
            speed: $device.speed_mbps,
            port: $device.port,
            latency: $device.latency_us,
            max_comms: $device.max_comms,
            max_recvs: $device.max_recvs,
            $($more)*
        }
    };
}

/// A vtable: what every version has, and what is given in braces.
macro_rules! vtable {
    ({ $($more:tt)* }) => {
        Net {
            name: $crate::abi::entry::NAME,
            devices: Some($crate::abi::entry::devices),
            get_properties: Some($crate::abi::entry::get_properties::<Properties>),
            reg_mr_dma_buf: Some($crate::abi::entry::reg_mr_dma_buf),
            dereg_mr: Some($crate::abi::entry::dereg_mr),
            iflush: Some($crate::abi::entry::iflush),
            test: Some($crate::abi::entry::test),
            close_send: Some($crate::abi::entry::close_send),
            close_recv: Some($crate::abi::entry::close_recv),
            close_listen: Some($crate::abi::entry::close_listen),
            $($more)*
        }
    };
}

/// What a version's struct of the devices behind one can do.
macro_rules! virtual_devices {
    ($props:ident) => {
        impl $props {
            /// The devices behind device `dev`: itself, if it is no virtual one.
            fn of(dev: c_int) -> $props {
                let mut devs = [0; MAX_DEVS_PER_NIC];
                // A virtual device has no more ports than the smallest of these arrays has places.
                let members = $crate::net::members(dev).unwrap_or_default();
                for (to, m) in devs.iter_mut().zip(members) {
                    *to = *m;
                }
                let ndevs = members.len().min(MAX_DEVS_PER_NIC) as c_int;
                $props { ndevs, devs }
            }
        }

        impl $crate::abi::entry::Virtual for $props {
            fn members(&self) -> Option<&[c_int]> {
                self.devs.get(..usize::try_from(self.ndevs).ok()?)
            }
        }
    };
}

/// What a version's configuration of a communicator says.
macro_rules! configuration {
    ($config:ident) => {
        impl $crate::abi::entry::Configuration for $config {
            fn traffic_class(&self) -> c_int {
                self.traffic_class
            }
        }
    };
}

pub(super) use {configuration, describe, virtual_devices, vtable};

impl HandleKind for ListenComm {
    const TAG: u64 = tag::LISTEN;
}
impl HandleKind for SendComm {
    const TAG: u64 = tag::SEND;
}
impl HandleKind for RecvComm {
    const TAG: u64 = tag::RECV;
}
impl HandleKind for MemoryRegion {
    const TAG: u64 = tag::MEMORY;
}
impl HandleKind for Request {
    const TAG: u64 = tag::REQUEST;
}
impl HandleKind for Context {
    const TAG: u64 = tag::CONTEXT;
}

/// What the `ctx` of version 11 and later stands for: one successful call of `init`.
pub(super) struct Context {
    /// Whether `net::init` succeeded, so that `net::finalize` must follow.
    started: bool,
    /// What the communicator asks for.
    traffic_class: Option<u8>,
}

/// Who uses the plugin now.
struct Users {
    /// Calls of `net::init` that succeeded and that no `net::finalize` answered yet.
    started: usize,
    /// Contexts that are not finalized yet.
    contexts: usize,
}

static USERS: Mutex<Users> = Mutex::new(Users {
    started: 0,
    contexts: 0,
});

/// Starts the plugin for one more user and tells whether that worked. Where it did not, NCCL is told
/// so by `devices`: some releases call a NULL `finalize` after an `init` that fails.
fn start(users: &mut Users, log: Option<LogFn>, lifetime: Lifetime) -> bool {
    log::set(log, lifetime);
    note_panics();
    let started = guard("init", net::init) == 0;
    users.started += usize::from(started);
    started
}

/// `init` up to version 9.
pub(super) unsafe extern "C" fn init(log: Option<LogFn>) -> c_int {
    let mut users = USERS.lock().unwrap_or_else(PoisonError::into_inner);
    start(&mut users, log, Lifetime::Process);
    0
}

/// `init` of version 10. vccl reports no profiler events.
pub(super) unsafe extern "C" fn init_profiled(
    log: Option<LogFn>,
    _profiler: Option<ProfilerFn>,
) -> c_int {
    // SAFETY: the same call with one argument less.
    unsafe { init(log) }
}

/// `init` of version 11 and later, where `C` is the version's configuration.
pub(super) unsafe extern "C" fn init_context<C: Configuration + Copy>(
    ctx: *mut *mut c_void,
    _comm_id: u64,
    config: *mut C,
    log: Option<LogFn>,
    _profiler: Option<ProfilerFn>,
) -> c_int {
    guard("init", || {
        // SAFETY: `ctx` is NCCL's place for the context.
        let ctx = unsafe { out(ctx, "ctx") }?;
        ctx.set(ptr::null_mut());
        // SAFETY: NULL, or NCCL's own struct.
        let traffic_class = unsafe { traffic_class(config) };
        let mut users = USERS.lock().unwrap_or_else(PoisonError::into_inner);
        let started = start(&mut users, log, Lifetime::Finalize);
        users.contexts += 1;
        ctx.set(into_raw(Context {
            started,
            traffic_class,
        }));
        Ok(())
    })
}

/// `finalize` of version 11 and later.
pub(super) unsafe extern "C" fn finalize(ctx: *mut c_void) -> c_int {
    let mut users = USERS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut last = false;
    let code = guard("finalize", || {
        // SAFETY: see the top of this file.
        let context = unsafe { take::<Context>(ctx, "ctx") }?;
        users.contexts = users.contexts.saturating_sub(1);
        last = users.contexts == 0;
        if context.started {
            users.started = users.started.saturating_sub(1);
            net::finalize()?;
        }
        Ok(())
    });
    if last {
        log::clear();
    }
    code
}

/// `setNetAttr` of version 11 and later, where `A` is the version's attributes. They are hints that
/// vccl has no use for.
pub(super) unsafe extern "C" fn set_net_attr<A>(ctx: *mut c_void, attr: *mut A) -> c_int {
    guard("setNetAttr", || {
        // SAFETY: see the top of this file.
        unsafe { borrow::<Context>(ctx, "ctx") }?;
        address(attr.cast(), "netAttr")?;
        Ok(())
    })
}

/// `devices` of all versions.
pub(super) unsafe extern "C" fn devices(ndev: *mut c_int) -> c_int {
    guard("devices", || {
        // SAFETY: `ndev` is NCCL's place for the number.
        let ndev = unsafe { out(ndev, "ndev") }?;
        ndev.set(0);
        let started = USERS.lock().unwrap_or_else(PoisonError::into_inner).started > 0;
        if started {
            ndev.set(net::devices()?);
        }
        Ok(())
    })
}

/// `getProperties` of all versions, where `P` is the version's struct.
pub(super) unsafe extern "C" fn get_properties<P: Describe>(dev: c_int, props: *mut P) -> c_int {
    guard("getProperties", || {
        // SAFETY: `props` is NCCL's place for the properties.
        let props = unsafe { out(props, "props") }?;
        props.set(P::describe(dev, net::properties(dev)?));
        Ok(())
    })
}

/// The body of every `listen`.
///
/// # Safety
/// See the top of this file.
unsafe fn listen_on(dev: c_int, handle: *mut c_void, listen_comm: *mut *mut c_void) -> Result<()> {
    // SAFETY: `listen_comm` is NCCL's place for the communicator.
    let listen_comm = unsafe { out(listen_comm, "listenComm") }?;
    listen_comm.set(ptr::null_mut());
    address(handle, "handle")?;
    // SAFETY: not NULL, and NCCL's handles have this size and no alignment. Nobody else uses this
    // one while the call lasts.
    let handle = unsafe { &mut *handle.cast::<[u8; HANDLE_LEN]>() };
    listen_comm.set(into_raw(net::listen(dev, handle)?));
    Ok(())
}

/// `listen` up to version 10.
pub(super) unsafe extern "C" fn listen(
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("listen", || unsafe { listen_on(dev, handle, listen_comm) })
}

/// `listen` of version 11 and later.
pub(super) unsafe extern "C" fn listen_context(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("listen", || unsafe {
        out(listen_comm, "listenComm")?.set(ptr::null_mut());
        borrow::<Context>(ctx, "ctx")?;
        listen_on(dev, handle, listen_comm)
    })
}

/// The body of every `connect`.
///
/// # Safety
/// See the top of this file.
unsafe fn connect_to(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    traffic_class: Option<u8>,
) -> Result<()> {
    // SAFETY: `send_comm` is NCCL's place for the communicator.
    let send_comm = unsafe { out(send_comm, "sendComm") }?;
    send_comm.set(ptr::null_mut());
    address(handle, "handle")?;
    // SAFETY: as in `listen_on`.
    let handle = unsafe { &mut *handle.cast::<[u8; HANDLE_LEN]>() };
    if let Some(comm) = net::connect(dev, handle, traffic_class)? {
        send_comm.set(into_raw(comm));
    }
    Ok(())
}

/// `connect` of version 6.
pub(super) unsafe extern "C" fn connect_plain(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("connect", || unsafe {
        connect_to(dev, handle, send_comm, None)
    })
}

/// `connect` of versions 7 to 9. Device offload is never offered, so nothing is asked of it here.
pub(super) unsafe extern "C" fn connect(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_dev_comm: *mut *mut DeviceHandle,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("connect", || unsafe {
        connect_to(dev, handle, send_comm, None)
    })
}

/// `connect` of version 10, where `C` is the version's configuration.
pub(super) unsafe extern "C" fn connect_configured<C: Configuration + Copy>(
    dev: c_int,
    config: *mut C,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_dev_comm: *mut *mut DeviceHandle,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("connect", || unsafe {
        connect_to(dev, handle, send_comm, traffic_class(config))
    })
}

/// `connect` of version 11 and later.
pub(super) unsafe extern "C" fn connect_context(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_dev_comm: *mut *mut DeviceHandle,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("connect", || unsafe {
        out(send_comm, "sendComm")?.set(ptr::null_mut());
        let context = borrow::<Context>(ctx, "ctx")?;
        connect_to(dev, handle, send_comm, context.traffic_class)
    })
}

/// `accept` of version 6.
pub(super) unsafe extern "C" fn accept_plain(
    listen_comm: *mut c_void,
    recv_comm: *mut *mut c_void,
) -> c_int {
    guard("accept", || {
        // SAFETY: `recv_comm` is NCCL's place for the communicator.
        let recv_comm = unsafe { out(recv_comm, "recvComm") }?;
        recv_comm.set(ptr::null_mut());
        // SAFETY: see the top of this file.
        let listener = unsafe { borrow::<ListenComm>(listen_comm, "listenComm") }?;
        if let Some(comm) = net::accept(listener)? {
            recv_comm.set(into_raw(comm));
        }
        Ok(())
    })
}

/// `accept` of version 7 and later.
pub(super) unsafe extern "C" fn accept(
    listen_comm: *mut c_void,
    recv_comm: *mut *mut c_void,
    _recv_dev_comm: *mut *mut DeviceHandle,
) -> c_int {
    // SAFETY: the same call with one argument less.
    unsafe { accept_plain(listen_comm, recv_comm) }
}

/// The communicator of a call that takes either kind.
///
/// # Safety
/// As [`borrow`].
unsafe fn either<'a>(comm: *mut c_void) -> Result<Comm<'a>> {
    // SAFETY: the caller's promise holds for each of these.
    unsafe {
        match handle::tag_of(comm) {
            Some(tag::SEND) => Ok(Comm::Send(borrow(comm, "comm")?)),
            Some(tag::RECV) => Ok(Comm::Recv(borrow(comm, "comm")?)),
            found => Err(handle::wrong(
                "comm",
                "a send or receive communicator",
                comm,
                found,
            )),
        }
    }
}

/// The body of every `regMr`.
///
/// # Safety
/// See the top of this file.
unsafe fn register(
    comm: *mut c_void,
    data: *mut c_void,
    size: impl Size,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> Result<()> {
    // SAFETY: `mhandle` is NCCL's place for the registration.
    let mhandle = unsafe { out(mhandle, "mhandle") }?;
    mhandle.set(ptr::null_mut());
    // SAFETY: see the top of this file.
    let comm = unsafe { either(comm) }?;
    let region = net::reg_mr(comm, address(data, "data")?, size.bytes("size")?, kind)?;
    mhandle.set(into_raw(region));
    Ok(())
}

/// `regMr` of all versions; the size is an `int` up to 7.
pub(super) unsafe extern "C" fn reg_mr<S: Size>(
    comm: *mut c_void,
    data: *mut c_void,
    size: S,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("regMr", || unsafe {
        register(comm, data, size, kind, mhandle)
    })
}

/// `regMrDmaBuf` of all versions. The address names the memory already, and what a transport wants
/// to share it by it makes itself; the descriptor stays NCCL's.
pub(super) unsafe extern "C" fn reg_mr_dma_buf(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    mhandle: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("regMrDmaBuf", || unsafe {
        register(comm, data, size, kind, mhandle)
    })
}

/// `deregMr` of all versions.
pub(super) unsafe extern "C" fn dereg_mr(comm: *mut c_void, mhandle: *mut c_void) -> c_int {
    guard("deregMr", || {
        // SAFETY: see the top of this file.
        let (comm, region) = unsafe { (either(comm)?, take::<MemoryRegion>(mhandle, "mhandle")?) };
        net::dereg_mr(comm, region)
    })
}

/// The address of a message. There need not be one when there are no bytes.
#[inline]
fn message(data: *mut c_void, size: usize) -> Result<usize> {
    if size == 0 {
        return Ok(data as usize);
    }
    address(data, "data")
}

/// The body of every `isend`.
///
/// # Safety
/// See the top of this file.
#[inline]
unsafe fn send(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: impl Size,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> Result<()> {
    // SAFETY: `request` is NCCL's place for the request; for the handles see the top of this file.
    unsafe {
        let request = out(request, "request")?;
        request.set(ptr::null_mut());
        let comm = borrow::<SendComm>(send_comm, "sendComm")?;
        let region = borrow::<MemoryRegion>(mhandle, "mhandle")?;
        let size = size.bytes("size")?;
        if let Some(sending) = net::isend(comm, message(data, size)?, size, tag, region)? {
            request.set(sending.as_raw());
        }
    }
    Ok(())
}

/// `isend` up to version 9; the size is an `int` up to 8.
pub(super) unsafe extern "C" fn isend<S: Size>(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: S,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("isend", || unsafe {
        send(send_comm, data, size, tag, mhandle, request)
    })
}

/// `isend` of version 10 and later.
pub(super) unsafe extern "C" fn isend_profiled(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mhandle: *mut c_void,
    _phandle: *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("isend", || unsafe {
        send(send_comm, data, size, tag, mhandle, request)
    })
}

/// The body of every `irecv`.
///
/// # Safety
/// See the top of this file.
#[inline]
unsafe fn receive<S: Size>(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Result<()> {
    // SAFETY: `request` is NCCL's place for the request, and the arrays have `n` elements, which is
    // checked to be 1; for the handles see the top of this file.
    unsafe {
        let request = out(request, "request")?;
        // NCCL may have left a hint here that it will not look at the completion. It always gets a
        // real request, or NULL.
        request.set(ptr::null_mut());
        let comm = borrow::<RecvComm>(recv_comm, "recvComm")?;
        if n != 1 {
            return Err(wrong_count(n));
        }
        let region = borrow::<MemoryRegion>(input(mhandles, "mhandles")?, "mhandles[0]")?;
        let size = input(sizes, "sizes")?.bytes("sizes[0]")?;
        let data = message(input(data, "data")?, size)?;
        if let Some(receiving) = net::irecv(comm, data, size, input(tags, "tags")?, region)? {
            request.set(receiving.as_raw());
        }
    }
    Ok(())
}

#[cold]
fn wrong_count(n: c_int) -> Error {
    Error::invalid_argument(format!(
        "n is {n}, but a call is for one message (maxRecvs is 1)"
    ))
}

/// `irecv` up to version 9; the sizes are `int` up to 8.
pub(super) unsafe extern "C" fn irecv<S: Size>(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("irecv", || unsafe {
        receive(recv_comm, n, data, sizes, tags, mhandles, request)
    })
}

/// `irecv` of version 10 and later.
pub(super) unsafe extern "C" fn irecv_profiled(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    _phandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the top of this file.
    guard("irecv", || unsafe {
        receive(recv_comm, n, data, sizes, tags, mhandles, request)
    })
}

/// `makeVDevice` of version 9 and later.
pub(super) unsafe extern "C" fn make_v_device<V: Virtual + Copy>(
    dev: *mut c_int,
    props: *mut V,
) -> c_int {
    guard("makeVDevice", || {
        // SAFETY: `dev` is NCCL's place for the number, `props` its own struct.
        let (dev, props) = unsafe { (out(dev, "dev")?, input(props.cast_const(), "props")?) };
        let Some(members) = props.members() else {
            return Err(Error::invalid_argument(
                "makeVDevice: the count of devices is not one that its array has room for",
            ));
        };
        dev.set(net::make_virtual(members)?);
        Ok(())
    })
}

/// `iflush` of all versions: what was received is visible when `test` says that it is there.
pub(super) unsafe extern "C" fn iflush(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    guard("iflush", || {
        // SAFETY: `request` is NCCL's place for the request.
        let request = unsafe { out(request, "request") }?;
        request.set(ptr::null_mut());
        // SAFETY: see the top of this file.
        let comm = unsafe { borrow::<RecvComm>(recv_comm, "recvComm") }?;
        if !(0..=1).contains(&n) {
            return Err(wrong_count(n));
        }
        address(data.cast(), "data")?;
        address(sizes.cast(), "sizes")?;
        address(mhandles.cast(), "mhandles")?;
        net::iflush(comm)
    })
}

/// `test` of all versions.
pub(super) unsafe extern "C" fn test(
    request: *mut c_void,
    done: *mut c_int,
    sizes: *mut c_int,
) -> c_int {
    guard("test", || {
        // SAFETY: `done` and `sizes` are NCCL's places for the outcome, of which the second may be
        // missing; for the handle see the top of this file.
        let (done, sizes, request) = unsafe {
            let done = out(done, "done")?;
            done.set(0);
            let sizes = if sizes.is_null() {
                None
            } else {
                Some(out(sizes, "sizes")?)
            };
            (done, sizes, borrow::<Request>(request, "request")?)
        };
        if let Some(bytes) = net::test(request)? {
            if let Some(sizes) = sizes {
                // No message is larger than `max_p2p_bytes`, which fits.
                sizes.set(c_int::try_from(bytes).unwrap_or(c_int::MAX));
            }
            done.set(1);
        }
        Ok(())
    })
}

/// `closeSend` of all versions.
pub(super) unsafe extern "C" fn close_send(send_comm: *mut c_void) -> c_int {
    guard("closeSend", || {
        // SAFETY: see the top of this file.
        let comm = unsafe { take::<SendComm>(send_comm, "sendComm") }?;
        net::close_send(comm)
    })
}

/// `closeRecv` of all versions.
pub(super) unsafe extern "C" fn close_recv(recv_comm: *mut c_void) -> c_int {
    guard("closeRecv", || {
        // SAFETY: see the top of this file.
        let comm = unsafe { take::<RecvComm>(recv_comm, "recvComm") }?;
        net::close_recv(comm)
    })
}

/// `closeListen` of all versions.
pub(super) unsafe extern "C" fn close_listen(listen_comm: *mut c_void) -> c_int {
    guard("closeListen", || {
        // SAFETY: see the top of this file.
        let comm = unsafe { take::<ListenComm>(listen_comm, "listenComm") }?;
        net::close_listen(comm)
    })
}
