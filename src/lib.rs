//! vccl: an SM-free data path for stock NCCL.
//!
//! NCCL finds the plugin by the symbols at the end of this file, takes the newest that it knows, and
//! calls through it. Calls pass through [`abi`] to [`net`], and from there down: each layer knows the
//! one under it and none above.

#[cfg(not(loom))]
pub mod abi;
#[cfg(not(loom))]
pub mod config;
#[cfg(not(loom))]
pub mod cuda;
#[cfg(not(loom))]
pub mod error;
#[cfg(not(loom))]
pub mod ffi;
#[cfg(all(not(loom), any(test, feature = "fuzzing")))]
pub mod fuzzing;
#[cfg(not(loom))]
pub mod gate;
#[cfg(not(loom))]
pub mod handle;
#[cfg(not(loom))]
pub mod ibverbs;
#[cfg(not(loom))]
pub mod log;
#[cfg(not(loom))]
pub mod net;
#[cfg(not(loom))]
pub mod proxy;
#[cfg(not(loom))]
pub mod sync;
#[cfg(not(loom))]
pub mod telemetry;
#[cfg(not(loom))]
pub mod thread;
#[cfg(not(loom))]
pub mod transport;

// Loom explores what threads and processes share by itself: nothing else is built on its atomics.
#[cfg(loom)]
#[path = "transport/tcp/handover.rs"]
pub mod handover;
#[cfg(loom)]
#[path = "transport/copy_engine/ring.rs"]
pub mod ring;
#[cfg(loom)]
#[path = "transport/copy_engine/steps.rs"]
pub mod steps;

/// The symbols that NCCL looks for, one for each version of its interface.
#[cfg(not(loom))]
macro_rules! plugins {
    ($($symbol:ident: $version:ident),* $(,)?) => {$(
        #[doc = concat!("What NCCL gets where it looks for version ", stringify!($version), ".")]
        #[allow(non_upper_case_globals)]
        #[unsafe(no_mangle)]
        pub static $symbol: abi::$version::Net = abi::$version::NET;
    )*};
}

#[cfg(not(loom))]
plugins! {
    ncclNetPlugin_v6: v6,
    ncclNetPlugin_v7: v7,
    ncclNetPlugin_v8: v8,
    ncclNetPlugin_v9: v9,
    ncclNetPlugin_v10: v10,
    ncclNetPlugin_v11: v11,
    ncclNetPlugin_v12: v12,
}
