//! The control interface as a test uses it.
//!
//! A test binary that links this crate does not thereby run on the double: the double that counts is
//! the `libcuda.so.1` that the plugin loaded. [`Control::find`] looks for it among the libraries that
//! the process has loaded.

use std::ffi::{c_char, c_void, CStr, CString};
use std::marker::PhantomData;
use std::path::Path;

/// The loaded double.
#[derive(Clone, Copy)]
pub struct Control {
    enter: extern "C" fn(),
    leave: extern "C" fn(),
    violations: unsafe extern "C" fn(*mut c_char, usize) -> i32,
    reset: extern "C" fn(),
    set: unsafe extern "C" fn(*const c_char, *const c_char) -> i32,
    counter: unsafe extern "C" fn(*const c_char) -> u64,
}

/// The thread is on a progress path as long as this lives.
pub struct Progress {
    leave: extern "C" fn(),
    /// The mark is the thread's own.
    _thread: PhantomData<*const ()>,
}

impl Drop for Progress {
    fn drop(&mut self) {
        (self.leave)();
    }
}

/// What stands in the way of control.
#[derive(Debug)]
pub enum Error {
    /// No `libcuda.so.1` is loaded, or the file cannot be.
    NotLoaded(String),
    /// The `libcuda.so.1` that is loaded is another: a real driver.
    NotTheDouble(&'static str),
    /// The double knows no such setting, or it cannot have that value.
    BadSetting(String),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::NotLoaded(why) => write!(f, "libcuda.so.1 is not loaded: {why}"),
            Error::NotTheDouble(symbol) => {
                write!(
                    f,
                    "the loaded libcuda.so.1 is not the double: it has no {symbol}"
                )
            }
            Error::BadSetting(what) => write!(f, "the double has no such setting: {what}"),
        }
    }
}

impl std::error::Error for Error {}

fn load_error() -> String {
    // SAFETY: returns null or a text that lives until this thread's next call of the kind.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".into();
    }
    // SAFETY: checked for null, and a text by the interface.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

impl Control {
    /// The double that this process has loaded already.
    pub fn find() -> Result<Control, Error> {
        Self::open(c"libcuda.so.1", libc::RTLD_NOW | libc::RTLD_NOLOAD)
    }

    /// Loads the double from a file; later loads of `libcuda.so.1` get the same.
    pub fn load(path: &Path) -> Result<Control, Error> {
        let name = CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|_| Error::NotLoaded("a NUL in the path".into()))?;
        Self::open(&name, libc::RTLD_NOW | libc::RTLD_LOCAL)
    }

    fn open(name: &CStr, flags: i32) -> Result<Control, Error> {
        // SAFETY: the name ends in NUL; the double's initializers do nothing.
        let library = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if library.is_null() {
            return Err(Error::NotLoaded(load_error()));
        }
        let symbol = |name: &'static CStr| -> Result<*mut c_void, Error> {
            // SAFETY: the handle is open; the library is never unloaded (linked so).
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            if found.is_null() {
                Err(Error::NotTheDouble(
                    name.to_str().unwrap_or("control symbol"),
                ))
            } else {
                Ok(found)
            }
        };
        let enter = symbol(c"vccl_double_progress_enter")?;
        let leave = symbol(c"vccl_double_progress_leave")?;
        let violations = symbol(c"vccl_double_violations")?;
        let reset = symbol(c"vccl_double_reset")?;
        let set = symbol(c"vccl_double_set")?;
        let counter = symbol(c"vccl_double_counter")?;
        // SAFETY: only the double has these names, and there they have these types.
        unsafe {
            Ok(Control {
                enter: std::mem::transmute::<*mut c_void, extern "C" fn()>(enter),
                leave: std::mem::transmute::<*mut c_void, extern "C" fn()>(leave),
                violations: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_char, usize) -> i32,
                >(violations),
                reset: std::mem::transmute::<*mut c_void, extern "C" fn()>(reset),
                set: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*const c_char, *const c_char) -> i32,
                >(set),
                counter: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*const c_char) -> u64,
                >(counter),
            })
        }
    }

    /// Marks this thread as being on a progress path until the value is dropped.
    pub fn progress(&self) -> Progress {
        (self.enter)();
        Progress {
            leave: self.leave,
            _thread: PhantomData,
        }
    }

    /// The violations recorded so far.
    pub fn violations(&self) -> Vec<String> {
        let mut buffer = vec![0u8; 1 << 20];
        // SAFETY: the buffer has that length.
        unsafe { (self.violations)(buffer.as_mut_ptr().cast(), buffer.len()) };
        let text = CStr::from_bytes_until_nul(&buffer).map(CStr::to_string_lossy);
        text.map(|t| t.lines().map(String::from).collect())
            .unwrap_or_default()
    }

    /// How many violations were recorded.
    pub fn violation_count(&self) -> usize {
        // SAFETY: a null buffer asks for the number alone.
        let count = unsafe { (self.violations)(std::ptr::null_mut(), 0) };
        usize::try_from(count).unwrap_or(0)
    }

    /// Forgets violations, counts and errors, takes the environment's settings, and lets go what
    /// hangs. What is allocated stays.
    pub fn reset(&self) {
        (self.reset)();
    }

    /// Changes a setting, named as in the environment with or without the prefix, in any case.
    pub fn set(&self, key: &str, value: &str) -> Result<(), Error> {
        let bad = || Error::BadSetting(format!("{key}={value}"));
        let (k, v) = (CString::new(key), CString::new(value));
        let (k, v) = (k.map_err(|_| bad())?, v.map_err(|_| bad())?);
        // SAFETY: both end in NUL.
        match unsafe { (self.set)(k.as_ptr(), v.as_ptr()) } {
            0 => Ok(()),
            _ => Err(bad()),
        }
    }

    /// A count: the calls of an entry point, or one of the double's own.
    pub fn counter(&self, name: &str) -> u64 {
        let Ok(name) = CString::new(name) else {
            return 0;
        };
        // SAFETY: the name ends in NUL.
        unsafe { (self.counter)(name.as_ptr()) }
    }
}
