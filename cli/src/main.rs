//! The vccl command line.
fn main() {}
