//! Network plugin interface, version 11, of NCCL 2.28 and later.
//! A context for each NCCL communicator, `finalize`, and hints of use in `set_net_attr`.

use std::ffi::{c_char, c_int, c_void};

use super::entry::{self, describe, vtable, Describe};
use super::types::{DeviceHandle, LogFn, ProfilerFn, NET_DEVICE_HOST, NET_DEVICE_INVALID_VERSION};

/// How many physical devices a virtual one can have.
pub const MAX_DEVS_PER_NIC: usize = 4;

/// The physical devices that make up a virtual one.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VDeviceProps {
    /// How many of `devs` count.
    pub ndevs: c_int,
    /// Indices of physical devices.
    pub devs: [c_int; MAX_DEVS_PER_NIC],
}

/// What an NCCL communicator wants from the network.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommConfig {
    /// Traffic class for the packets, or [`TRAFFIC_CLASS_UNDEF`](super::types::TRAFFIC_CLASS_UNDEF).
    pub traffic_class: c_int,
}

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
    /// 1: a registration holds for every communicator.
    pub reg_is_global: c_int,
    /// 1: NCCL must flush after each receive.
    pub force_flush: c_int,
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
    /// [`NET_DEVICE_HOST`], or a kind of device offload.
    pub net_device_type: c_int,
    /// Version of the device offload.
    pub net_device_version: c_int,
    /// The physical devices behind this one.
    pub v_props: VDeviceProps,
    /// Largest message of a point-to-point operation.
    pub max_p2p_bytes: usize,
    /// Largest message of a collective.
    pub max_coll_bytes: usize,
    /// How many requests one multi-request may hold.
    pub max_multi_request_size: c_int,
}

/// How many peers and flows one direction will have; -1 where NCCL does not know.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetCommAttr {
    /// Most peers at one time.
    pub max_concurrent_peers: i32,
    /// Fewest peers at one time.
    pub min_concurrent_peers: i32,
    /// Most flows to one peer.
    pub max_flows_per_peer: i32,
    /// Fewest flows to one peer.
    pub min_flows_per_peer: i32,
}

/// What `set_net_attr` tells; bit sets are all ones where NCCL does not know.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetAttr {
    /// Of the sending side.
    pub send_comm_attr: NetCommAttr,
    /// Of the receiving side.
    pub recv_comm_attr: NetCommAttr,
    /// Bit set of NCCL functions.
    pub op: u32,
    /// Bit set of NCCL algorithms.
    pub algo: u32,
    /// Bit set of NCCL protocols.
    pub proto: u32,
}

/// The table of functions that a plugin exports as `ncclNetPlugin_v11`.
#[repr(C)]
pub struct Net {
    /// Name of the network, which `NCCL_NET` selects by.
    pub name: *const c_char,
    /// Called for each NCCL communicator; `*ctx` comes back in the calls that carry a context.
    pub init: Option<
        unsafe extern "C" fn(
            ctx: *mut *mut c_void,
            comm_id: u64,
            config: *mut CommConfig,
            log: Option<LogFn>,
            profiler: Option<ProfilerFn>,
        ) -> c_int,
    >,
    /// How many devices there are; none means that the plugin declines.
    pub devices: Option<unsafe extern "C" fn(ndev: *mut c_int) -> c_int>,
    /// Describes one device.
    pub get_properties: Option<unsafe extern "C" fn(dev: c_int, props: *mut Properties) -> c_int>,
    /// Starts to listen and fills the 128 bytes of `handle`.
    pub listen: Option<
        unsafe extern "C" fn(
            ctx: *mut c_void,
            dev: c_int,
            handle: *mut c_void,
            listen_comm: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Connects to a handle; never waits: NULL in `*send_comm` means "call again".
    pub connect: Option<
        unsafe extern "C" fn(
            ctx: *mut c_void,
            dev: c_int,
            handle: *mut c_void,
            send_comm: *mut *mut c_void,
            send_dev_comm: *mut *mut DeviceHandle,
        ) -> c_int,
    >,
    /// Accepts one connection; never waits: NULL in `*recv_comm` means "call again".
    pub accept: Option<
        unsafe extern "C" fn(
            listen_comm: *mut c_void,
            recv_comm: *mut *mut c_void,
            recv_dev_comm: *mut *mut DeviceHandle,
        ) -> c_int,
    >,
    /// Registers memory for one communicator.
    pub reg_mr: Option<
        unsafe extern "C" fn(
            comm: *mut c_void,
            data: *mut c_void,
            size: usize,
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
            size: usize,
            tag: c_int,
            mhandle: *mut c_void,
            phandle: *mut c_void,
            request: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Starts `n` grouped receives; NULL in `*request` means "call again".
    pub irecv: Option<
        unsafe extern "C" fn(
            recv_comm: *mut c_void,
            n: c_int,
            data: *mut *mut c_void,
            sizes: *mut usize,
            tags: *mut c_int,
            mhandles: *mut *mut c_void,
            phandles: *mut *mut c_void,
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
    /// Only for plugins that run code on the device.
    pub get_device_mr: Option<
        unsafe extern "C" fn(
            comm: *mut c_void,
            mhandle: *mut c_void,
            dptr_mhandle: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Only for plugins that run code on the device.
    pub irecv_consumed: Option<
        unsafe extern "C" fn(recv_comm: *mut c_void, n: c_int, request: *mut c_void) -> c_int,
    >,
    /// Joins physical devices into a virtual one.
    pub make_v_device:
        Option<unsafe extern "C" fn(dev: *mut c_int, props: *mut VDeviceProps) -> c_int>,
    /// Ends what `init` began, once for each `init`.
    pub finalize: Option<unsafe extern "C" fn(ctx: *mut c_void) -> c_int>,
    /// Tells how the connections to come will be used.
    pub set_net_attr: Option<unsafe extern "C" fn(ctx: *mut c_void, attr: *mut NetAttr) -> c_int>,
}

// SAFETY: a plugin's table is constant data: a name and code addresses, never written after load.
unsafe impl Sync for Net {}

entry::virtual_devices!(VDeviceProps);
entry::configuration!(CommConfig);

impl Describe for Properties {
    fn describe(dev: c_int, device: &'static crate::net::Properties) -> Properties {
        describe!(device, {
            reg_is_global: 0,
            force_flush: 0,
            net_device_type: NET_DEVICE_HOST,
            net_device_version: NET_DEVICE_INVALID_VERSION,
            v_props: VDeviceProps::of(dev),
            max_p2p_bytes: device.max_p2p_bytes,
            max_coll_bytes: device.max_coll_bytes,
            max_multi_request_size: 1,
        })
    }
}

/// vccl's own table.
pub(crate) const NET: Net = vtable!({
    init: Some(entry::init_context::<CommConfig>),
    listen: Some(entry::listen_context),
    connect: Some(entry::connect_context),
    accept: Some(entry::accept),
    reg_mr: Some(entry::reg_mr::<usize>),
    isend: Some(entry::isend_profiled),
    irecv: Some(entry::irecv_profiled),
    get_device_mr: None,
    irecv_consumed: None,
    make_v_device: Some(entry::make_v_device::<VDeviceProps>),
    finalize: Some(entry::finalize),
    set_net_attr: Some(entry::set_net_attr::<NetAttr>),
});
