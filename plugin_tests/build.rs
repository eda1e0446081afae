//! Compiles the one C function of the driver: NCCL's logger takes a printf format and variadic
//! arguments, which stable Rust can declare but not define.

fn main() {
    println!("cargo:rerun-if-changed=src/logger.c");
    cc::Build::new()
        .file("src/logger.c")
        .warnings(true)
        .compile("vccl_driver_logger");
}
