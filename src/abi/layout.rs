//! Assertions about the layout and the argument types of every struct here. build.rs writes them
//! from nccl_headers/layout.inc, the table that the C side is checked against too.

include!(concat!(env!("OUT_DIR"), "/layout.rs"));
