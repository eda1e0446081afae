//! Where the plugin is.

use std::path::{Path, PathBuf};

/// The library's name.
pub const LIBRARY: &str = "libnccl-net-vccl.so";

/// The plugin to use: the one that is named, the one installed beside this program, or the one
/// that the loader finds.
pub fn find(named: Option<&Path>) -> Result<PathBuf, String> {
    if let Some(p) = named {
        let is_path = p.components().count() > 1 || p.is_absolute();
        if is_path && !p.exists() {
            return Err(format!(
                "there is no plugin at {}: give the path of {LIBRARY} with --plugin (ci/build puts \
                 it into target/dist/lib)",
                p.display()
            ));
        }
        return Ok(if is_path {
            p.canonicalize().unwrap_or(p.to_path_buf())
        } else {
            p.to_path_buf()
        });
    }
    if let Ok(exe) = std::env::current_exe() {
        let beside = exe.parent().map(|d| d.join("../lib").join(LIBRARY));
        if let Some(p) = beside.and_then(|p| p.canonicalize().ok()) {
            return Ok(p);
        }
    }
    Ok(PathBuf::from(LIBRARY))
}
