//! Network plugin interface, version 6, of NCCL 2.13 and later.
//! The first version here: sizes are `int`, and every function is required.

use std::ffi::{c_char, c_int, c_void};

use super::entry::{self, describe, vtable, Describe};
use super::types::LogFn;

/// What `get_properties` fills.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    /// Name of the device, for logs.
    pub name: *mut c_char,
    /// Path of the device under /sys, or NULL.
    pub pci_path: *mut c_char,
    /// The same for all devices that are functions of one card.
    pub guid: u64,
    /// Sum of the `NCCL_PTR_*` that `reg_mr` takes.
    pub ptr_support: c_int,
    /// Mbit/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// Microseconds.
    pub latency: f32,
    /// How many communicators can exist.
    pub max_comms: c_int,
    /// How many receives one `irecv` may group.
    pub max_recvs: c_int,
}

/// The table of functions that a plugin exports as `ncclNetPlugin_v6`.
#[repr(C)]
pub struct Net {
    /// Name of the network, which `NCCL_NET` selects by.
    pub name: *const c_char,
    /// Called at each load, before anything else.
    pub init: Option<unsafe extern "C" fn(log: Option<LogFn>) -> c_int>,
    /// How many devices there are; none means that the plugin declines.
    pub devices: Option<unsafe extern "C" fn(ndev: *mut c_int) -> c_int>,
    /// Describes one device.
    pub get_properties: Option<unsafe extern "C" fn(dev: c_int, props: *mut Properties) -> c_int>,
    /// Starts to listen and fills the 128 bytes of `handle`.
    pub listen: Option<
        unsafe extern "C" fn(
            dev: c_int,
            handle: *mut c_void,
            listen_comm: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Connects to a handle; never waits: NULL in `*send_comm` means "call again".
    pub connect: Option<
        unsafe extern "C" fn(dev: c_int, handle: *mut c_void, send_comm: *mut *mut c_void) -> c_int,
    >,
    /// Accepts one connection; never waits: NULL in `*recv_comm` means "call again".
    pub accept: Option<
        unsafe extern "C" fn(listen_comm: *mut c_void, recv_comm: *mut *mut c_void) -> c_int,
    >,
    /// Registers memory for one communicator.
    pub reg_mr: Option<
        unsafe extern "C" fn(
            comm: *mut c_void,
            data: *mut c_void,
            size: c_int,
            kind: c_int,
            mhandle: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Registers memory that a dma-buf file descriptor names as well.
    pub reg_mr_dma_buf: Option<
        unsafe extern "C" fn(
            comm: *mut c_void,
            data: *mut c_void,
            size: usize,
            kind: c_int,
            offset: u64,
            fd: c_int,
            mhandle: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Ends a registration.
    pub dereg_mr: Option<unsafe extern "C" fn(comm: *mut c_void, mhandle: *mut c_void) -> c_int>,
    /// Starts a send; NULL in `*request` means "call again".
    pub isend: Option<
        unsafe extern "C" fn(
            send_comm: *mut c_void,
            data: *mut c_void,
            size: c_int,
            tag: c_int,
            mhandle: *mut c_void,
            request: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Starts `n` grouped receives; NULL in `*request` means "call again".
    pub irecv: Option<
        unsafe extern "C" fn(
            recv_comm: *mut c_void,
            n: c_int,
            data: *mut *mut c_void,
            sizes: *mut c_int,
            tags: *mut c_int,
            mhandles: *mut *mut c_void,
            request: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Makes received data visible to the GPU; NULL in `*request` means that it is already.
    pub iflush: Option<
        unsafe extern "C" fn(
            recv_comm: *mut c_void,
            n: c_int,
            data: *mut *mut c_void,
            sizes: *mut c_int,
            mhandles: *mut *mut c_void,
            request: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Sets `*done`; once it is 1 the request is gone and `sizes` tells the bytes moved.
    pub test: Option<
        unsafe extern "C" fn(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> c_int,
    >,
    /// Closes what `connect` made.
    pub close_send: Option<unsafe extern "C" fn(send_comm: *mut c_void) -> c_int>,
    /// Closes what `accept` made.
    pub close_recv: Option<unsafe extern "C" fn(recv_comm: *mut c_void) -> c_int>,
    /// Closes what `listen` made.
    pub close_listen: Option<unsafe extern "C" fn(listen_comm: *mut c_void) -> c_int>,
}

// SAFETY: a plugin's table is constant data: a name and code addresses, never written after load.
unsafe impl Sync for Net {}

impl Describe for Properties {
    fn describe(_dev: c_int, device: &'static crate::net::Properties) -> Properties {
        describe!(device, {})
    }
}

/// vccl's own table.
pub(crate) const NET: Net = vtable!({
    init: Some(entry::init),
    listen: Some(entry::listen),
    connect: Some(entry::connect_plain),
    accept: Some(entry::accept_plain),
    reg_mr: Some(entry::reg_mr::<c_int>),
    isend: Some(entry::isend::<c_int>),
    irecv: Some(entry::irecv::<c_int>),
});
