//! vccl: an SM-free data path for stock NCCL.
//!
//! NCCL finds the plugin by the symbols at the end of this file, takes the newest that it knows, and
//! calls through it. Calls pass through [`abi`] to [`net`], and from there down: each layer knows the
//! one under it and none above.

pub mod abi;
pub mod config;
pub mod cuda;
pub mod error;
pub mod ffi;
pub mod gate;
pub mod handle;
pub mod log;
pub mod net;
pub mod proxy;
pub mod telemetry;
pub mod transport;

/// The symbols that NCCL looks for, one for each version of its interface.
macro_rules! plugins {
    ($($symbol:ident: $version:ident),* $(,)?) => {$(
        #[doc = concat!("What NCCL gets where it looks for version ", stringify!($version), ".")]
        #[allow(non_upper_case_globals)]
        #[unsafe(no_mangle)]
        pub static $symbol: abi::$version::Net = abi::$version::NET;
    )*};
}

plugins! {
    ncclNetPlugin_v6: v6,
    ncclNetPlugin_v7: v7,
    ncclNetPlugin_v8: v8,
    ncclNetPlugin_v9: v9,
    ncclNetPlugin_v10: v10,
    ncclNetPlugin_v11: v11,
    ncclNetPlugin_v12: v12,
}
