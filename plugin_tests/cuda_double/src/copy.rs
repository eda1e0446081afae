//! Copies: what an address stands for, and how the bytes move.

use crate::abi::*;
use crate::context::{current_handle, Ctx};
use crate::driver::{bump, entry, Driver, Kind, State};
use crate::host::is_mapped;
use crate::phys::{Phys, Use};
use crate::space::Region;
use crate::stream::{self, Op, Stream};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

/// Bytes that lie together.
enum Place {
    Device(Arc<Phys>, usize),
    Host(usize),
    /// Taken from the caller's pageable memory when the copy was asked for.
    Taken(Vec<u8>),
}

struct Piece {
    place: Place,
    len: usize,
}

/// One end of a copy.
pub struct Side {
    pieces: Vec<Piece>,
    uses: Vec<Use>,
    /// The device that the memory belongs to, as numbered by the machine; none for host memory.
    device: Option<u32>,
    /// The memory is another device's and no peer access leads there.
    pub unreachable: bool,
    pageable: bool,
}

impl Side {
    fn of(place: Place, len: usize, device: Option<u32>) -> Side {
        Side {
            pieces: vec![Piece { place, len }],
            uses: Vec::new(),
            device,
            unreachable: false,
            pageable: false,
        }
    }

    /// The operation is as good as done. Called before the bytes of a small one are stored: whoever
    /// polls for them may free the memory as soon as they are there.
    pub fn release(&mut self) {
        self.uses.clear();
    }

    /// Host memory that went away must not be touched.
    fn check(&self) -> Res {
        if self.uses.iter().any(Use::is_dead) {
            Err(ERROR_ILLEGAL_ADDRESS)
        } else {
            Ok(())
        }
    }
}

impl State {
    /// Can a context read, or write, the region?
    pub fn reaches(&self, ctx: &Ctx, region: &Region, want: i32) -> bool {
        match region {
            Region::Host(_) => true,
            Region::Mapping(m) => m
                .access
                .get(&ctx.core.device)
                .is_some_and(|has| has & want == want),
            Region::Alloc(a) => {
                let home = self.contexts.get(&a.ctx).map(|c| c.core.device);
                home == Some(ctx.core.device) || ctx.peers.contains(&a.ctx)
            }
        }
    }
}

/// Which kinds of address a call takes.
#[derive(Clone, Copy, PartialEq)]
enum Takes {
    Any,
    Device,
    Host,
}

/// What a device address stands for, as seen by a stream. The whole range must lie in one
/// allocation, or in mappings that follow each other in one reservation.
pub fn resolve_device(state: &State, at: u64, len: u64, stream: &Stream, write: bool) -> Res<Side> {
    if !state.va.contains(at) {
        // A host address, which devices can use if registration gave no alias.
        let reg = state.registered(at).filter(|r| r.alias == r.host as u64);
        let reg = reg.ok_or(ERROR_INVALID_VALUE)?;
        return host_side(reg, at, len);
    }
    let end = at.checked_add(len).ok_or(ERROR_INVALID_VALUE)?;
    let ctx = state
        .contexts
        .get(&stream.ctx.handle)
        .ok_or(ERROR_INVALID_CONTEXT)?;
    let current = current_handle().and_then(|h| state.contexts.get(&h));
    let want = if write {
        ACCESS_READ_WRITE
    } else {
        ACCESS_READ
    };
    let mut side = Side {
        pieces: Vec::new(),
        uses: Vec::new(),
        device: None,
        unreachable: false,
        pageable: false,
    };
    let mut next = at;
    let mut reservation = None;
    while next < end {
        let (base, region) = state.regions.find(next).ok_or(ERROR_INVALID_VALUE)?;
        let skip = next - base;
        let here = (region.size() - skip).min(end - next);
        match region {
            Region::Host(reg) => return host_side(reg, reg.host as u64 + skip, len),
            Region::Alloc(a) => {
                if here < len {
                    return Err(ERROR_INVALID_VALUE);
                }
                side.unreachable = !state.reaches(ctx, region, want);
                side.uses.push(Use::new(&a.pending, Some(&a.phys)));
                let place = Place::Device(a.phys.clone(), (a.offset + skip) as usize);
                side.pieces.push(Piece {
                    place,
                    len: here as usize,
                });
                side.device = Some(a.phys.device);
            }
            Region::Mapping(m) => {
                if *reservation.get_or_insert(m.reservation) != m.reservation {
                    return Err(ERROR_INVALID_VALUE);
                }
                // The driver asks the calling thread's context, the engine the stream's.
                let fine = state.reaches(ctx, region, want)
                    && current.is_none_or(|c| state.reaches(c, region, want));
                if !fine {
                    return Err(ERROR_INVALID_VALUE);
                }
                side.uses.push(Use::new(&m.pending, Some(&m.phys)));
                let place = Place::Device(m.phys.clone(), skip as usize);
                side.pieces.push(Piece {
                    place,
                    len: here as usize,
                });
                side.device = Some(m.phys.device);
            }
        }
        next += here;
    }
    Ok(side)
}

fn host_side(reg: &Arc<crate::host::HostReg>, host: u64, len: u64) -> Res<Side> {
    let end = host.checked_add(len).ok_or(ERROR_INVALID_VALUE)?;
    if end > (reg.host + reg.size) as u64 {
        return Err(ERROR_INVALID_VALUE);
    }
    let mut side = Side::of(Place::Host(host as usize), len as usize, None);
    side.uses.push(Use::new(&reg.pending, None));
    Ok(side)
}

fn resolve(
    state: &State,
    at: u64,
    len: u64,
    takes: Takes,
    stream: &Stream,
    write: bool,
) -> Res<Side> {
    if state.va.contains(at) {
        if takes == Takes::Host {
            return Err(ERROR_INVALID_VALUE);
        }
        return resolve_device(state, at, len, stream, write);
    }
    if let Some(reg) = state.registered(at) {
        if takes == Takes::Device {
            return resolve_device(state, at, len, stream, write);
        }
        return host_side(reg, at, len);
    }
    if takes == Takes::Device || at == 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let mut side = Side::of(Place::Host(at as usize), len as usize, None);
    side.pageable = true;
    Ok(side)
}

/// Reads the caller's memory; an address that cannot be read is told, not fatal.
fn take(host: usize, len: usize) -> Res<Vec<u8>> {
    let mut bytes = vec![0u8; len];
    let local = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: len,
    };
    let remote = libc::iovec {
        iov_base: host as *mut libc::c_void,
        iov_len: len,
    };
    // SAFETY: the kernel writes at most `len` bytes into our vector, and checks the other address.
    let got = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    if got == len as isize {
        return Ok(bytes);
    }
    let no_call = matches!(
        std::io::Error::last_os_error().raw_os_error(),
        Some(libc::ENOSYS | libc::EPERM)
    );
    if got >= 0 || !no_call || !is_mapped(host, len) {
        return Err(ERROR_INVALID_VALUE);
    }
    // SAFETY: the pages are mapped, and the caller says that the range can be read.
    unsafe { std::ptr::copy_nonoverlapping(host as *const u8, bytes.as_mut_ptr(), len) };
    Ok(bytes)
}

fn move_bytes(dst: (&Place, usize), src: (&Place, usize), len: usize) -> Res {
    let done = match (dst, src) {
        ((Place::Device(to, o), d), (Place::Device(from, p), s)) => {
            let (from, to) = (from.shadow(p + s, len), to.shadow(o + d, len));
            // SAFETY: both ranges were checked against their mappings, which the pieces keep. They
            // may overlap. Others may write the bytes meanwhile, as with a device's memory.
            unsafe { std::ptr::copy(from, to, len) };
            true
        }
        ((Place::Device(to, o), d), (Place::Host(from), s)) => {
            to.write_from_host(o + d, from + s, len)
        }
        ((Place::Device(to, o), d), (Place::Taken(from), s)) => {
            to.write_from(o + d, &from[s..s + len])
        }
        ((Place::Host(to), d), (Place::Device(from, p), s)) => {
            from.read_to_host(p + s, to + d, len)
        }
        ((Place::Host(to), d), (Place::Host(from), s)) => {
            if !is_mapped(to + d, len) || !is_mapped(from + s, len) {
                return Err(ERROR_ILLEGAL_ADDRESS);
            }
            let (to, from) = ((to + d) as *mut u8, (from + s) as *const u8);
            // SAFETY: the pages are mapped, and the caller gave the ranges for this copy.
            unsafe { std::ptr::copy(from, to, len) };
            true
        }
        ((Place::Host(to), d), (Place::Taken(from), s)) => {
            if !is_mapped(to + d, len) {
                return Err(ERROR_ILLEGAL_ADDRESS);
            }
            let from = &from[s..s + len];
            // SAFETY: the pages are mapped, and the caller gave the range for this copy.
            unsafe { std::ptr::copy(from.as_ptr(), (to + d) as *mut u8, len) };
            true
        }
        ((Place::Taken(_), _), _) => false,
    };
    if done {
        Ok(())
    } else {
        Err(ERROR_ILLEGAL_ADDRESS)
    }
}

/// A copy of up to this many bytes may be a flag that somebody polls.
const FLAG_SIZE: usize = 64;

/// Moves the bytes.
pub fn run(dst: &mut Side, src: &mut Side, len: usize) -> Res {
    dst.check()?;
    src.check()?;
    if len <= FLAG_SIZE {
        dst.release();
        src.release();
    }
    let (mut d, mut s) = ((0, 0), (0, 0));
    let mut left = len;
    while left > 0 {
        let (to, from) = (&dst.pieces[d.0], &src.pieces[s.0]);
        let here = left.min(to.len - d.1).min(from.len - s.1);
        move_bytes((&to.place, d.1), (&from.place, s.1), here)?;
        left -= here;
        for (at, piece) in [(&mut d, to), (&mut s, from)] {
            at.1 += here;
            if at.1 == piece.len {
                *at = (at.0 + 1, 0);
            }
        }
    }
    Ok(())
}

/// Fills the bytes.
pub fn fill(dst: &mut Side, byte: u8, len: usize) -> Res {
    run(
        dst,
        &mut Side::of(Place::Taken(vec![byte; len]), len, None),
        len,
    )
}

/// Where the double reaches a value.
fn value_at(drv: &Driver, side: &Side, len: usize) -> Res<*mut u8> {
    side.check()?;
    match &side.pieces[0].place {
        Place::Device(phys, offset) => Ok(phys.shadow(*offset, len)),
        Place::Host(host) if is_mapped(*host, len) => Ok(*host as *mut u8),
        _ => {
            drv.violation("registered host memory was unmapped under a stream operation".into());
            Err(ERROR_ILLEGAL_ADDRESS)
        }
    }
}

/// Writes a value, after everything that the stream did before.
pub fn store(drv: &Driver, to: &mut Side, value: u64, wide: bool) -> Res {
    let at = value_at(drv, to, if wide { 8 } else { 4 })?;
    to.release();
    if wide {
        // SAFETY: the address is mapped and aligned to 8; all sides use atomics on it.
        unsafe { AtomicU64::from_ptr(at.cast()) }.store(value, Ordering::Release);
    } else {
        // SAFETY: the address is mapped and aligned to 4; all sides use atomics on it.
        unsafe { AtomicU32::from_ptr(at.cast()) }.store(value as u32, Ordering::Release);
    }
    Ok(())
}

/// Reads a value.
pub fn load(drv: &Driver, from: &Side, wide: bool) -> Res<u64> {
    let at = value_at(drv, from, if wide { 8 } else { 4 })?;
    Ok(if wide {
        // SAFETY: the address is mapped and aligned to 8; all sides use atomics on it.
        unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Acquire)
    } else {
        // SAFETY: the address is mapped and aligned to 4; all sides use atomics on it.
        u64::from(unsafe { AtomicU32::from_ptr(at.cast()) }.load(Ordering::Acquire))
    })
}

/// A copy as it was asked for.
struct Asked {
    name: &'static str,
    dst: (u64, Takes),
    src: (u64, Takes),
    len: usize,
    stream: u64,
    /// Return only when it is done.
    wait: bool,
    /// `cuMemcpyPeer`: peer access need not be enabled.
    peer: bool,
    /// One row; two of them, or more, go to a copy engine always.
    plain: bool,
}

/// A driver makes a kernel of a plain copy of up to this many bytes from host memory.
const KERNEL_SIZE: usize = 24 << 10;

fn submit(drv: &'static Driver, ask: Asked) -> Res {
    let mut state = drv.state()?;
    let stream = stream::find(drv, &mut state, ask.stream)?;
    if ask.len == 0 {
        return Ok(());
    }
    let len = ask.len as u64;
    let dst = resolve(&state, ask.dst.0, len, ask.dst.1, &stream, true)?;
    let mut src = resolve(&state, ask.src.0, len, ask.src.1, &stream, false)?;
    drop(state);
    let unreachable = (dst.unreachable || src.unreachable) && !ask.peer;
    // A driver stages such a copy through the host, unseen.
    if unreachable && drv.settings().peer_strict {
        return Err(ERROR_INVALID_VALUE);
    }
    let name = ask.name;
    match (dst.device, src.device) {
        (Some(a), Some(b)) if a == b => {
            bump(&drv.stats.local_copies);
            if !drv.settings().allow_local {
                drv.progress_violation(|| format!("{name} copies within device {a}"));
            }
        }
        (Some(a), Some(b)) if unreachable || !drv.settings().can_access(a, b) => {
            bump(&drv.stats.staged_peer_copies);
            drv.progress_violation(|| format!("{name} has no peer access and is staged"));
        }
        (Some(_), Some(_)) => bump(&drv.stats.peer_copies),
        (dst, _) => {
            bump(&drv.stats.host_copies);
            // Of one byte nobody can make two rows.
            if dst.is_some() && ask.plain && !src.pageable && (2..=KERNEL_SIZE).contains(&ask.len) {
                drv.progress_violation(|| {
                    format!(
                        "{name} of {} bytes from host memory runs as a kernel",
                        ask.len
                    )
                });
            }
        }
    }
    if dst.pageable || src.pageable {
        bump(&drv.stats.pageable_copies);
        drv.progress_violation(|| format!("{name}: pageable host copy"));
    }
    if src.pageable {
        let bytes = take(ask.src.0 as usize, ask.len)?;
        src.pieces = vec![Piece {
            place: Place::Taken(bytes),
            len: ask.len,
        }];
    }
    let wait = ask.wait || dst.pageable;
    stream.push(Op::Copy {
        dst,
        src,
        len: ask.len,
    });
    if wait {
        stream.wait();
        stream.ctx.check()?;
    }
    Ok(())
}

macro_rules! copies {
    ($($kind:expr, $name:ident($dst:ident, $src:ident, $len:ident $(, $stream:ident)?), $to:ident, $from:ident, $wait:literal;)*) => {
        $(entry!($kind, fn $name($dst: u64, $src: u64, $len: usize $(, $stream: u64)?) |drv| {
            submit(drv, Asked {
                name: stringify!($name),
                dst: ($dst, Takes::$to),
                src: ($src, Takes::$from),
                len: $len,
                stream: copies!(@stream $($stream)?),
                wait: $wait,
                peer: false,
                plain: true,
            })
        });)*
    };
    (@stream) => { 0 };
    (@stream $stream:ident) => { $stream };
}

const WAITS: Kind = Kind::Slow("waits for its copy");

copies! {
    Kind::Plain, cuMemcpyAsync(dst, src, len, stream), Any, Any, false;
    Kind::Plain, cuMemcpyDtoDAsync_v2(dst, src, len, stream), Device, Device, false;
    Kind::Plain, cuMemcpyHtoDAsync_v2(dst, src, len, stream), Device, Host, false;
    Kind::Plain, cuMemcpyDtoHAsync_v2(dst, src, len, stream), Host, Device, false;
    WAITS, cuMemcpy(dst, src, len), Any, Any, true;
    WAITS, cuMemcpyHtoD_v2(dst, src, len), Device, Host, true;
    WAITS, cuMemcpyDtoH_v2(dst, src, len), Host, Device, true;
    WAITS, cuMemcpyDtoD_v2(dst, src, len), Device, Device, true;
}

entry!(
    Kind::Plain,
    fn cuMemcpyPeerAsync(dst: u64, dst_ctx: u64, src: u64, src_ctx: u64, len: usize, stream: u64)
    |drv| peer_copy(drv, (dst, dst_ctx), (src, src_ctx), len, stream)
);

fn peer_copy(
    drv: &'static Driver,
    (dst, dst_ctx): (u64, u64),
    (src, src_ctx): (u64, u64),
    len: usize,
    stream: u64,
) -> Res {
    {
        let state = drv.state()?;
        if [dst_ctx, src_ctx]
            .iter()
            .any(|c| !state.contexts.contains_key(c))
        {
            return Err(ERROR_INVALID_CONTEXT);
        }
    }
    submit(
        drv,
        Asked {
            name: "cuMemcpyPeerAsync",
            dst: (dst, Takes::Device),
            src: (src, Takes::Device),
            len,
            stream,
            wait: false,
            peer: true,
            plain: true,
        },
    )
}

entry!(
    Kind::Plain,
    fn cuMemcpy2DAsync_v2(rows: *const Memcpy2D, stream: u64)
    |drv| copy_rows(drv, rows, stream)
);

/// Only between unified addresses, which is all that its users ask for.
fn copy_rows(drv: &'static Driver, rows: *const Memcpy2D, stream: u64) -> Res {
    // SAFETY: the caller gives a structure, or NULL.
    let rows = unsafe { rows.as_ref() }.ok_or(ERROR_INVALID_VALUE)?;
    let (dst, src) = (&rows.dst, &rows.src);
    let unified = |s: &Memcpy2DSide| s.memory_type == MEMORY_TYPE_UNIFIED && s.x == 0 && s.y == 0;
    if !unified(dst) || !unified(src) {
        return Err(ERROR_NOT_SUPPORTED);
    }
    if rows.height > 1 && (dst.pitch < rows.width || src.pitch < rows.width) {
        return Err(ERROR_INVALID_VALUE);
    }
    // Rows that follow each other on both sides are one range.
    let tight = dst.pitch == rows.width && src.pitch == rows.width;
    let (calls, len) = if tight {
        (1, rows.width * rows.height)
    } else {
        (rows.height, rows.width)
    };
    for row in 0..calls as u64 {
        submit(
            drv,
            Asked {
                name: "cuMemcpy2DAsync",
                dst: (dst.device + row * dst.pitch as u64, Takes::Any),
                src: (src.device + row * src.pitch as u64, Takes::Any),
                len,
                stream,
                wait: false,
                peer: false,
                plain: rows.height < 2,
            },
        )?;
    }
    Ok(())
}

fn set_bytes(drv: &'static Driver, at: u64, byte: u8, len: usize, stream: u64, wait: bool) -> Res {
    let mut state = drv.state()?;
    let stream = stream::find(drv, &mut state, stream)?;
    if len == 0 {
        return Ok(());
    }
    let dst = resolve(&state, at, len as u64, Takes::Device, &stream, true)?;
    drop(state);
    if dst.unreachable {
        return Err(ERROR_INVALID_VALUE);
    }
    bump(&drv.stats.memsets);
    drv.progress_violation(|| "a memset runs as a kernel".into());
    stream.push(Op::Fill { dst, byte, len });
    if wait {
        stream.wait();
        stream.ctx.check()?;
    }
    Ok(())
}

entry!(Kind::Slow("waits"), fn cuMemsetD8_v2(at: u64, byte: u8, len: usize) |drv| {
    set_bytes(drv, at, byte, len, 0, true)
});

entry!(Kind::Plain, fn cuMemsetD8Async(at: u64, byte: u8, len: usize, stream: u64) |drv| {
    set_bytes(drv, at, byte, len, stream, false)
});
