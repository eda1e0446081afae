//! A driver that loads any NCCL net plugin as NCCL does, and the conformance suite that runs on it.
//!
//! [`launch`] starts ranks, which are processes or threads, and watches over them; [`rank`] is one
//! of them, with a thread for each role that NCCL has; [`net`] calls a plugin of any ABI version;
//! [`exchange`] moves data and checks every byte. [`conformance`] is the suite: written once, run
//! over every ABI version, kind of memory and transport.

pub mod conformance;
pub mod cuda;
pub mod error;
pub mod exchange;
pub mod flow;
pub mod launch;
pub mod logs;
pub mod memory;
pub mod net;
pub mod nodes;
pub mod oob;
pub mod params;
pub mod pattern;
pub mod rank;
pub mod surroundings;
pub mod worker;
