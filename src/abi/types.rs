//! What all versions of the plugin interface share.

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// Bytes of the handle that `listen` fills and that reaches `connect` by way of NCCL.
pub const HANDLE_LEN: usize = 128;

/// Host memory, for `reg_mr` and `ptr_support`.
pub const NCCL_PTR_HOST: c_int = 1;
/// Device memory, for `reg_mr` and `ptr_support`.
pub const NCCL_PTR_CUDA: c_int = 2;
/// Device memory that has a dma-buf; only in `ptr_support`, where it allows `reg_mr_dma_buf`.
pub const NCCL_PTR_DMABUF: c_int = 4;

/// The value of `net_device_type` for a plugin that runs nothing on the device.
pub const NET_DEVICE_HOST: c_int = 0;
/// The value of `net_device_version` for a plugin that runs nothing on the device.
pub const NET_DEVICE_INVALID_VERSION: c_int = 0;

/// A traffic class that nobody chose.
pub const TRAFFIC_CLASS_UNDEF: c_int = -1;
/// A rail or plane that the plugin does not know.
pub const ID_UNDEF: i16 = -1;

/// What NCCL (2.24 and later) may put into `*request` before `irecv`: it will not look at the
/// completion of this receive.
pub const OPTIONAL_RECV_COMPLETION: usize = 1;

/// Log level of a failure; also what `ncclGetLastError` returns later.
pub const NCCL_LOG_WARN: c_int = 2;
/// Log level of `NCCL_DEBUG=INFO`.
pub const NCCL_LOG_INFO: c_int = 3;
/// Log level of `NCCL_DEBUG=TRACE`.
pub const NCCL_LOG_TRACE: c_int = 5;

/// Log subsystem of start and end.
pub const NCCL_INIT: c_ulong = 0x1;
/// Log subsystem of the network.
pub const NCCL_NET: c_ulong = 0x10;

/// NCCL's logger: a level, a set of subsystems, where in the source, and a printf format.
pub type LogFn = unsafe extern "C" fn(
    level: c_int,
    flags: c_ulong,
    file: *const c_char,
    line: c_int,
    fmt: *const c_char,
    ...
);

/// NCCL's profiler callback, by which a plugin reports events of its own (10 and later).
pub type ProfilerFn = unsafe extern "C" fn(
    event: *mut *mut c_void,
    kind: c_int,
    parent: *mut c_void,
    plugin_id: i64,
    ext_data: *mut c_void,
) -> c_int;

/// What a plugin that runs code on the device returns from `connect` and `accept`. The layout is
/// the same in all versions that have it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceHandle {
    /// A kind of device offload.
    pub net_device_type: c_int,
    /// Version of the device offload.
    pub net_device_version: c_int,
    /// Device memory of the plugin.
    pub handle: *mut c_void,
    /// Bytes behind `handle`.
    pub size: usize,
    /// 1: NCCL's proxy must still progress the connection.
    pub needs_proxy_progress: c_int,
}
