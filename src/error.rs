//! Errors as they travel up to the boundary: an NCCL result code and one text that names what
//! failed, between whom, and what to do about it.

use std::fmt;

/// An `ncclResult_t`. An integer and no enum, because the other side may know more values than we do.
///
/// Source of the values: `ncclResult_t` in nccl.h, unchanged since NCCL 2.0 (`REMOTE` since 2.13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct ResultCode(pub i32);

impl ResultCode {
    /// `ncclSuccess`
    pub const SUCCESS: ResultCode = ResultCode(0);
    /// `ncclUnhandledCudaError`: the CUDA driver reported an error.
    pub const UNHANDLED_CUDA: ResultCode = ResultCode(1);
    /// `ncclSystemError`: a system call failed.
    pub const SYSTEM: ResultCode = ResultCode(2);
    /// `ncclInternalError`: a fault of ours.
    pub const INTERNAL: ResultCode = ResultCode(3);
    /// `ncclInvalidArgument`: an argument cannot be what it claims to be.
    pub const INVALID_ARGUMENT: ResultCode = ResultCode(4);
    /// `ncclInvalidUsage`: arguments are fine one by one but not together.
    pub const INVALID_USAGE: ResultCode = ResultCode(5);
    /// `ncclRemoteError`: the peer is gone or refused.
    pub const REMOTE: ResultCode = ResultCode(6);
}

/// What every fallible function of the plugin returns in its error case.
#[derive(Clone, Debug)]
pub struct Error {
    code: ResultCode,
    text: String,
    /// It was reported before, and is not warned of again.
    known: bool,
}

/// Result with the plugin's own error.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with the given code. `text` says what failed, between whom, and the cure.
    #[cold]
    pub fn new(code: ResultCode, text: impl Into<String>) -> Error {
        Error {
            code,
            text: text.into(),
            known: false,
        }
    }

    /// The same error, as one that was reported before.
    #[cold]
    pub fn again(&self) -> Error {
        Error {
            known: true,
            ..self.clone()
        }
    }

    /// Whether it was reported before.
    pub fn is_known(&self) -> bool {
        self.known
    }

    /// `ncclInvalidArgument`
    #[cold]
    pub fn invalid_argument(text: impl Into<String>) -> Error {
        Error::new(ResultCode::INVALID_ARGUMENT, text)
    }

    /// `ncclInvalidUsage`
    #[cold]
    pub fn invalid_usage(text: impl Into<String>) -> Error {
        Error::new(ResultCode::INVALID_USAGE, text)
    }

    /// `ncclRemoteError`
    #[cold]
    pub fn remote(text: impl Into<String>) -> Error {
        Error::new(ResultCode::REMOTE, text)
    }

    /// `ncclInternalError`
    #[cold]
    pub fn internal(text: impl Into<String>) -> Error {
        Error::new(ResultCode::INTERNAL, text)
    }

    /// `ncclSystemError`, with the text of the errno behind `text`.
    #[cold]
    pub fn system(text: impl fmt::Display, errno: nix::errno::Errno) -> Error {
        use nix::errno::Errno;
        let cure = match errno {
            Errno::EMFILE => "; raise the limit of open files (ulimit -n)",
            Errno::ENFILE => "; the system is at its limit of open files (fs.file-max)",
            _ => "",
        };
        let what = errno.desc();
        Error::new(
            ResultCode::SYSTEM,
            format!("{text}: {what} ({errno:?}){cure}"),
        )
    }

    /// The code that NCCL gets.
    pub fn code(&self) -> ResultCode {
        self.code
    }

    /// The text of the WARN line.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The same error with `what` in front: the caller knows for whom it was done.
    #[cold]
    pub fn context(self, what: impl fmt::Display) -> Error {
        Error {
            text: format!("{what}: {}", self.text),
            ..self
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}
