//! The interface between NCCL and its network plugins, one module for each version.
//!
//! The structs are declared from the facts of the binary interface, and the build checks their
//! layout against C declarations of our own (nccl_headers/). All of them are public: a program that
//! loads plugins as NCCL does reads a foreign plugin's table through the same structs, which is why
//! every function in them is an `Option`.

// The types are as complex as the interface is; a name for each would hide it.
#![allow(clippy::type_complexity)]

pub mod types;
pub mod v10;
pub mod v11;
pub mod v12;
pub mod v6;
pub mod v7;
pub mod v8;
pub mod v9;

mod entry;
mod layout;
