//! A stand-in for the CUDA driver, for tests on machines without a GPU.
//!
//! Built as a shared library whose SONAME is `libcuda.so.1`, it exports the driver entry points that
//! a copy-engine plugin uses. Bytes really move, between processes too; what cannot be had without a
//! GPU is imitated so that a mistake shows:
//!
//! - A device address is reserved with `PROT_NONE`: a CPU access to it faults. The bytes live in a
//!   memfd that the double reaches through a mapping of its own. Freed addresses are reused.
//! - Copies and stream memory operations run on one worker thread per stream, in order, after a
//!   delay that the test chooses.
//! - What the driver forbids fails with the code that a driver gives (taken from driver 580 on H200),
//!   and what it silently tolerates, but a copy-engine plugin must not do, is recorded as a
//!   *violation*: synchronizing, allocating or mapping on a progress path, a copy within one device
//!   there, memory freed under a copy.
//! - Errors, copies that never finish, and missing features can be switched on at any time.
//!
//! Settings come from `VCCL_DOUBLE_*` variables at `cuInit`, or later from [`control`], which is also
//! where violations and counters are read. `README.md` beside the manifest lists them all, and where
//! the double is stricter than a driver, or simpler.

mod abi;
mod config;
mod context;
pub mod control;
mod control_abi;
mod copy;
mod device;
mod driver;
mod event;
mod host;
mod ipc;
mod memory;
mod phys;
mod pointer;
mod space;
mod stream;
mod vmm;
