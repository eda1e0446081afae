//! One implementation of [`Table`] for each ABI version: the differences between the versions live
//! here and nowhere else.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::Arc;

use libloading::os::unix::Library;
use vccl::abi::types::{DeviceHandle, ProfilerFn, TRAFFIC_CLASS_UNDEF};
use vccl::abi::{v10, v11, v12, v6, v7, v8, v9};

use super::Properties;
use crate::logs;

/// What a call returns whose function is NULL in the table.
pub const MISSING: c_int = -1;

/// A plugin's table of functions, with the newest version's arguments.
///
/// # Safety
///
/// The unsafe functions pass their pointers on as they are; the caller vouches for them as NCCL
/// would.
#[allow(clippy::missing_safety_doc)]
pub trait Table: Send + Sync {
    fn abi(&self) -> u32;
    fn name(&self) -> *const c_char;
    unsafe fn init(&self, ctx: *mut *mut c_void) -> c_int;
    unsafe fn devices(&self, n: *mut c_int) -> c_int;
    /// The result code, and the properties or the field that was not written.
    fn properties(&self, dev: c_int) -> (c_int, Result<Properties, &'static str>);
    unsafe fn listen(
        &self,
        ctx: *mut c_void,
        dev: c_int,
        handle: *mut c_void,
        comm: *mut *mut c_void,
    ) -> c_int;
    unsafe fn connect(
        &self,
        ctx: *mut c_void,
        dev: c_int,
        handle: *mut c_void,
        comm: *mut *mut c_void,
    ) -> c_int;
    unsafe fn accept(&self, listener: *mut c_void, comm: *mut *mut c_void) -> c_int;
    unsafe fn reg_mr(
        &self,
        comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
        mhandle: *mut *mut c_void,
    ) -> c_int;
    unsafe fn dereg_mr(&self, comm: *mut c_void, mhandle: *mut c_void) -> c_int;
    unsafe fn isend(
        &self,
        comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        tag: c_int,
        mhandle: *mut c_void,
        request: *mut *mut c_void,
    ) -> c_int;
    unsafe fn irecv(
        &self,
        comm: *mut c_void,
        data: &mut [*mut c_void],
        sizes: &mut [usize],
        tags: &mut [c_int],
        mhandles: &mut [*mut c_void],
        request: *mut *mut c_void,
    ) -> c_int;
    unsafe fn iflush(
        &self,
        comm: *mut c_void,
        data: &mut [*mut c_void],
        sizes: &mut [c_int],
        mhandles: &mut [*mut c_void],
        request: *mut *mut c_void,
    ) -> c_int;
    unsafe fn test(&self, request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> c_int;
    unsafe fn close_send(&self, comm: *mut c_void) -> c_int;
    unsafe fn close_recv(&self, comm: *mut c_void) -> c_int;
    unsafe fn close_listen(&self, comm: *mut c_void) -> c_int;
    /// Joins devices into a virtual one: the result code and its number.
    fn join(&self, devices: &[c_int]) -> (c_int, c_int);
    unsafe fn finalize(&self, ctx: *mut c_void) -> c_int;
}

/// Calls an optional function of the table.
macro_rules! call {
    ($function:expr $(, $arg:expr)* $(,)?) => {
        match $function {
            // SAFETY: the caller of the trait's function vouches for the arguments, and the table
            // for the function's type.
            Some(f) => unsafe { f($($arg),*) },
            None => MISSING,
        }
    };
}

/// Junk that NCCL's uninitialized stack could hold.
const JUNK: u8 = 0x5a;
const JUNK_INT: c_int = 0x5a5a_5a5a;
const JUNK_PTR: usize = 0x5a5a_5a5a_5a5a_5a5a;

fn written(field: &'static str, value: c_int) -> Result<c_int, &'static str> {
    if value == JUNK_INT {
        Err(field)
    } else {
        Ok(value)
    }
}

fn text(field: &'static str, p: *mut c_char) -> Result<Option<String>, &'static str> {
    if p as usize == JUNK_PTR {
        return Err(field);
    }
    if p.is_null() {
        return Ok(None);
    }
    // SAFETY: the plugin wrote the pointer, and the interface says that it is a C string that
    // lives as long as the plugin.
    Ok(Some(
        unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned(),
    ))
}

/// A profiler callback that records nothing.
unsafe extern "C" fn profiler(
    _event: *mut *mut c_void,
    _kind: c_int,
    _parent: *mut c_void,
    _plugin_id: i64,
    _ext_data: *mut c_void,
) -> c_int {
    0
}

/// A place for device offload handles; NCCL passes a NULL handle to a plugin that runs on the host.
fn no_device_handle() -> *mut DeviceHandle {
    std::ptr::null_mut()
}

macro_rules! version {
    (
        $name:ident, $v:ident, $number:literal, reg: $reg:ty, size: $size:ty,
        init: |$it:ident, $ictx:ident| $init:expr,
        more: |$p:ident, $out:ident| $more:block,
        listen: |$lt:ident, $lctx:ident, $ldev:ident, $lh:ident, $lc:ident| $listen:expr,
        connect: |$ct:ident, $cctx:ident, $cdev:ident, $ch:ident, $cc:ident| $connect:expr,
        accept: |$at:ident, $al:ident, $ac:ident| $accept:expr,
        handles: [$($phandle:expr)?], [$($phandles:expr)?],
        finalize: |$ft:ident, $fctx:ident| $finalize:expr,
        join: |$jt:ident, $jdevices:ident| $join:expr,
    ) => {
        struct $name {
            table: *const $v::Net,
            _library: Arc<Library>,
        }

        // SAFETY: the table is constant data of the library, which `_library` keeps loaded.
        unsafe impl Send for $name {}
        // SAFETY: as for Send; NCCL itself calls one table from several threads.
        unsafe impl Sync for $name {}

        impl $name {
            fn t(&self) -> &$v::Net {
                // SAFETY: the pointer is the address of the library's symbol of this very type.
                unsafe { &*self.table }
            }
        }

        impl Table for $name {
            fn abi(&self) -> u32 {
                $number
            }
            fn name(&self) -> *const c_char {
                self.t().name
            }
            unsafe fn init(&self, $ictx: *mut *mut c_void) -> c_int {
                let $it = self.t();
                $init
            }
            unsafe fn devices(&self, n: *mut c_int) -> c_int {
                call!(self.t().devices, n)
            }
            fn properties(&self, dev: c_int) -> (c_int, Result<Properties, &'static str>) {
                let mut junk = std::mem::MaybeUninit::<$v::Properties>::uninit();
                // SAFETY: the struct has only integers, floats and pointers, for which any bytes
                // are a value.
                let mut $p = unsafe {
                    junk.as_mut_ptr().cast::<u8>().write_bytes(JUNK, size_of::<$v::Properties>());
                    junk.assume_init()
                };
                let rc = call!(self.t().get_properties, dev, &mut $p);
                let read = || -> Result<Properties, &'static str> {
                    #[allow(unused_mut)]
                    let mut $out = Properties {
                        name: text("name", $p.name)?.unwrap_or_default(),
                        pci_path: text("pciPath", $p.pci_path)?,
                        guid: $p.guid,
                        ptr_support: written("ptrSupport", $p.ptr_support)?,
                        speed: written("speed", $p.speed)?,
                        port: written("port", $p.port)?,
                        latency: $p.latency,
                        max_comms: written("maxComms", $p.max_comms)?,
                        max_recvs: written("maxRecvs", $p.max_recvs)?,
                        device_type: None,
                        reg_is_global: None,
                        force_flush: None,
                        max_p2p_bytes: None,
                        max_coll_bytes: None,
                        v_devices: None,
                        max_multi_request: None,
                    };
                    $more
                    Ok($out)
                };
                (rc, if rc == 0 { read() } else { Err("everything") })
            }
            unsafe fn listen(
                &self,
                $lctx: *mut c_void,
                $ldev: c_int,
                $lh: *mut c_void,
                $lc: *mut *mut c_void,
            ) -> c_int {
                let $lt = self.t();
                $listen
            }
            unsafe fn connect(
                &self,
                $cctx: *mut c_void,
                $cdev: c_int,
                $ch: *mut c_void,
                $cc: *mut *mut c_void,
            ) -> c_int {
                let $ct = self.t();
                $connect
            }
            unsafe fn accept(&self, $al: *mut c_void, $ac: *mut *mut c_void) -> c_int {
                let $at = self.t();
                $accept
            }
            unsafe fn reg_mr(
                &self,
                comm: *mut c_void,
                data: *mut c_void,
                size: usize,
                kind: c_int,
                mhandle: *mut *mut c_void,
            ) -> c_int {
                call!(self.t().reg_mr, comm, data, size as $reg, kind, mhandle)
            }
            unsafe fn dereg_mr(&self, comm: *mut c_void, mhandle: *mut c_void) -> c_int {
                call!(self.t().dereg_mr, comm, mhandle)
            }
            unsafe fn isend(
                &self,
                comm: *mut c_void,
                data: *mut c_void,
                size: usize,
                tag: c_int,
                mhandle: *mut c_void,
                request: *mut *mut c_void,
            ) -> c_int {
                call!(
                    self.t().isend,
                    comm, data, size as $size, tag, mhandle, $($phandle,)? request
                )
            }
            unsafe fn irecv(
                &self,
                comm: *mut c_void,
                data: &mut [*mut c_void],
                sizes: &mut [usize],
                tags: &mut [c_int],
                mhandles: &mut [*mut c_void],
                request: *mut *mut c_void,
            ) -> c_int {
                let n = data.len();
                let mut own_sizes: Vec<$size> = sizes.iter().map(|s| *s as $size).collect();
                #[allow(unused_mut, unused_variables)]
                let mut no_phandles: Vec<*mut c_void> = vec![std::ptr::null_mut(); n];
                call!(
                    self.t().irecv,
                    comm,
                    n as c_int,
                    data.as_mut_ptr(),
                    own_sizes.as_mut_ptr(),
                    tags.as_mut_ptr(),
                    mhandles.as_mut_ptr(),
                    $({
                        let _unused: *mut c_void = $phandles;
                        no_phandles.as_mut_ptr()
                    },)?
                    request
                )
            }
            unsafe fn iflush(
                &self,
                comm: *mut c_void,
                data: &mut [*mut c_void],
                sizes: &mut [c_int],
                mhandles: &mut [*mut c_void],
                request: *mut *mut c_void,
            ) -> c_int {
                call!(
                    self.t().iflush,
                    comm,
                    data.len() as c_int,
                    data.as_mut_ptr(),
                    sizes.as_mut_ptr(),
                    mhandles.as_mut_ptr(),
                    request
                )
            }
            unsafe fn test(
                &self,
                request: *mut c_void,
                done: *mut c_int,
                sizes: *mut c_int,
            ) -> c_int {
                call!(self.t().test, request, done, sizes)
            }
            unsafe fn close_send(&self, comm: *mut c_void) -> c_int {
                call!(self.t().close_send, comm)
            }
            unsafe fn close_recv(&self, comm: *mut c_void) -> c_int {
                call!(self.t().close_recv, comm)
            }
            unsafe fn close_listen(&self, comm: *mut c_void) -> c_int {
                call!(self.t().close_listen, comm)
            }
            unsafe fn finalize(&self, $fctx: *mut c_void) -> c_int {
                let $ft = self.t();
                $finalize
            }
            fn join(&self, $jdevices: &[c_int]) -> (c_int, c_int) {
                let $jt = self.t();
                $join
            }
        }
    };
}

version! {
    V6, v6, 6, reg: c_int, size: c_int,
    init: |t, _ctx| call!(t.init, Some(logs::logger())),
    more: |p, out| {},
    listen: |t, _ctx, dev, handle, comm| call!(t.listen, dev, handle, comm),
    connect: |t, _ctx, dev, handle, comm| call!(t.connect, dev, handle, comm),
    accept: |t, listener, comm| call!(t.accept, listener, comm),
    handles: [], [],
    finalize: |_t, _ctx| 0,
    join: |_t, _devices| (MISSING, -1),
}

version! {
    V7, v7, 7, reg: c_int, size: c_int,
    init: |t, _ctx| call!(t.init, Some(logs::logger())),
    more: |p, out| {
        out.device_type = Some(written("netDeviceType", p.net_device_type)?);
    },
    listen: |t, _ctx, dev, handle, comm| call!(t.listen, dev, handle, comm),
    connect: |t, _ctx, dev, handle, comm| {
        call!(t.connect, dev, handle, comm, &mut no_device_handle())
    },
    accept: |t, listener, comm| call!(t.accept, listener, comm, &mut no_device_handle()),
    handles: [], [],
    finalize: |_t, _ctx| 0,
    join: |_t, _devices| (MISSING, -1),
}

version! {
    V8, v8, 8, reg: usize, size: c_int,
    init: |t, _ctx| call!(t.init, Some(logs::logger())),
    more: |p, out| {
        out.device_type = Some(written("netDeviceType", p.net_device_type)?);
        out.reg_is_global = Some(written("regIsGlobal", p.reg_is_global)?);
    },
    listen: |t, _ctx, dev, handle, comm| call!(t.listen, dev, handle, comm),
    connect: |t, _ctx, dev, handle, comm| {
        call!(t.connect, dev, handle, comm, &mut no_device_handle())
    },
    accept: |t, listener, comm| call!(t.accept, listener, comm, &mut no_device_handle()),
    handles: [], [],
    finalize: |_t, _ctx| 0,
    join: |_t, _devices| (MISSING, -1),
}

/// The function that version 9 added.
macro_rules! join {
    ($t:ident, $v:ident, $devices:ident) => {{
        let mut props = $v::VDeviceProps {
            ndevs: $devices.len() as c_int,
            devs: Default::default(),
        };
        for (to, d) in props.devs.iter_mut().zip($devices) {
            *to = *d;
        }
        let mut dev = -1;
        (call!($t.make_v_device, &mut dev, &mut props), dev)
    }};
}

/// The properties that version 9 added.
macro_rules! more9 {
    ($p:ident, $out:ident) => {
        $out.device_type = Some(written("netDeviceType", $p.net_device_type)?);
        $out.reg_is_global = Some(written("regIsGlobal", $p.reg_is_global)?);
        $out.force_flush = Some(written("forceFlush", $p.force_flush)?);
        if $p.max_p2p_bytes == JUNK_PTR {
            return Err("maxP2pBytes");
        }
        if $p.max_coll_bytes == JUNK_PTR {
            return Err("maxCollBytes");
        }
        $out.max_p2p_bytes = Some($p.max_p2p_bytes);
        $out.max_coll_bytes = Some($p.max_coll_bytes);
        $out.v_devices = Some((
            written("vProps", $p.v_props.ndevs)?,
            $p.v_props.devs.to_vec(),
        ));
    };
}

version! {
    V9, v9, 9, reg: usize, size: usize,
    init: |t, _ctx| call!(t.init, Some(logs::logger())),
    more: |p, out| { more9!(p, out); },
    listen: |t, _ctx, dev, handle, comm| call!(t.listen, dev, handle, comm),
    connect: |t, _ctx, dev, handle, comm| {
        call!(t.connect, dev, handle, comm, &mut no_device_handle())
    },
    accept: |t, listener, comm| call!(t.accept, listener, comm, &mut no_device_handle()),
    handles: [], [],
    finalize: |_t, _ctx| 0,
    join: |t, devices| join!(t, v9, devices),
}

version! {
    V10, v10, 10, reg: usize, size: usize,
    init: |t, _ctx| call!(t.init, Some(logs::logger()), Some(profiler as ProfilerFn)),
    more: |p, out| { more9!(p, out); },
    listen: |t, _ctx, dev, handle, comm| call!(t.listen, dev, handle, comm),
    connect: |t, _ctx, dev, handle, comm| {
        let mut config = v10::CommConfig { traffic_class: TRAFFIC_CLASS_UNDEF };
        call!(t.connect, dev, &mut config, handle, comm, &mut no_device_handle())
    },
    accept: |t, listener, comm| call!(t.accept, listener, comm, &mut no_device_handle()),
    handles: [std::ptr::null_mut()], [std::ptr::null_mut()],
    finalize: |_t, _ctx| 0,
    join: |t, devices| join!(t, v10, devices),
}

version! {
    V11, v11, 11, reg: usize, size: usize,
    init: |t, ctx| {
        let mut config = v11::CommConfig { traffic_class: TRAFFIC_CLASS_UNDEF };
        call!(
            t.init, ctx, comm_id(), &mut config,
            Some(logs::logger()), Some(profiler as ProfilerFn)
        )
    },
    more: |p, out| {
        more9!(p, out);
        out.max_multi_request = Some(written("maxMultiRequestSize", p.max_multi_request_size)?);
    },
    listen: |t, ctx, dev, handle, comm| call!(t.listen, ctx, dev, handle, comm),
    connect: |t, ctx, dev, handle, comm| {
        call!(t.connect, ctx, dev, handle, comm, &mut no_device_handle())
    },
    accept: |t, listener, comm| call!(t.accept, listener, comm, &mut no_device_handle()),
    handles: [std::ptr::null_mut()], [std::ptr::null_mut()],
    finalize: |t, ctx| call!(t.finalize, ctx),
    join: |t, devices| join!(t, v11, devices),
}

version! {
    V12, v12, 12, reg: usize, size: usize,
    init: |t, ctx| {
        let mut config = v12::CommConfig { traffic_class: TRAFFIC_CLASS_UNDEF };
        call!(
            t.init, ctx, comm_id(), &mut config,
            Some(logs::logger()), Some(profiler as ProfilerFn)
        )
    },
    more: |p, out| {
        more9!(p, out);
        out.max_multi_request = Some(written("maxMultiRequestSize", p.max_multi_request_size)?);
    },
    listen: |t, ctx, dev, handle, comm| call!(t.listen, ctx, dev, handle, comm),
    connect: |t, ctx, dev, handle, comm| {
        call!(t.connect, ctx, dev, handle, comm, &mut no_device_handle())
    },
    accept: |t, listener, comm| call!(t.accept, listener, comm, &mut no_device_handle()),
    handles: [std::ptr::null_mut()], [std::ptr::null_mut()],
    finalize: |t, ctx| call!(t.finalize, ctx),
    join: |t, devices| join!(t, v12, devices),
}

/// NCCL passes a hash that is the same in all ranks of a communicator.
fn comm_id() -> u64 {
    0x7663_636c
}

/// Whether the library exports the table of version `v`.
pub fn has(library: &Library, v: u32) -> bool {
    symbol::<c_void>(library, v).is_some()
}

fn symbol<T>(library: &Library, v: u32) -> Option<*const T> {
    let name = format!("ncclNetPlugin_v{v}\0");
    // SAFETY: the symbol is only taken as an address here.
    let symbol = unsafe { library.get::<*const T>(name.as_bytes()) }.ok()?;
    let address = symbol.into_raw() as *const T;
    (!address.is_null()).then_some(address)
}

/// The table of version `v`, if the library exports it.
pub fn find(library: &Arc<Library>, v: u32) -> Option<Arc<dyn Table>> {
    macro_rules! table {
        ($name:ident) => {
            Arc::new($name {
                table: symbol(library, v)?,
                _library: library.clone(),
            })
        };
    }
    Some(match v {
        6 => table!(V6),
        7 => table!(V7),
        8 => table!(V8),
        9 => table!(V9),
        10 => table!(V10),
        11 => table!(V11),
        12 => table!(V12),
        _ => return None,
    })
}
