//! The driver's result codes, constants and structures, and the pointer arguments of its calls.

/// What every entry point returns.
pub type CUresult = i32;
/// What a call inside the double returns; the error is a driver code.
pub type Res<T = ()> = Result<T, CUresult>;

macro_rules! results {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        $(#[allow(dead_code)]
        pub const $name: CUresult = $value;)*
        /// Name and text of a result, both ending in NUL.
        pub fn describe(code: CUresult) -> Option<(&'static str, &'static str)> {
            match code {
                $($value => Some((
                    concat!("CUDA_", results!(@tail $name), "\0"),
                    concat!($text, "\0"),
                )),)*
                _ => None,
            }
        }
    };
    (@tail $name:ident) => { stringify!($name) };
}

results! {
    SUCCESS = 0, "no error";
    ERROR_INVALID_VALUE = 1, "invalid argument";
    ERROR_OUT_OF_MEMORY = 2, "out of memory";
    ERROR_NOT_INITIALIZED = 3, "initialization error";
    ERROR_NO_DEVICE = 100, "no CUDA-capable device is detected";
    ERROR_INVALID_DEVICE = 101, "invalid device ordinal";
    ERROR_INVALID_CONTEXT = 201, "invalid device context";
    ERROR_MAP_FAILED = 205, "mapping of buffer object failed";
    ERROR_ALREADY_MAPPED = 208, "resource already mapped";
    ERROR_PEER_ACCESS_UNSUPPORTED = 217, "peer access is not supported between these two devices";
    ERROR_OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    ERROR_INVALID_HANDLE = 400, "invalid resource handle";
    ERROR_NOT_FOUND = 500, "named symbol not found";
    ERROR_NOT_READY = 600, "device not ready";
    ERROR_ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    ERROR_PEER_ACCESS_ALREADY_ENABLED = 704, "peer access is already enabled";
    ERROR_PEER_ACCESS_NOT_ENABLED = 705, "peer access has not been enabled";
    ERROR_CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    ERROR_HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    ERROR_LAUNCH_FAILED = 719, "unspecified launch failure";
    ERROR_NOT_PERMITTED = 800, "operation not permitted";
    ERROR_NOT_SUPPORTED = 801, "operation not supported";
    ERROR_UNKNOWN = 999, "unknown error";
}

/// An out pointer of the caller.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Stores the value; a null pointer is the caller's error.
    pub fn set(self, value: T) -> Res {
        self.set_at(0, value)
    }

    /// Stores the value at an index of the caller's array.
    pub fn set_at(self, index: usize, value: T) -> Res {
        if self.0.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        // SAFETY: an `Out` is only ever made by a C caller, who promises that what it points to can
        // be written, as the driver's interface demands; null was refused above.
        unsafe { self.0.add(index).write_unaligned(value) };
        Ok(())
    }

    /// Stores the value unless the pointer is null.
    pub fn set_opt(self, value: T) {
        if !self.0.is_null() {
            let _ = self.set(value);
        }
    }

    /// Wraps an address that the caller gave in an array.
    pub fn at(address: usize) -> Out<T> {
        Out(address as *mut T)
    }
}

/// An in pointer of the caller.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The pointer that a caller passed as an integer.
    pub fn at(address: usize) -> In<T> {
        In(address as *const T)
    }

    /// Reads the value; a null pointer is the caller's error.
    pub fn get(self) -> Res<T> {
        self.get_at(0)
    }

    /// Reads one element of the caller's array.
    pub fn get_at(self, index: usize) -> Res<T> {
        if self.0.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        // SAFETY: an `In` is only ever made by a C caller, who promises that it points to that many
        // elements, as the driver's interface demands; null was refused above.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemLocation {
    pub kind: i32,
    pub id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemAllocationProp {
    pub kind: i32,
    pub handle_types: i32,
    pub location: MemLocation,
    pub win32_meta: usize,
    pub compression: u8,
    pub gpu_direct_rdma_capable: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemAccessDesc {
    pub location: MemLocation,
    pub flags: i32,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Memcpy2D {
    pub src: Memcpy2DSide,
    pub dst: Memcpy2DSide,
    pub width: usize,
    pub height: usize,
}

/// One side of [`Memcpy2D`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Memcpy2DSide {
    pub x: usize,
    pub y: usize,
    pub memory_type: u32,
    pub host: usize,
    pub device: u64,
    pub array: usize,
    pub pitch: usize,
}

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcMemHandle {
    pub bytes: [u8; 64],
}

const _: () = assert!(size_of::<MemAllocationProp>() == 32);
const _: () = assert!(size_of::<MemAccessDesc>() == 12);
const _: () = assert!(size_of::<IpcMemHandle>() == 64);
const _: () = assert!(size_of::<Memcpy2D>() == 128);

/// `CU_MEMORYTYPE_UNIFIED`.
pub const MEMORY_TYPE_UNIFIED: u32 = 4;
pub const MEM_LOCATION_DEVICE: i32 = 1;
pub const MEM_ALLOCATION_PINNED: i32 = 1;
pub const HANDLE_TYPE_POSIX_FD: i32 = 1;
pub const ACCESS_READ: i32 = 1;
pub const ACCESS_READ_WRITE: i32 = 3;
pub const IPC_LAZY_ENABLE_PEER: u32 = 1;
/// `CU_DEVICE_INVALID`: the ordinal of a device that this process does not see.
pub const DEVICE_INVALID: i32 = -2;
/// The size that physical memory is handed out in.
pub const GRANULARITY: usize = 2 << 20;
