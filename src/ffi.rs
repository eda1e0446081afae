//! The boundary to C: nothing unwinds over it, no pointer passes it unchecked, and each failure
//! leaves one WARN line.

use std::{
    any::Any,
    cell::RefCell,
    ffi::{c_int, c_void},
    panic::{self, AssertUnwindSafe},
    ptr::NonNull,
    sync::Once,
};

use crate::{
    error::{Error, Result, ResultCode},
    log,
};

thread_local! {
    /// What the latest panic of this thread said, and where.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs the body of an entry point that NCCL called, and turns its outcome into an `ncclResult_t`.
/// A success costs nothing: no allocation, no lock, no thread-local.
#[inline]
pub fn guard(entry: &'static str, body: impl FnOnce() -> Result<()>) -> c_int {
    // A panic may leave what the body touched half done. It is reported as an internal error, after
    // which NCCL only aborts the communicator; locks poison themselves.
    match panic::catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ResultCode::SUCCESS.0,
        Ok(Err(error)) => failed(entry, &error),
        Err(payload) => panicked(entry, payload),
    }
}

#[cold]
#[inline(never)]
fn failed(entry: &str, error: &Error) -> c_int {
    if !error.is_known() {
        log::warn(&format!("{entry}: {}", error.text()));
    }
    error.code().0
}

#[cold]
#[inline(never)]
fn panicked(entry: &str, payload: Box<dyn Any + Send>) -> c_int {
    let text = PANIC.try_with(|text| text.take()).ok().flatten();
    let text = text.unwrap_or_else(|| said(&*payload).to_string());
    // The payload is somebody's value: dropping it may panic again, and that payload too. The second
    // one is leaked, which ends the chain.
    if let Err(again) = panic::catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(again);
        let _ = PANIC.try_with(|text| text.take());
    }
    failed(
        entry,
        &Error::internal(format!(
            "panic: {text}. This is a fault of vccl: please report it"
        )),
    )
}

/// The text of a panic, where it has one.
fn said(payload: &dyn Any) -> &str {
    if let Some(text) = payload.downcast_ref::<&str>() {
        text
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text
    } else {
        "of a value without a text"
    }
}

/// Lets [`guard`] tell where a panic happened. The hook before it still does what it always did, for
/// panics of vccl as for those of a program that vccl is linked into.
pub fn note_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let text = match info.location() {
                Some(place) => format!("{} at {place}", said(info.payload())),
                None => said(info.payload()).to_string(),
            };
            // A thread that is past its thread-locals is past every entry point.
            let _ = PANIC.try_with(|note| note.replace(Some(text)));
            before(info);
        }));
    });
}

/// A place for a result, in memory of the caller.
#[derive(Debug)]
pub struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// Stores `value`. What was there is overwritten, not dropped.
    #[inline]
    pub fn set(&self, value: T) {
        // SAFETY: whoever made this promised that the place can be written for as long as it exists.
        unsafe { self.0.write(value) };
    }
}

/// Checks a pointer to which a result goes.
///
/// # Safety
/// If `place` is not NULL and is aligned, a `T` can be written there while the `Out` exists.
#[inline]
pub unsafe fn out<T>(place: *mut T, argument: &str) -> Result<Out<T>> {
    match NonNull::new(place) {
        Some(place) if place.is_aligned() => Ok(Out(place)),
        _ => Err(bad_pointer(place.cast(), argument)),
    }
}

/// Reads an argument that comes by pointer, or the first element of one that is an array.
///
/// # Safety
/// If `place` is not NULL and is aligned, a `T` can be read there.
#[inline]
pub unsafe fn input<T: Copy>(place: *const T, argument: &str) -> Result<T> {
    if place.is_null() || !place.is_aligned() {
        return Err(bad_pointer(place.cast_mut().cast(), argument));
    }
    // SAFETY: not NULL and aligned; the rest is the caller's promise.
    Ok(unsafe { *place })
}

/// Checks that an address argument is there.
#[inline]
pub fn address(data: *mut c_void, argument: &str) -> Result<usize> {
    if data.is_null() {
        return Err(bad_pointer(data, argument));
    }
    Ok(data as usize)
}

#[cold]
fn bad_pointer(place: *mut c_void, argument: &str) -> Error {
    Error::invalid_argument(if place.is_null() {
        format!("{argument} is NULL")
    } else {
        format!("{argument} is the misaligned pointer {place:p}")
    })
}

/// A number of bytes as one of the interface's versions passes it.
pub trait Size: Copy {
    /// As a size, if it can be one.
    fn bytes(self, argument: &str) -> Result<usize>;
}

impl Size for c_int {
    #[inline]
    fn bytes(self, argument: &str) -> Result<usize> {
        usize::try_from(self).map_err(|_| bad_size(argument, self.into()))
    }
}

impl Size for usize {
    #[inline]
    fn bytes(self, argument: &str) -> Result<usize> {
        // No object is larger than this: a negative number went through a cast.
        match isize::try_from(self) {
            Ok(_) => Ok(self),
            Err(_) => Err(bad_size(argument, self as i64)),
        }
    }
}

#[cold]
fn bad_size(argument: &str, size: i64) -> Error {
    Error::invalid_argument(format!("{argument} is negative: {size}"))
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;
    use crate::{abi::types::NCCL_LOG_WARN, log::tests::Capture};

    fn one_line(capture: &Capture) -> String {
        let mut lines = capture.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        let line = lines.remove(0);
        assert_eq!(line.level, NCCL_LOG_WARN);
        line.text
    }

    #[test]
    fn success_is_silent() {
        let capture = Capture::new();
        assert_eq!(guard("isend", || Ok(())), 0);
        assert_eq!(capture.lines(), []);
    }

    #[test]
    fn an_error_is_one_line() {
        let capture = Capture::new();
        assert_eq!(
            guard("isend", || Err(Error::remote("peer 100% gone"))),
            ResultCode::REMOTE.0
        );
        assert_eq!(one_line(&capture), "vccl: isend: peer 100% gone");
    }

    #[test]
    fn a_panic_is_an_internal_error_with_its_place() {
        let capture = Capture::new();
        note_panics();
        assert_eq!(
            guard("test", || panic!("odd {}", 3)),
            ResultCode::INTERNAL.0
        );
        let text = one_line(&capture);
        assert!(
            text.starts_with("vccl: test: panic: odd 3 at src/ffi.rs:"),
            "{text}"
        );
        assert_eq!(guard("test", || panic!("again")), ResultCode::INTERNAL.0);
        assert!(one_line(&capture).contains("panic: again at "));
    }

    #[test]
    fn a_payload_that_panics_when_dropped_does_not_escape() {
        struct Bomb(u32);
        impl Drop for Bomb {
            fn drop(&mut self) {
                if self.0 > 0 {
                    panic::panic_any(Bomb(self.0 - 1));
                }
            }
        }
        let capture = Capture::new();
        assert_eq!(
            guard("test", || panic::panic_any(Bomb(1))),
            ResultCode::INTERNAL.0
        );
        assert!(one_line(&capture).contains("of a value without a text"));
        let code = guard("test", || panic::panic_any(Bomb(5)));
        assert_eq!(code, ResultCode::INTERNAL.0);
        one_line(&capture);
    }

    #[test]
    fn pointers_and_sizes() {
        let mut place = [0u64; 2];
        let at = place.as_mut_ptr();
        // SAFETY: NULL, or inside `place`.
        unsafe {
            assert_eq!(
                out::<u64>(ptr::null_mut(), "ndev").unwrap_err().text(),
                "ndev is NULL"
            );
            assert!(out(at.byte_add(2), "ndev")
                .unwrap_err()
                .text()
                .contains("misaligned"));
            out(at, "ndev").unwrap().set(9);
            assert_eq!(input(at, "x").unwrap(), 9);
            assert_eq!(
                input::<u64>(ptr::null(), "tags").unwrap_err().text(),
                "tags is NULL"
            );
        }
        assert_eq!(
            (-1).bytes("size").unwrap_err().text(),
            "size is negative: -1"
        );
        assert_eq!(
            usize::MAX.bytes("size").unwrap_err().text(),
            "size is negative: -1"
        );
        assert_eq!(c_int::MAX.bytes("size").unwrap(), 0x7fff_ffff);
        assert_eq!(0usize.bytes("size").unwrap(), 0);
    }
}
