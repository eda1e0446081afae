//! Gives the shared library the driver's name, and keeps it loaded once it is.
fn main() {
    // Programs look for `libcuda.so.1`, and the loader compares names with this one.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Worker threads run this library's code, so it must outlive a dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
