//! The control interface as C functions, for whoever finds the library by `dlsym`.

use crate::driver::{driver, progress_enter, progress_leave};
use std::ffi::{c_char, CStr};
use std::panic::catch_unwind;

/// The thread enters work that NCCL's proxy waits for; calls nest.
#[no_mangle]
pub extern "C" fn vccl_double_progress_enter() {
    progress_enter();
}

/// The thread leaves what it entered last.
#[no_mangle]
pub extern "C" fn vccl_double_progress_leave() {
    progress_leave();
}

/// Writes the violations, one a line, as far as they fit, and a NUL; returns how many there are.
///
/// # Safety
/// `buf` points to `len` bytes that can be written, or is null.
#[no_mangle]
pub unsafe extern "C" fn vccl_double_violations(buf: *mut c_char, len: usize) -> i32 {
    catch_unwind(|| {
        let all = driver().violations();
        if !buf.is_null() && len > 0 {
            let text = all.join("\n");
            let fits = text.len().min(len - 1);
            // SAFETY: the caller gives `len` bytes, of which `fits` and the NUL are written.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast(), fits);
                *buf.add(fits) = 0;
            }
        }
        i32::try_from(all.len()).unwrap_or(i32::MAX)
    })
    .unwrap_or(-1)
}

/// Forgets violations, counts and errors, takes the environment's settings, lets go what hangs.
#[no_mangle]
pub extern "C" fn vccl_double_reset() {
    let _ = catch_unwind(|| driver().reset());
}

/// Changes a setting; 0, or -1 for a key or a value that there is not.
///
/// # Safety
/// Both are texts that end in NUL.
#[no_mangle]
pub unsafe extern "C" fn vccl_double_set(key: *const c_char, value: *const c_char) -> i32 {
    if key.is_null() || value.is_null() {
        return -1;
    }
    // SAFETY: the caller's promise.
    let (key, value) = unsafe { (CStr::from_ptr(key), CStr::from_ptr(value)) };
    let (Ok(key), Ok(value)) = (key.to_str(), value.to_str()) else {
        return -1;
    };
    match catch_unwind(|| driver().set(key, value)) {
        Ok(Ok(())) => 0,
        Ok(Err(why)) => {
            eprintln!("cuda_double: {key}: {why}");
            -1
        }
        Err(_) => -1,
    }
}

/// A count by name: an entry point's calls, or one of the double's own. 0 for what there is not.
///
/// # Safety
/// The name is a text that ends in NUL.
#[no_mangle]
pub unsafe extern "C" fn vccl_double_counter(name: *const c_char) -> u64 {
    if name.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise.
    let Ok(name) = unsafe { CStr::from_ptr(name) }.to_str() else {
        return 0;
    };
    catch_unwind(|| driver().counter(name)).unwrap_or(0)
}
