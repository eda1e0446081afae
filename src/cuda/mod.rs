//! The CUDA driver, loaded at run time: the only file that names its symbols.
//!
//! The table holds functions that return integers: a `CUresult` that we do not know must not become
//! an invalid Rust enum. Handle types come from cudarc; structs with enums in them are our own, with
//! integers, and their layout is asserted against cudarc's.
//!
//! Source for signatures and values: the CUDA driver API reference, CUDA 12.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::mem::{offset_of, size_of};
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::error::{Error, Result, ResultCode};

/// A context handle. NULL stands for none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(transparent)]
pub struct Context(*mut c_void);

/// A stream handle.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(transparent)]
pub struct Stream(*mut c_void);

/// An event handle.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(transparent)]
pub struct Event(*mut c_void);

// SAFETY: the driver lets every thread use an event.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}
// SAFETY: the driver lets every thread use a context.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}
// SAFETY: the driver lets every thread use a stream.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// An address that a GPU can use.
pub type DevicePtr = u64;
/// A `CUmemGenericAllocationHandle`.
pub type AllocationHandle = u64;
/// The 64 opaque bytes of a cudaIpc memory handle.
pub type IpcHandle = [u8; 64];

/// `CUmemLocation`, with the enum as an integer.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
struct MemLocation {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`, with the enums as integers.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct MemAllocationProp {
    kind: c_int,
    requested_handle_types: c_int,
    location: MemLocation,
    win32: *mut c_void,
    flags: [u8; 8],
}

/// `CUDA_MEMCPY2D`, with the enums as integers.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Rows {
    src: RowsSide,
    dst: RowsSide,
    width: usize,
    height: usize,
}

/// One side of [`Rows`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct RowsSide {
    x: usize,
    y: usize,
    memory_type: c_uint,
    host: *mut c_void,
    device: DevicePtr,
    array: *mut c_void,
    pitch: usize,
}

impl RowsSide {
    fn at(device: DevicePtr, pitch: usize) -> RowsSide {
        RowsSide {
            x: 0,
            y: 0,
            memory_type: MEMORY_TYPE_UNIFIED,
            host: std::ptr::null_mut(),
            device,
            array: std::ptr::null_mut(),
            pitch,
        }
    }
}

/// `CUmemAccessDesc`, with the enums as integers.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
struct MemAccessDesc {
    location: MemLocation,
    flags: c_int,
}

const _: () = {
    assert!(size_of::<Context>() == size_of::<sys::CUcontext>());
    assert!(size_of::<Stream>() == size_of::<sys::CUstream>());
    assert!(size_of::<MemLocation>() == size_of::<sys::CUmemLocation>());
    assert!(size_of::<MemAllocationProp>() == size_of::<sys::CUmemAllocationProp>());
    assert!(
        offset_of!(MemAllocationProp, location) == offset_of!(sys::CUmemAllocationProp, location)
    );
    assert!(
        offset_of!(MemAllocationProp, requested_handle_types)
            == offset_of!(sys::CUmemAllocationProp, requestedHandleTypes)
    );
    assert!(
        offset_of!(MemAllocationProp, flags) == offset_of!(sys::CUmemAllocationProp, allocFlags)
    );
    assert!(size_of::<MemAccessDesc>() == size_of::<sys::CUmemAccessDesc>());
    assert!(offset_of!(MemAccessDesc, flags) == offset_of!(sys::CUmemAccessDesc, flags));
    assert!(size_of::<Rows>() == size_of::<sys::CUDA_MEMCPY2D>());
    assert!(
        offset_of!(Rows, src) + offset_of!(RowsSide, device)
            == offset_of!(sys::CUDA_MEMCPY2D, srcDevice)
    );
    assert!(
        offset_of!(Rows, src) + offset_of!(RowsSide, pitch)
            == offset_of!(sys::CUDA_MEMCPY2D, srcPitch)
    );
    assert!(
        offset_of!(Rows, dst) + offset_of!(RowsSide, memory_type)
            == offset_of!(sys::CUDA_MEMCPY2D, dstMemoryType)
    );
    assert!(
        offset_of!(Rows, dst) + offset_of!(RowsSide, device)
            == offset_of!(sys::CUDA_MEMCPY2D, dstDevice)
    );
    assert!(offset_of!(Rows, width) == offset_of!(sys::CUDA_MEMCPY2D, WidthInBytes));
    assert!(offset_of!(Rows, height) == offset_of!(sys::CUDA_MEMCPY2D, Height));
    assert!(size_of::<IpcHandle>() == size_of::<sys::CUipcMemHandle>());
};

const ALLOCATION_TYPE_PINNED: c_int = 1;
const HANDLE_TYPE_POSIX_FD: c_int = 1;
const LOCATION_TYPE_DEVICE: c_int = 1;
const ACCESS_READ_WRITE: c_int = 3;
const POINTER_MEMORY_TYPE: c_int = 2;
const POINTER_BUFFER_ID: c_int = 7;
const POINTER_DEVICE_ORDINAL: c_int = 9;
const MEMORY_TYPE_DEVICE: c_uint = 2;
const MEMORY_TYPE_HOST: c_uint = 1;
const MEMORY_TYPE_UNIFIED: c_uint = 4;
const HOST_REGISTER_PORTABLE_DEVICEMAP: c_uint = 1 | 2;
const IPC_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_DISABLE_TIMING: c_uint = 2;
const RANGE_HANDLE_DMA_BUF: c_int = 1;
const FLUSH_TARGET_CURRENT_CONTEXT: c_int = 0;
const FLUSH_TO_OWNER: c_int = 100;
const ATTRIBUTE_FLUSH_OPTIONS: c_int = 117;
const ATTRIBUTE_REMOTE_WRITES_ORDERING: c_int = 118;
const CAPTURE_MODE_RELAXED: c_int = 2;
const GRANULARITY_MINIMUM: c_int = 0;
const ERROR_HOST_MEMORY_ALREADY_REGISTERED: c_int = 712;
const ERROR_NOT_READY: c_int = 600;
const ERROR_PEER_ACCESS_ALREADY_ENABLED: c_int = 704;

/// Bytes below which a copy is made of two rows. Of a plain one the driver makes a kernel if it is from host
/// memory and has at most 24 KiB, and a kernel waits for SMs, or for its context's turn (2.4 ms) where another
/// context has a kernel running. Of two rows it makes none, and they take no longer. Measured: driver 580, H200.
const SMALL: usize = 64 << 10;

macro_rules! table {
    ($($field:ident = $symbol:literal ( $($arg:ty),* );)*) => {
        #[derive(Debug)]
        struct Table {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Table {
            fn load(library: &libloading::Library) -> std::result::Result<Table, String> {
                Ok(Table {
                    $($field: {
                        // SAFETY: the symbol is the driver's function of that name, whose C
                        // signature in CUDA 12 is the one of the field.
                        *unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> c_int>(
                            concat!($symbol, "\0").as_bytes(),
                        ) }
                        .map_err(|_| format!(
                            "the CUDA driver has no {}: it is older than CUDA 12.0; update it",
                            $symbol
                        ))?
                    },)*
                })
            }
        }
    };
}

table! {
    init = "cuInit"(c_uint);
    driver_version = "cuDriverGetVersion"(*mut c_int);
    error_name = "cuGetErrorName"(c_int, *mut *const c_char);
    error_string = "cuGetErrorString"(c_int, *mut *const c_char);
    device_count = "cuDeviceGetCount"(*mut c_int);
    device_get = "cuDeviceGet"(*mut c_int, c_int);
    device_uuid = "cuDeviceGetUuid_v2"(*mut [u8; 16], c_int);
    primary_retain = "cuDevicePrimaryCtxRetain"(*mut Context, c_int);
    primary_release = "cuDevicePrimaryCtxRelease_v2"(c_int);
    ctx_create = "cuCtxCreate_v2"(*mut Context, c_uint, c_int);
    ctx_get_current = "cuCtxGetCurrent"(*mut Context);
    ctx_push = "cuCtxPushCurrent_v2"(Context);
    ctx_pop = "cuCtxPopCurrent_v2"(*mut Context);
    ctx_device = "cuCtxGetDevice"(*mut c_int);
    ctx_enable_peer = "cuCtxEnablePeerAccess"(Context, c_uint);
    ctx_priority_range = "cuCtxGetStreamPriorityRange"(*mut c_int, *mut c_int);
    pointer_attribute = "cuPointerGetAttribute"(*mut c_void, c_int, DevicePtr);
    address_range = "cuMemGetAddressRange_v2"(*mut DevicePtr, *mut usize, DevicePtr);
    host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister"(*mut c_void);
    host_device_pointer = "cuMemHostGetDevicePointer_v2"(*mut DevicePtr, *mut c_void, c_uint);
    mem_create = "cuMemCreate"(*mut AllocationHandle, usize, *const MemAllocationProp, u64);
    mem_release = "cuMemRelease"(AllocationHandle);
    mem_retain = "cuMemRetainAllocationHandle"(*mut AllocationHandle, *mut c_void);
    mem_export = "cuMemExportToShareableHandle"(*mut c_void, AllocationHandle, c_int, u64);
    mem_import = "cuMemImportFromShareableHandle"(*mut AllocationHandle, *mut c_void, c_int);
    mem_granularity = "cuMemGetAllocationGranularity"(*mut usize, *const MemAllocationProp, c_int);
    mem_reserve = "cuMemAddressReserve"(*mut DevicePtr, usize, usize, DevicePtr, u64);
    mem_free_address = "cuMemAddressFree"(DevicePtr, usize);
    mem_map = "cuMemMap"(DevicePtr, usize, usize, AllocationHandle, u64);
    mem_unmap = "cuMemUnmap"(DevicePtr, usize);
    mem_set_access = "cuMemSetAccess"(DevicePtr, usize, *const MemAccessDesc, usize);
    ipc_get = "cuIpcGetMemHandle"(*mut IpcHandle, DevicePtr);
    ipc_open = "cuIpcOpenMemHandle_v2"(*mut DevicePtr, sys::CUipcMemHandle, c_uint);
    ipc_close = "cuIpcCloseMemHandle"(DevicePtr);
    mem_alloc = "cuMemAlloc_v2"(*mut DevicePtr, usize);
    mem_free = "cuMemFree_v2"(DevicePtr);
    memcpy_async = "cuMemcpyAsync"(DevicePtr, DevicePtr, usize, Stream);
    memcpy_rows_async = "cuMemcpy2DAsync_v2"(*const Rows, Stream);
    write_value32 = "cuStreamWriteValue32_v2"(Stream, DevicePtr, u32, c_uint);
    stream_create = "cuStreamCreateWithPriority"(*mut Stream, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2"(Stream);
    stream_query = "cuStreamQuery"(Stream);
    event_create = "cuEventCreate"(*mut Event, c_uint);
    event_destroy = "cuEventDestroy_v2"(Event);
    event_record = "cuEventRecord"(Event, Stream);
    event_query = "cuEventQuery"(Event);
    device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
    range_handle = "cuMemGetHandleForAddressRange"(*mut c_void, DevicePtr, usize, c_int, u64);
    flush_remote_writes = "cuFlushGPUDirectRDMAWrites"(c_int, c_int);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut c_int);
}

/// The driver of this process. Never unloaded.
#[derive(Debug)]
pub struct Driver {
    table: Table,
}

/// What the driver says of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PointerKind {
    /// GPU memory, of the device with that ordinal in this process.
    Device(i32),
    /// Host memory that the driver has page-locked.
    PinnedHost,
    /// Memory that the driver does not know.
    Unknown,
}

/// The driver, or why there is none.
pub fn driver() -> std::result::Result<&'static Driver, &'static str> {
    static DRIVER: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
    DRIVER
        .get_or_init(Driver::load)
        .as_ref()
        .map_err(String::as_str)
}

impl Driver {
    fn load() -> std::result::Result<Driver, String> {
        // SAFETY: loading the CUDA driver runs its constructors, which every CUDA program runs.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }
            .map_err(|e| format!("no CUDA driver (libcuda.so.1): {e}"))?;
        let driver = Driver {
            table: Table::load(&library)?,
        };
        // The driver registers exit handlers: it stays loaded for the life of the process.
        std::mem::forget(library);
        // SAFETY: cuInit takes no pointers.
        let code = unsafe { (driver.table.init)(0) };
        if code != 0 {
            return Err(format!("cuInit failed: {}", driver.describe(code)));
        }
        let mut version = 0;
        // SAFETY: `version` lives through the call.
        let code = unsafe { (driver.table.driver_version)(&mut version) };
        if code != 0 || version < 12000 {
            return Err(format!(
                "the CUDA driver reports version {version}: 12000 or later is needed"
            ));
        }
        let mut n = 0;
        // SAFETY: `n` lives through the call.
        let code = unsafe { (driver.table.device_count)(&mut n) };
        if code != 0 || n == 0 {
            return Err("the CUDA driver shows no device".into());
        }
        Ok(driver)
    }

    #[cold]
    fn describe(&self, code: c_int) -> String {
        let text = |f: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut p: *const c_char = std::ptr::null();
            // SAFETY: `p` lives through the call; on success it points to a string of the driver's.
            unsafe {
                if f(code, &mut p) == 0 && !p.is_null() {
                    Some(CStr::from_ptr(p).to_string_lossy().into_owned())
                } else {
                    None
                }
            }
        };
        match (text(self.table.error_name), text(self.table.error_string)) {
            (Some(name), Some(what)) => format!("{name} ({code}): {what}"),
            _ => format!("CUDA error {code}, unknown to the driver"),
        }
    }

    #[inline]
    fn check(&self, code: c_int, what: &'static str) -> Result<()> {
        if code == 0 {
            Ok(())
        } else {
            Err(self.failed(code, what))
        }
    }

    #[cold]
    fn failed(&self, code: c_int, what: &'static str) -> Error {
        Error::new(
            ResultCode::UNHANDLED_CUDA,
            format!("{what} failed: {}", self.describe(code)),
        )
    }

    /// The number of devices that this process sees.
    pub fn device_count(&self) -> Result<i32> {
        let mut n = 0;
        // SAFETY: `n` lives through the call.
        let code = unsafe { (self.table.device_count)(&mut n) };
        self.check(code, "cuDeviceGetCount")?;
        Ok(n)
    }

    fn device(&self, ordinal: i32) -> Result<c_int> {
        let mut d = 0;
        // SAFETY: `d` lives through the call.
        let code = unsafe { (self.table.device_get)(&mut d, ordinal) };
        self.check(code, "cuDeviceGet")?;
        Ok(d)
    }

    /// The device's identity across processes, whatever CUDA_VISIBLE_DEVICES says.
    pub fn device_uuid(&self, ordinal: i32) -> Result<[u8; 16]> {
        let d = self.device(ordinal)?;
        let mut u = [0; 16];
        // SAFETY: `u` lives through the call and is as large as a CUuuid.
        let code = unsafe { (self.table.device_uuid)(&mut u, d) };
        self.check(code, "cuDeviceGetUuid_v2")?;
        Ok(u)
    }

    /// The context that is current in this thread, with its device's ordinal.
    pub fn current_context(&self) -> Result<Option<(Context, i32)>> {
        let mut c = Context(std::ptr::null_mut());
        // SAFETY: `c` lives through the call.
        let code = unsafe { (self.table.ctx_get_current)(&mut c) };
        self.check(code, "cuCtxGetCurrent")?;
        if c.0.is_null() {
            return Ok(None);
        }
        let mut d = 0;
        // SAFETY: `d` lives through the call, and a context is current.
        let code = unsafe { (self.table.ctx_device)(&mut d) };
        self.check(code, "cuCtxGetDevice")?;
        Ok(Some((c, d)))
    }

    /// Retains the primary context of a device, for the life of the process.
    pub fn primary_context(&self, ordinal: i32) -> Result<Context> {
        let d = self.device(ordinal)?;
        let mut c = Context(std::ptr::null_mut());
        // SAFETY: `c` lives through the call.
        let code = unsafe { (self.table.primary_retain)(&mut c, d) };
        self.check(code, "cuDevicePrimaryCtxRetain")?;
        Ok(c)
    }

    /// Gives back one [`Driver::primary_context`].
    pub fn release_primary_context(&self, ordinal: i32) {
        if let Ok(d) = self.device(ordinal) {
            // SAFETY: takes no pointers; the caller retained the context.
            unsafe { (self.table.primary_release)(d) };
        }
    }

    /// Creates a context of our own; it is not left current.
    pub fn create_context(&self, ordinal: i32) -> Result<Context> {
        let d = self.device(ordinal)?;
        let mut c = Context(std::ptr::null_mut());
        // SAFETY: `c` lives through the call.
        let code = unsafe { (self.table.ctx_create)(&mut c, 0, d) };
        self.check(code, "cuCtxCreate_v2")?;
        let mut popped = Context(std::ptr::null_mut());
        // SAFETY: cuCtxCreate pushed `c`; `popped` lives through the call.
        let code = unsafe { (self.table.ctx_pop)(&mut popped) };
        self.check(code, "cuCtxPopCurrent_v2")?;
        Ok(c)
    }

    /// Makes `ctx` current in this thread until the guard is dropped.
    #[inline]
    pub fn enter(&self, ctx: Context) -> Result<Entered<'_>> {
        // SAFETY: takes a handle; the driver checks it.
        let code = unsafe { (self.table.ctx_push)(ctx) };
        self.check(code, "cuCtxPushCurrent_v2")?;
        Ok(Entered { driver: self })
    }

    /// Lets copies in the current context reach plain cudaMalloc memory of `peer`'s device.
    pub fn enable_peer_access(&self, peer: Context) -> Result<()> {
        // SAFETY: takes a handle; the driver checks it.
        match unsafe { (self.table.ctx_enable_peer)(peer, 0) } {
            ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => self.check(code, "cuCtxEnablePeerAccess"),
        }
    }

    fn attribute(&self, ordinal: i32, attribute: c_int) -> Result<i32> {
        let d = self.device(ordinal)?;
        let mut value = 0;
        // SAFETY: `value` lives through the call.
        let code = unsafe { (self.table.device_attribute)(&mut value, attribute, d) };
        self.check(code, "cuDeviceGetAttribute")?;
        Ok(value)
    }

    /// Whether the GPU sees what RDMA devices wrote before the host hears of it, and if not, whether the
    /// host can see to that ([`Driver::flush_remote_writes`]).
    pub fn remote_writes(&self, ordinal: i32) -> Result<(bool, bool)> {
        let ordered = self.attribute(ordinal, ATTRIBUTE_REMOTE_WRITES_ORDERING)? >= FLUSH_TO_OWNER;
        let flushes = self.attribute(ordinal, ATTRIBUTE_FLUSH_OPTIONS)? & 1 != 0;
        Ok((ordered, flushes))
    }

    /// Lets the GPU of the current context see what RDMA devices have written to its memory.
    #[inline]
    pub fn flush_remote_writes(&self) -> Result<()> {
        // SAFETY: takes no pointers.
        let code = unsafe {
            (self.table.flush_remote_writes)(FLUSH_TARGET_CURRENT_CONTEXT, FLUSH_TO_OWNER)
        };
        self.check(code, "cuFlushGPUDirectRDMAWrites")
    }

    /// GPU memory as a dma-buf, which other drivers can map. Address and length are multiples of a host page.
    pub fn dma_buf(&self, addr: DevicePtr, len: usize) -> Result<std::os::fd::OwnedFd> {
        let mut fd: c_int = -1;
        // SAFETY: `fd` lives through the call.
        let code = unsafe {
            (self.table.range_handle)((&raw mut fd).cast(), addr, len, RANGE_HANDLE_DMA_BUF, 0)
        };
        self.check(code, "cuMemGetHandleForAddressRange")?;
        // SAFETY: the driver has just opened it, for us.
        Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) })
    }

    /// What kind of memory `addr` is.
    pub fn pointer_kind(&self, addr: u64) -> PointerKind {
        let mut kind: c_uint = 0;
        // SAFETY: the attribute is an unsigned int, and `kind` lives through the call.
        let code = unsafe {
            (self.table.pointer_attribute)((&raw mut kind).cast(), POINTER_MEMORY_TYPE, addr)
        };
        match (code, kind) {
            (0, MEMORY_TYPE_DEVICE) => {
                let mut d: c_int = 0;
                // SAFETY: the attribute is an int, and `d` lives through the call.
                let code = unsafe {
                    (self.table.pointer_attribute)(
                        (&raw mut d).cast(),
                        POINTER_DEVICE_ORDINAL,
                        addr,
                    )
                };
                if code == 0 {
                    PointerKind::Device(d)
                } else {
                    PointerKind::Unknown
                }
            }
            (0, MEMORY_TYPE_HOST) => PointerKind::PinnedHost,
            _ => PointerKind::Unknown,
        }
    }

    /// A number that no other allocation of this process's life has; 0 where the driver gives none.
    pub fn buffer_id(&self, addr: DevicePtr) -> u64 {
        let mut id: u64 = 0;
        // SAFETY: the attribute is an unsigned long long, and `id` lives through the call.
        let code = unsafe {
            (self.table.pointer_attribute)((&raw mut id).cast(), POINTER_BUFFER_ID, addr)
        };
        if code == 0 {
            id
        } else {
            0
        }
    }

    /// First address and bytes of the allocation (or mapping) that holds `addr`.
    pub fn address_range(&self, addr: DevicePtr) -> Result<(DevicePtr, usize)> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: both live through the call.
        let code = unsafe { (self.table.address_range)(&mut base, &mut size, addr) };
        self.check(code, "cuMemGetAddressRange_v2")?;
        Ok((base, size))
    }

    /// Page-locks host memory of ours and gives the address by which GPUs reach it.
    ///
    /// # Safety
    /// `[addr, addr + len)` is mapped, and stays so until [`Driver::unregister_host`].
    pub unsafe fn register_host(&self, addr: *mut u8, len: usize) -> Result<DevicePtr> {
        // SAFETY: the caller's promise.
        let code = unsafe {
            (self.table.host_register)(addr.cast(), len, HOST_REGISTER_PORTABLE_DEVICEMAP)
        };
        if code == ERROR_HOST_MEMORY_ALREADY_REGISTERED {
            return Err(Error::internal(
                "memory of ours was registered with the driver twice",
            ));
        }
        self.check(code, "cuMemHostRegister_v2")?;
        let mut d = 0;
        // SAFETY: the memory is registered, and `d` lives through the call.
        let code = unsafe { (self.table.host_device_pointer)(&mut d, addr.cast(), 0) };
        if let Err(e) = self.check(code, "cuMemHostGetDevicePointer_v2") {
            // SAFETY: registered above, and nothing uses it yet.
            unsafe { self.unregister_host(addr) };
            return Err(e);
        }
        Ok(d)
    }

    /// Undoes [`Driver::register_host`].
    ///
    /// # Safety
    /// `addr` was registered by us, and no copy that uses it is pending.
    pub unsafe fn unregister_host(&self, addr: *mut u8) {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.table.host_unregister)(addr.cast()) };
        if code != 0 {
            log::debug!("cuMemHostUnregister: {}", self.describe(code));
        }
    }

    fn exportable(ordinal: i32) -> MemAllocationProp {
        MemAllocationProp {
            kind: ALLOCATION_TYPE_PINNED,
            requested_handle_types: HANDLE_TYPE_POSIX_FD,
            location: MemLocation {
                kind: LOCATION_TYPE_DEVICE,
                id: ordinal,
            },
            win32: std::ptr::null_mut(),
            flags: [0; 8],
        }
    }

    /// Allocates memory of the GPU of the current context.
    pub fn allocate(&self, size: usize) -> Result<DevicePtr> {
        let mut a = 0;
        // SAFETY: `a` lives through the call.
        let code = unsafe { (self.table.mem_alloc)(&mut a, size) };
        self.check(code, "cuMemAlloc_v2")?;
        Ok(a)
    }

    /// Gives back memory of [`Driver::allocate`]. Waits for what the current context does.
    ///
    /// # Safety
    /// Nothing uses it any more.
    pub unsafe fn free(&self, addr: DevicePtr) {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.table.mem_free)(addr) };
        if code != 0 {
            log::debug!("cuMemFree_v2: {}", self.describe(code));
        }
    }

    /// Allocates device memory that can be exported; gives the handle and the rounded size.
    pub fn create_exportable(
        &self,
        ordinal: i32,
        size: usize,
    ) -> Result<(AllocationHandle, usize)> {
        let prop = Driver::exportable(self.device(ordinal)?);
        let mut g = 0;
        // SAFETY: both live through the call.
        let code = unsafe { (self.table.mem_granularity)(&mut g, &prop, GRANULARITY_MINIMUM) };
        self.check(code, "cuMemGetAllocationGranularity")?;
        let size = size.next_multiple_of(g.max(1));
        let mut h = 0;
        // SAFETY: both live through the call.
        let code = unsafe { (self.table.mem_create)(&mut h, size, &prop, 0) };
        self.check(code, "cuMemCreate")?;
        Ok((h, size))
    }

    /// A new reference to the allocation behind a mapped address. Fails for cudaMalloc memory.
    pub fn retain_allocation(&self, addr: DevicePtr) -> Result<AllocationHandle> {
        let mut h = 0;
        // SAFETY: `h` lives through the call; the driver checks the address.
        let code = unsafe { (self.table.mem_retain)(&mut h, addr as *mut c_void) };
        self.check(code, "cuMemRetainAllocationHandle")?;
        Ok(h)
    }

    /// Whether GPU memory is of the virtual memory management, and so belongs to no context.
    pub fn is_vmm(&self, addr: DevicePtr) -> bool {
        let handle = self.retain_allocation(addr).ok();
        handle.map(|h| self.release_allocation(h)).is_some()
    }

    /// Gives back one reference to an allocation.
    pub fn release_allocation(&self, h: AllocationHandle) {
        // SAFETY: takes a handle; the driver checks it.
        let code = unsafe { (self.table.mem_release)(h) };
        if code != 0 {
            log::debug!("cuMemRelease: {}", self.describe(code));
        }
    }

    /// A file descriptor by which another process can import the allocation.
    pub fn export_allocation(&self, h: AllocationHandle) -> Result<std::os::fd::OwnedFd> {
        use std::os::fd::FromRawFd;
        let mut fd: c_int = -1;
        // SAFETY: for this handle type the driver writes an int, and `fd` lives through the call.
        let code =
            unsafe { (self.table.mem_export)((&raw mut fd).cast(), h, HANDLE_TYPE_POSIX_FD, 0) };
        self.check(code, "cuMemExportToShareableHandle")?;
        // SAFETY: the driver made the descriptor for the caller.
        Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) })
    }

    /// The allocation behind a file descriptor of [`Driver::export_allocation`].
    pub fn import_allocation(&self, fd: std::os::fd::BorrowedFd<'_>) -> Result<AllocationHandle> {
        use std::os::fd::AsRawFd;
        let mut h = 0;
        // SAFETY: for this handle type the driver takes the descriptor's number in the pointer.
        let code = unsafe {
            (self.table.mem_import)(
                &mut h,
                fd.as_raw_fd() as usize as *mut c_void,
                HANDLE_TYPE_POSIX_FD,
            )
        };
        self.check(code, "cuMemImportFromShareableHandle")?;
        Ok(h)
    }

    /// Reserves `size` bytes of addresses.
    pub fn reserve(&self, size: usize) -> Result<DevicePtr> {
        let mut a = 0;
        // SAFETY: `a` lives through the call.
        let code = unsafe { (self.table.mem_reserve)(&mut a, size, 0, 0, 0) };
        self.check(code, "cuMemAddressReserve")?;
        Ok(a)
    }

    /// Gives back addresses of [`Driver::reserve`].
    ///
    /// # Safety
    /// Nothing is mapped there any more.
    pub unsafe fn free_reservation(&self, addr: DevicePtr, size: usize) {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.table.mem_free_address)(addr, size) };
        if code != 0 {
            log::debug!("cuMemAddressFree: {}", self.describe(code));
        }
    }

    /// Maps the whole allocation at reserved addresses.
    pub fn map(&self, addr: DevicePtr, size: usize, h: AllocationHandle) -> Result<()> {
        // SAFETY: maps into reserved addresses of ours; the driver checks the range.
        let code = unsafe { (self.table.mem_map)(addr, size, 0, h, 0) };
        self.check(code, "cuMemMap")
    }

    /// Removes a mapping.
    ///
    /// # Safety
    /// No copy that uses the range is pending, and none will be issued.
    pub unsafe fn unmap(&self, addr: DevicePtr, size: usize) {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.table.mem_unmap)(addr, size) };
        if code != 0 {
            log::debug!("cuMemUnmap: {}", self.describe(code));
        }
    }

    /// Lets a device read and write a mapped range.
    pub fn allow_access(&self, addr: DevicePtr, size: usize, ordinal: i32) -> Result<()> {
        let desc = MemAccessDesc {
            location: MemLocation {
                kind: LOCATION_TYPE_DEVICE,
                id: ordinal,
            },
            flags: ACCESS_READ_WRITE,
        };
        // SAFETY: `desc` lives through the call.
        let code = unsafe { (self.table.mem_set_access)(addr, size, &desc, 1) };
        self.check(code, "cuMemSetAccess")
    }

    /// A handle by which another process can open the cudaMalloc allocation that holds `addr`.
    pub fn ipc_handle(&self, addr: DevicePtr) -> Result<IpcHandle> {
        let mut h: IpcHandle = [0; 64];
        // SAFETY: `h` lives through the call and is as large as a CUipcMemHandle.
        let code = unsafe { (self.table.ipc_get)(&mut h, addr) };
        self.check(code, "cuIpcGetMemHandle")?;
        Ok(h)
    }

    /// Opens another process's handle in the current context: the start of its allocation.
    pub fn ipc_open(&self, h: &IpcHandle) -> Result<DevicePtr> {
        let mut raw = sys::CUipcMemHandle { reserved: [0; 64] };
        for (to, from) in raw.reserved.iter_mut().zip(h) {
            *to = *from as c_char;
        }
        let mut a = 0;
        // SAFETY: `a` lives through the call; the driver checks the handle.
        let code = unsafe { (self.table.ipc_open)(&mut a, raw, IPC_LAZY_ENABLE_PEER_ACCESS) };
        self.check(code, "cuIpcOpenMemHandle_v2")?;
        Ok(a)
    }

    /// Closes what [`Driver::ipc_open`] opened.
    ///
    /// # Safety
    /// No copy that uses the memory is pending, and none will be issued.
    pub unsafe fn ipc_close(&self, addr: DevicePtr) {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.table.ipc_close)(addr) };
        if code != 0 {
            log::debug!("cuIpcCloseMemHandle: {}", self.describe(code));
        }
    }

    /// Enqueues one copy, for a copy engine wherever the driver has one do it: see [`SMALL`]. Copies within
    /// one device, and of a single byte from host memory, take SMs.
    ///
    /// # Safety
    /// Both ranges are valid for the copy, and stay so until the stream has passed it.
    #[inline]
    pub unsafe fn copy_async(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        len: usize,
        stream: Stream,
    ) -> Result<()> {
        let half = len / 2;
        if len >= SMALL || half == 0 {
            // SAFETY: the caller's promise.
            let code = unsafe { (self.table.memcpy_async)(dst, src, len, stream) };
            return self.check(code, "cuMemcpyAsync");
        }
        // SAFETY: both rows lie in the ranges of the caller's promise.
        unsafe { self.copy_rows(dst, src, half, half, stream)? };
        if len % 2 == 1 {
            // The last byte, for want of a second row together with the first.
            // SAFETY: as above.
            unsafe { self.copy_rows(dst, src, 1, len - 1, stream)? };
        }
        Ok(())
    }

    /// Enqueues a copy of two rows of `width` bytes that begin `pitch` bytes apart, at both sides.
    ///
    /// # Safety
    /// As for [`Driver::copy_async`], with `pitch + width` bytes.
    #[inline]
    unsafe fn copy_rows(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        width: usize,
        pitch: usize,
        stream: Stream,
    ) -> Result<()> {
        let rows = Rows {
            src: RowsSide::at(src, pitch),
            dst: RowsSide::at(dst, pitch),
            width,
            height: 2,
        };
        // SAFETY: `rows` lives through the call; for the memory the caller's promise.
        let code = unsafe { (self.table.memcpy_rows_async)(&rows, stream) };
        self.check(code, "cuMemcpy2DAsync_v2")
    }

    /// Enqueues a write of `value`, which others see after all that the stream did before.
    ///
    /// # Safety
    /// `addr` is a 4-byte word that GPUs may write, until the stream has passed it.
    #[inline]
    pub unsafe fn write_value(&self, addr: DevicePtr, value: u32, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.table.write_value32)(stream, addr, value, 0) };
        self.check(code, "cuStreamWriteValue32_v2")
    }

    /// A stream of the current context, of the highest priority, that waits for no other stream.
    pub fn create_stream(&self) -> Result<Stream> {
        let (mut low, mut high) = (0, 0);
        // SAFETY: both live through the call.
        let code = unsafe { (self.table.ctx_priority_range)(&mut low, &mut high) };
        self.check(code, "cuCtxGetStreamPriorityRange")?;
        let mut s = Stream(std::ptr::null_mut());
        // SAFETY: `s` lives through the call.
        let code = unsafe { (self.table.stream_create)(&mut s, STREAM_NON_BLOCKING, high) };
        self.check(code, "cuStreamCreateWithPriority")?;
        Ok(s)
    }

    /// Destroys a stream of ours; work in it is still done.
    pub fn destroy_stream(&self, s: Stream) {
        // SAFETY: takes a handle of ours that nobody uses any more.
        let code = unsafe { (self.table.stream_destroy)(s) };
        if code != 0 {
            log::debug!("cuStreamDestroy: {}", self.describe(code));
        }
    }

    /// An event of the current context.
    pub fn create_event(&self) -> Result<Event> {
        let mut e = Event(std::ptr::null_mut());
        // SAFETY: `e` lives through the call.
        let code = unsafe { (self.table.event_create)(&mut e, EVENT_DISABLE_TIMING) };
        self.check(code, "cuEventCreate")?;
        Ok(e)
    }

    /// Destroys an event of ours.
    pub fn destroy_event(&self, e: Event) {
        // SAFETY: takes a handle of ours that nobody uses any more.
        let code = unsafe { (self.table.event_destroy)(e) };
        if code != 0 {
            log::debug!("cuEventDestroy: {}", self.describe(code));
        }
    }

    /// Puts the event behind all that the stream has to do.
    pub fn record_event(&self, e: Event, s: Stream) -> Result<()> {
        // SAFETY: takes handles of ours.
        let code = unsafe { (self.table.event_record)(e, s) };
        self.check(code, "cuEventRecord")
    }

    /// Whether the stream has passed the event; an error says that work before it failed.
    pub fn event_passed(&self, e: Event) -> Result<bool> {
        // SAFETY: takes a handle of ours.
        match unsafe { (self.table.event_query)(e) } {
            0 => Ok(true),
            ERROR_NOT_READY => Ok(false),
            code => Err(self.failed(code, "a copy")),
        }
    }

    fn exchange_capture_mode(&self, mut mode: c_int) -> c_int {
        // SAFETY: `mode` lives through the call.
        unsafe { (self.table.exchange_capture_mode)(&mut mode) };
        mode
    }

    /// Whether the stream has done all its work; an error says that work in it failed.
    pub fn stream_idle(&self, s: Stream) -> Result<bool> {
        // SAFETY: takes a handle of ours.
        match unsafe { (self.table.stream_query)(s) } {
            0 => Ok(true),
            ERROR_NOT_READY => Ok(false),
            code => Err(self.failed(code, "a copy")),
        }
    }
}

/// While it lives, this thread's calls have nothing to do with a graph that the application captures:
/// else the driver may refuse them while it does, and break the capture off.
#[derive(Debug)]
pub struct Relaxed(Option<(&'static Driver, c_int)>);

impl Relaxed {
    /// For the calls of this thread from here on; costs nothing where there is no driver.
    pub fn begin() -> Relaxed {
        let driver = driver().ok();
        Relaxed(driver.map(|d| (d, d.exchange_capture_mode(CAPTURE_MODE_RELAXED))))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if let Some((driver, mode)) = self.0 {
            driver.exchange_capture_mode(mode);
        }
    }
}

/// A context that is current in this thread.
#[derive(Debug)]
pub struct Entered<'a> {
    driver: &'a Driver,
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        let mut c = Context(std::ptr::null_mut());
        // SAFETY: `enter` pushed a context in this thread; `c` lives through the call.
        unsafe { (self.driver.table.ctx_pop)(&mut c) };
    }
}
