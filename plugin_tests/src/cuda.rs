//! The few functions of the CUDA driver that the driver needs to have device memory and to look
//! into it, loaded at run time: the same code runs on a GPU and on the CUDA test double.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::sync::{Mutex, OnceLock};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Error, Result};
use crate::fail;
use crate::net::why;

/// A device address.
pub type DevicePtr = u64;

/// Where memory is, as the driver names it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`
#[repr(C)]
pub struct AllocationProp {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *mut c_void,
    compression: u8,
    gpu_direct_rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

const _: () = assert!(size_of::<AllocationProp>() == 32);

/// `CUmemAccessDesc`
#[repr(C)]
pub struct AccessDesc {
    location: Location,
    flags: c_int,
}

const _: () = assert!(size_of::<AccessDesc>() == 12);

const LOCATION_DEVICE: c_int = 1;
const ALLOCATION_PINNED: c_int = 1;
const HANDLE_POSIX_FD: c_int = 1;
const ACCESS_READ_WRITE: c_int = 3;
const CAPTURE_MODE_RELAXED: c_int = 2;

macro_rules! driver {
    ($($field:ident = $symbol:literal : fn($($arg:ty),* $(,)?);)*) => {
        struct Driver {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Driver {
            fn load(library: &Library) -> Result<Driver> {
                Ok(Driver {
                    $($field: {
                        // SAFETY: the driver's ABI gives this symbol this type.
                        let f = unsafe {
                            library.get::<unsafe extern "C" fn($($arg),*) -> c_int>(
                                concat!($symbol, "\0").as_bytes(),
                            )
                        };
                        *f.map_err(|e| Error::new(format!("libcuda.so.1: {}: {}", $symbol, why(&e))))?
                    },)*
                })
            }
        }
    };
}

driver! {
    init = "cuInit": fn(c_uint);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    primary_retain = "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int);
    ctx_set_current = "cuCtxSetCurrent": fn(*mut c_void);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode": fn(*mut c_int);
    error_name = "cuGetErrorName": fn(c_int, *mut *const c_char);
    mem_alloc = "cuMemAlloc_v2": fn(*mut DevicePtr, usize);
    mem_free = "cuMemFree_v2": fn(DevicePtr);
    host_alloc = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost": fn(*mut c_void);
    copy_to_device = "cuMemcpyHtoD_v2": fn(DevicePtr, *const c_void, usize);
    stream_synchronize = "cuStreamSynchronize": fn(*mut c_void);
    copy_to_host = "cuMemcpyDtoH_v2": fn(*mut c_void, DevicePtr, usize);
    granularity = "cuMemGetAllocationGranularity": fn(*mut usize, *const AllocationProp, c_int);
    mem_create = "cuMemCreate": fn(*mut u64, usize, *const AllocationProp, u64);
    mem_release = "cuMemRelease": fn(u64);
    address_reserve = "cuMemAddressReserve": fn(*mut DevicePtr, usize, usize, DevicePtr, u64);
    address_free = "cuMemAddressFree": fn(DevicePtr, usize);
    mem_map = "cuMemMap": fn(DevicePtr, usize, usize, u64, u64);
    mem_unmap = "cuMemUnmap": fn(DevicePtr, usize);
    set_access = "cuMemSetAccess": fn(DevicePtr, usize, *const AccessDesc, usize);
}

/// The marks by which the CUDA double knows NCCL's progress path.
#[derive(Clone, Copy)]
pub struct DoubleHooks {
    enter: unsafe extern "C" fn(),
    leave: unsafe extern "C" fn(),
    violations: unsafe extern "C" fn(*mut c_char, usize) -> c_int,
}

/// While it lives, its thread's capture mode is relaxed; it holds the mode before.
struct Relaxed<'a>(&'a Cuda, c_int);

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        self.0.exchange(self.1);
    }
}

/// While it lives, its thread is on the progress path.
pub struct OnPath(DoubleHooks);

impl DoubleHooks {
    /// Marks the calling thread as being on the progress path.
    pub fn enter(self) -> OnPath {
        // SAFETY: the double's function takes nothing and only marks the thread.
        unsafe { (self.enter)() };
        OnPath(self)
    }

    /// How many rules of the driver were broken so far, and which: each once, with its count.
    pub fn violations(self) -> (usize, String) {
        let mut text = vec![0u8; 256 * 1024];
        // SAFETY: the buffer has the length that is passed; the double terminates its text.
        let n = unsafe { (self.violations)(text.as_mut_ptr().cast(), text.len()) };
        let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
        let mut lines: Vec<(String, usize)> = Vec::new();
        for line in String::from_utf8_lossy(&text[..end]).lines() {
            match lines.iter_mut().find(|l| l.0 == line) {
                Some(l) => l.1 += 1,
                None => lines.push((line.to_string(), 1)),
            }
        }
        let list: Vec<String> = lines
            .iter()
            .map(|(l, n)| format!("{l} ({n} times)"))
            .collect();
        (n.max(0) as usize, list.join("; "))
    }
}

impl Drop for OnPath {
    fn drop(&mut self) {
        // SAFETY: as for `enter`, on the same thread.
        unsafe { (self.0.leave)() };
    }
}

/// A loaded CUDA driver.
pub struct Cuda {
    driver: Driver,
    devices: usize,
    double: Option<DoubleHooks>,
    contexts: Mutex<HashMap<usize, usize>>,
    _library: Library,
}

/// Loads the CUDA driver once for the process; the error says why there is none.
pub fn get() -> Result<&'static Cuda> {
    static CUDA: OnceLock<Result<Cuda>> = OnceLock::new();
    CUDA.get_or_init(Cuda::load).as_ref().map_err(|e| e.clone())
}

/// How many GPUs there are; none without a driver.
pub fn device_count() -> usize {
    get().map_or(0, |c| c.devices)
}

impl Cuda {
    fn load() -> Result<Cuda> {
        // SAFETY: loading the driver runs its constructors, which every CUDA program does.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|e| Error::new(format!("no CUDA driver: {}", why(&e))))?;
        let driver = Driver::load(&library)?;
        // SAFETY: 0 is the only value that the interface allows.
        let rc = unsafe { (driver.init)(0) };
        if rc != 0 {
            fail!("the CUDA driver is there but cuInit failed with {rc}: no usable GPU");
        }
        let mut n: c_int = 0;
        // SAFETY: `n` is a place for an int.
        let rc = unsafe { (driver.device_count)(&mut n) };
        if rc != 0 {
            fail!("cuDeviceGetCount failed with {rc}");
        }
        let double = find_double(&library);
        Ok(Cuda {
            driver,
            devices: n.max(0) as usize,
            double,
            contexts: Mutex::new(HashMap::new()),
            _library: library,
        })
    }

    /// The marks of the CUDA double, if this is it.
    pub fn double(&self) -> Option<DoubleHooks> {
        self.double
    }

    /// How many GPUs there are.
    pub fn devices(&self) -> usize {
        self.devices
    }

    fn check(&self, rc: c_int, call: &str) -> Result<()> {
        if rc == 0 {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: `name` is a place for a pointer to a constant string.
        let named = unsafe { (self.driver.error_name)(rc, &mut name) } == 0 && !name.is_null();
        if named {
            // SAFETY: the driver returned a constant C string.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
            fail!("{call} failed: {name}");
        }
        fail!("{call} failed with {rc}")
    }

    /// What the test does itself breaks off no capture, so that only the plugin's calls can.
    fn relaxed(&self) -> Relaxed<'_> {
        Relaxed(self, self.exchange(CAPTURE_MODE_RELAXED))
    }

    fn exchange(&self, mut mode: c_int) -> c_int {
        // SAFETY: `mode` lives through the call.
        unsafe { (self.driver.exchange_capture_mode)(&mut mode) };
        mode
    }

    fn device(&self, gpu: usize) -> Result<c_int> {
        let mut d: c_int = 0;
        self.check(
            // SAFETY: `d` is a place for a device.
            unsafe { (self.driver.device_get)(&mut d, gpu as c_int) },
            "cuDeviceGet",
        )?;
        Ok(d)
    }

    /// The GPU's name.
    pub fn device_name(&self, gpu: usize) -> Result<String> {
        let d = self.device(gpu)?;
        let mut name = [0u8; 256];
        // SAFETY: the buffer has the length that is passed.
        let rc = unsafe { (self.driver.device_name)(name.as_mut_ptr().cast(), 255, d) };
        self.check(rc, "cuDeviceGetName")?;
        let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    /// Makes the GPU's primary context current in the calling thread.
    pub fn bind(&self, gpu: usize) -> Result<()> {
        let _relaxed = self.relaxed();
        let mut contexts = self.contexts.lock().unwrap_or_else(|e| e.into_inner());
        let ctx = match contexts.get(&gpu) {
            Some(c) => *c,
            None => {
                let d = self.device(gpu)?;
                let mut ctx: *mut c_void = std::ptr::null_mut();
                // SAFETY: `ctx` is a place for a context.
                let rc = unsafe { (self.driver.primary_retain)(&mut ctx, d) };
                self.check(rc, "cuDevicePrimaryCtxRetain")?;
                contexts.insert(gpu, ctx as usize);
                ctx as usize
            }
        };
        // SAFETY: the context was retained and is never released.
        let rc = unsafe { (self.driver.ctx_set_current)(ctx as *mut c_void) };
        self.check(rc, "cuCtxSetCurrent")
    }

    /// `cuMemAlloc`, on the GPU whose context is current.
    pub fn alloc(&self, len: usize) -> Result<DevicePtr> {
        let _relaxed = self.relaxed();
        let mut p: DevicePtr = 0;
        self.check(
            // SAFETY: `p` is a place for an address.
            unsafe { (self.driver.mem_alloc)(&mut p, len) },
            "cuMemAlloc",
        )?;
        Ok(p)
    }

    /// `cuMemFree`
    pub fn free(&self, p: DevicePtr) -> Result<()> {
        let _relaxed = self.relaxed();
        // SAFETY: the caller got the address from `alloc` and uses it no more.
        self.check(unsafe { (self.driver.mem_free)(p) }, "cuMemFree")
    }

    /// `cuMemHostAlloc`, for all contexts.
    pub fn alloc_host(&self, len: usize) -> Result<usize> {
        const PORTABLE: c_uint = 1;
        let _relaxed = self.relaxed();
        let mut p = std::ptr::null_mut();
        self.check(
            // SAFETY: `p` is a place for an address.
            unsafe { (self.driver.host_alloc)(&mut p, len, PORTABLE) },
            "cuMemHostAlloc",
        )?;
        Ok(p as usize)
    }

    /// `cuMemFreeHost`
    pub fn free_host(&self, p: usize) -> Result<()> {
        let _relaxed = self.relaxed();
        // SAFETY: the caller got the address from `alloc_host` and uses it no more.
        self.check(
            unsafe { (self.driver.host_free)(p as *mut c_void) },
            "cuMemFreeHost",
        )
    }

    /// Copies host bytes to the device and waits.
    pub fn write(&self, to: DevicePtr, from: &[u8]) -> Result<()> {
        let _relaxed = self.relaxed();
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: `from` is readable for its length; a wrong device address is an error.
        let rc = unsafe { (self.driver.copy_to_device)(to, from.as_ptr().cast(), from.len()) };
        self.check(rc, "cuMemcpyHtoD")?;
        // From memory that is not page-locked the call returns once the bytes are on their way.
        // SAFETY: NULL names the default stream, in which the copy is.
        let rc = unsafe { (self.driver.stream_synchronize)(std::ptr::null_mut()) };
        self.check(rc, "cuStreamSynchronize")
    }

    /// Copies device bytes to the host and waits.
    pub fn read(&self, from: DevicePtr, to: &mut [u8]) -> Result<()> {
        let _relaxed = self.relaxed();
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: `to` is writable for its length; a wrong device address is an error.
        let rc = unsafe { (self.driver.copy_to_host)(to.as_mut_ptr().cast(), from, to.len()) };
        self.check(rc, "cuMemcpyDtoH")
    }

    fn prop(&self, gpu: usize, exportable: bool) -> AllocationProp {
        AllocationProp {
            kind: ALLOCATION_PINNED,
            handle_types: if exportable { HANDLE_POSIX_FD } else { 0 },
            location: Location {
                kind: LOCATION_DEVICE,
                id: gpu as c_int,
            },
            win32: std::ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// Creates, maps and opens an allocation of at least `len` bytes, at `hint` if it is not 0 and
    /// free.
    pub fn vmm_alloc(&self, gpu: usize, len: usize, exportable: bool, hint: u64) -> Result<Vmm> {
        let _relaxed = self.relaxed();
        let prop = self.prop(gpu, exportable);
        let mut grain = 0usize;
        // SAFETY: both pointers are valid for the call; 0 asks for the minimum.
        let rc = unsafe { (self.driver.granularity)(&mut grain, &prop, 0) };
        self.check(rc, "cuMemGetAllocationGranularity")?;
        let len = len.max(1).next_multiple_of(grain.max(1));
        let mut handle = 0u64;
        // SAFETY: both pointers are valid for the call.
        let rc = unsafe { (self.driver.mem_create)(&mut handle, len, &prop, 0) };
        self.check(rc, "cuMemCreate")?;
        let mut address: DevicePtr = 0;
        // SAFETY: `address` is a place for an address.
        let rc = unsafe { (self.driver.address_reserve)(&mut address, len, 0, hint, 0) };
        self.check(rc, "cuMemAddressReserve")?;
        // SAFETY: the range was just reserved, and the handle just created with this length.
        let rc = unsafe { (self.driver.mem_map)(address, len, 0, handle, 0) };
        self.check(rc, "cuMemMap")?;
        let access = AccessDesc {
            location: Location {
                kind: LOCATION_DEVICE,
                id: gpu as c_int,
            },
            flags: ACCESS_READ_WRITE,
        };
        // SAFETY: the range is mapped; one descriptor is passed.
        let rc = unsafe { (self.driver.set_access)(address, len, &access, 1) };
        self.check(rc, "cuMemSetAccess")?;
        Ok(Vmm {
            address,
            len,
            handle,
        })
    }

    /// Unmaps and releases an allocation.
    pub fn vmm_free(&self, v: Vmm) -> Result<()> {
        let _relaxed = self.relaxed();
        self.check(
            // SAFETY: the range was mapped by `vmm_alloc`, and the caller uses it no more.
            unsafe { (self.driver.mem_unmap)(v.address, v.len) },
            "cuMemUnmap",
        )?;
        self.check(
            // SAFETY: as above; nothing is mapped in the range now.
            unsafe { (self.driver.address_free)(v.address, v.len) },
            "cuMemAddressFree",
        )?;
        self.check(
            // SAFETY: the handle came from `cuMemCreate`.
            unsafe { (self.driver.mem_release)(v.handle) },
            "cuMemRelease",
        )
    }
}

/// An allocation of the driver's virtual memory management.
#[derive(Clone, Copy, Debug)]
pub struct Vmm {
    /// Where it is mapped.
    pub address: DevicePtr,
    /// Its length, a multiple of the driver's granularity.
    pub len: usize,
    handle: u64,
}

fn find_double(library: &Library) -> Option<DoubleHooks> {
    // SAFETY: only the double has symbols of these names, and these are their types.
    unsafe {
        Some(DoubleHooks {
            enter: *library.get(b"vccl_double_progress_enter\0").ok()?,
            leave: *library.get(b"vccl_double_progress_leave\0").ok()?,
            violations: *library.get(b"vccl_double_violations\0").ok()?,
        })
    }
}
