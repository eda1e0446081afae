//! What the plugin logs: kept, so that cases can assert on it, and printed if asked.
//!
//! `VCCL_DRIVER_LOG=warn` or `info` prints the lines to standard error as they come.

use std::ffi::{c_char, c_int, c_ulong, CStr};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use vccl::abi::types::{LogFn, NCCL_LOG_INFO, NCCL_LOG_WARN};

/// One line of the plugin's log.
#[derive(Debug, Clone)]
pub struct Line {
    /// NCCL's level: 2 is WARN, 3 is INFO.
    pub level: i32,
    /// The formatted text.
    pub text: String,
}

/// The most lines that are kept; a plugin that logs for each message would fill the memory.
const KEPT: usize = 20_000;

static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

extern "C" {
    // The variadic function of logger.c; only its address is taken here.
    fn vccl_driver_log(
        level: c_int,
        flags: c_ulong,
        file: *const c_char,
        line: c_int,
        fmt: *const c_char,
        ...
    );
}

/// The logger that `init` gets.
pub fn logger() -> LogFn {
    vccl_driver_log
}

/// Called by logger.c with the formatted line.
#[no_mangle]
extern "C" fn vccl_driver_log_line(
    level: c_int,
    _flags: c_ulong,
    _where: *const c_char,
    _line: c_int,
    text: *const c_char,
) {
    if text.is_null() {
        return;
    }
    // SAFETY: logger.c passes a buffer that it has just terminated with a NUL.
    let text = unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned();
    let most = printed_level();
    if level <= most {
        eprintln!("[{}] {}: {text}", std::process::id(), level_name(level));
    }
    let mut lines = LINES.lock().unwrap_or_else(|e| e.into_inner());
    if lines.len() < KEPT {
        lines.push(Line { level, text });
    }
}

fn level_name(level: c_int) -> &'static str {
    match level {
        NCCL_LOG_WARN => "WARN",
        NCCL_LOG_INFO => "INFO",
        _ => "LOG",
    }
}

fn printed_level() -> c_int {
    static LEVEL: OnceLock<c_int> = OnceLock::new();
    *LEVEL.get_or_init(|| match std::env::var("VCCL_DRIVER_LOG").as_deref() {
        Ok("info") => NCCL_LOG_INFO,
        Ok("warn") => NCCL_LOG_WARN,
        _ => 0,
    })
}

/// A place in the log, to ask later what came after it.
pub fn mark() -> usize {
    LINES.lock().unwrap_or_else(|e| e.into_inner()).len()
}

/// The lines since `mark`, of WARN level only.
pub fn warnings_since(mark: usize) -> Vec<String> {
    let lines = LINES.lock().unwrap_or_else(|e| e.into_inner());
    lines
        .iter()
        .skip(mark)
        .filter(|l| l.level <= NCCL_LOG_WARN)
        .map(|l| l.text.clone())
        .collect()
}

/// All lines since `mark`.
pub fn lines_since(mark: usize) -> Vec<Line> {
    LINES
        .lock()
        .unwrap_or_else(|e| e.into_inner())
        .iter()
        .skip(mark)
        .cloned()
        .collect()
}

/// Waits until a line since `mark` satisfies `wanted`; false if `limit` passed first.
pub fn wait_for(mark: usize, limit: Duration, wanted: impl Fn(&Line) -> bool) -> bool {
    let until = Instant::now() + limit;
    loop {
        if lines_since(mark).iter().any(&wanted) {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
