//! One error type for the driver: a text that says where, and the plugin's result code if the
//! plugin was the one that failed.

use std::fmt;

use vccl::error::ResultCode;

/// What the driver and the cases return.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of a case, of a plugin's function, or of the machinery around them.
#[derive(Debug, Clone)]
pub struct Error {
    text: String,
    code: Option<ResultCode>,
    skip: bool,
}

impl Error {
    /// A failure with its text.
    pub fn new(text: impl Into<String>) -> Error {
        Error {
            text: text.into(),
            code: None,
            skip: false,
        }
    }

    /// A function of the plugin returned `code`.
    pub fn plugin(code: ResultCode, text: impl Into<String>) -> Error {
        Error {
            text: text.into(),
            code: Some(code),
            skip: false,
        }
    }

    /// No failure: the case does not apply here, and this is why.
    pub fn skip(text: impl Into<String>) -> Error {
        Error {
            text: text.into(),
            code: None,
            skip: true,
        }
    }

    /// The same error with `what` in front.
    pub fn context(self, what: impl fmt::Display) -> Error {
        Error {
            text: format!("{what}: {}", self.text),
            ..self
        }
    }

    /// The plugin's result code, if a function of the plugin returned one.
    pub fn code(&self) -> Option<ResultCode> {
        self.code
    }

    /// True for [`Error::skip`].
    pub fn is_skip(&self) -> bool {
        self.skip
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}

impl From<std::io::Error> for Error {
    fn from(e: std::io::Error) -> Error {
        Error::new(e.to_string())
    }
}

impl From<nix::errno::Errno> for Error {
    fn from(e: nix::errno::Errno) -> Error {
        Error::new(e.to_string())
    }
}

/// Adds a context to the error of a result.
pub trait Context<T> {
    /// Puts `what()` in front of the error's text.
    fn context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for std::result::Result<T, E> {
    fn context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|e| e.into().context(what()))
    }
}

/// Returns an [`Error`] with a formatted text.
#[macro_export]
macro_rules! fail {
    ($($arg:tt)*) => {
        return Err($crate::error::Error::new(format!($($arg)*)))
    };
}

/// Returns an [`Error`] with a formatted text unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($cond:expr, $($arg:tt)*) => {
        if !$cond {
            return Err($crate::error::Error::new(format!($($arg)*)));
        }
    };
}
