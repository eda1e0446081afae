//! Log records on their way to NCCL's logger.

use std::{
    env,
    ffi::{c_int, CStr, CString},
    mem, ptr,
    sync::atomic::{AtomicBool, AtomicPtr, Ordering},
};

use ::log::{Level, LevelFilter, Log, Metadata, Record};

use crate::abi::types::{LogFn, NCCL_INIT, NCCL_LOG_INFO, NCCL_LOG_TRACE, NCCL_LOG_WARN, NCCL_NET};

/// NCCL's logger, of the latest `init`; NULL where there is none.
static LOGGER: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// The logger of the latest `init` that no `finalize` will follow (versions up to 10).
static LASTING: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// How long a logger can be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lifetime {
    /// Until [`clear`].
    Finalize,
    /// For the life of the process.
    Process,
}

/// Takes NCCL's logger into use, in place of the one before, and this module as the receiver of all
/// log records if nothing else is that already.
pub fn set(logger: Option<LogFn>, lifetime: Lifetime) {
    let logger = logger.map_or(ptr::null_mut(), |logger| logger as *mut ());
    if lifetime == Lifetime::Process {
        LASTING.store(logger, Ordering::Release);
    }
    LOGGER.store(logger, Ordering::Release);

    static OURS: AtomicBool = AtomicBool::new(false);
    if ::log::set_logger(&Forward).is_ok() {
        OURS.store(true, Ordering::Relaxed);
    }
    if OURS.load(Ordering::Relaxed) {
        // NCCL sorts out what its settings hide. Only what an ordinary build of NCCL always hides
        // is left out here, before it costs a text.
        let traces =
            env::var_os("NCCL_DEBUG").is_some_and(|level| level.eq_ignore_ascii_case("TRACE"));
        ::log::set_max_level(if traces {
            LevelFilter::Trace
        } else {
            LevelFilter::Info
        });
    }
}

/// Forgets the logger: NCCL has finalized its last context, and may unload.
pub fn clear() {
    LOGGER.store(LASTING.load(Ordering::Acquire), Ordering::Release);
}

/// One WARN line, "vccl: `text`", whatever else receives log records.
#[cold]
pub fn warn(text: &str) {
    emit(NCCL_LOG_WARN, "vccl", 0, text);
}

/// Receives the records of the `log` crate.
struct Forward;

impl Log for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() == Level::Error
            || metadata.level() == Level::Warn
            || !LOGGER.load(Ordering::Acquire).is_null()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = match record.level() {
            Level::Error | Level::Warn => NCCL_LOG_WARN,
            Level::Info => NCCL_LOG_INFO,
            Level::Debug | Level::Trace => NCCL_LOG_TRACE,
        };
        emit(
            level,
            record.file().unwrap_or("vccl"),
            record.line().unwrap_or(0),
            &record.args().to_string(),
        );
    }

    fn flush(&self) {}
}

/// Hands one line to NCCL; without a logger, a warning goes to stderr and the rest nowhere.
fn emit(level: c_int, file: &str, line: u32, text: &str) {
    let logger = LOGGER.load(Ordering::Acquire);
    if logger.is_null() {
        if level == NCCL_LOG_WARN {
            eprintln!("vccl: {text}");
        }
        return;
    }
    // SAFETY: LOGGER holds NULL, which is excluded here, or what `set` made of a `LogFn`. Function
    // and data pointers have the same size and meaning on every system with dlsym.
    let logger = unsafe { mem::transmute::<*mut (), LogFn>(logger) };
    let file = c_text(file);
    let text = c_text(&format!("vccl: {text}"));
    let line = c_int::try_from(line).unwrap_or(0);
    const FORMAT: &CStr = c"%s";
    // SAFETY: `logger` is NCCL's function of this type, which may be called from any thread and at
    // any time between `init` and the last `finalize`. All strings end in NUL and outlive the call,
    // and the format asks for exactly the one string that is given.
    unsafe {
        logger(
            level,
            NCCL_INIT | NCCL_NET,
            file.as_ptr(),
            line,
            FORMAT.as_ptr(),
            text.as_ptr(),
        )
    };
}

/// `text` for C. A NUL in it would end it early, so each is shown instead.
fn c_text(text: &str) -> CString {
    CString::new(text).unwrap_or_else(|_| {
        // No NUL is left, so this cannot fail again.
        CString::new(text.replace('\0', "\\0")).unwrap_or_default()
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        ffi::{c_char, c_ulong},
        sync::{Mutex, MutexGuard},
    };

    use super::*;

    /// One line that a logger got.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub(crate) struct Line {
        pub level: c_int,
        pub flags: c_ulong,
        pub fmt: String,
        pub text: String,
    }

    static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());
    static TURN: Mutex<()> = Mutex::new(());

    /// A logger for one test at a time.
    pub(crate) struct Capture(#[allow(dead_code)] MutexGuard<'static, ()>);

    impl Capture {
        pub fn new() -> Capture {
            let turn = TURN.lock().unwrap_or_else(|poison| poison.into_inner());
            LINES.lock().unwrap().clear();
            set(Some(logger()), Lifetime::Finalize);
            Capture(turn)
        }

        /// The lines since the last call.
        pub fn lines(&self) -> Vec<Line> {
            mem::take(&mut *LINES.lock().unwrap())
        }
    }

    impl Drop for Capture {
        fn drop(&mut self) {
            LASTING.store(ptr::null_mut(), Ordering::Release);
            clear();
        }
    }

    /// Stable Rust cannot define a variadic function, so this takes the one argument that vccl passes
    /// after the format.
    unsafe extern "C" fn capture(
        level: c_int,
        flags: c_ulong,
        file: *const c_char,
        _line: c_int,
        fmt: *const c_char,
        text: *const c_char,
    ) {
        // SAFETY: all three are strings for C, as `emit` makes them.
        let (file, fmt, text) = unsafe {
            (
                CStr::from_ptr(file),
                CStr::from_ptr(fmt),
                CStr::from_ptr(text),
            )
        };
        assert!(!file.is_empty());
        LINES.lock().unwrap().push(Line {
            level,
            flags,
            fmt: fmt.to_str().unwrap().into(),
            text: text.to_str().unwrap().into(),
        });
    }

    pub(crate) fn logger() -> LogFn {
        type Fixed = unsafe extern "C" fn(
            c_int,
            c_ulong,
            *const c_char,
            c_int,
            *const c_char,
            *const c_char,
        );
        // SAFETY: Linux passes six integer and pointer arguments alike in both kinds of call.
        unsafe { mem::transmute::<Fixed, LogFn>(capture) }
    }

    #[test]
    fn levels_and_odd_texts() {
        let capture = Capture::new();
        ::log::error!("first {}", 1);
        ::log::warn!("%s%n 100 %");
        ::log::info!("nul \0 inside");
        ::log::debug!("nobody sees this");
        warn("straight");
        let lines = capture.lines();
        let seen: Vec<(c_int, &str)> = lines
            .iter()
            .map(|line| (line.level, line.text.as_str()))
            .collect();
        assert_eq!(
            seen,
            [
                (NCCL_LOG_WARN, "vccl: first 1"),
                (NCCL_LOG_WARN, "vccl: %s%n 100 %"),
                (NCCL_LOG_INFO, "vccl: nul \\0 inside"),
                (NCCL_LOG_WARN, "vccl: straight"),
            ]
        );
        assert!(lines
            .iter()
            .all(|line| line.fmt == "%s" && line.flags == NCCL_INIT | NCCL_NET));
    }

    #[test]
    fn cleared_means_silent() {
        let capture = Capture::new();
        clear();
        ::log::info!("to nobody");
        ::log::warn!("to stderr");
        assert_eq!(capture.lines(), []);
        set(Some(logger()), Lifetime::Process);
        set(Some(logger()), Lifetime::Finalize);
        clear();
        ::log::info!("to the one that stays");
        assert_eq!(capture.lines().len(), 1);
    }
}
