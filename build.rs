//! Checks the plugin interfaces of src/abi against C, and names the shared library.

use std::{
    env,
    error::Error,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

/// The table that both languages are held to.
const TABLE: &str = "nccl_headers/layout.inc";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=nccl_headers");

    cc::Build::new()
        .file("nccl_headers/probe.c")
        .std("c11")
        .warnings_into_errors(true)
        .cargo_metadata(false)
        .try_compile("vccl_probe")?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo set no OUT_DIR")?);
    fs::write(out.join("layout.rs"), rust_assertions(Path::new(TABLE))?)?;

    // NCCL closes the library while threads of ours may still be returning from it, and opens it
    // again later: the code must stay where it is. A missing symbol must show at load.
    for arg in [
        "-Wl,-soname,libnccl-net-vccl.so",
        "-Wl,-z,nodelete",
        "-Wl,-z,now",
    ] {
        println!("cargo:rustc-cdylib-link-arg={arg}");
    }
    Ok(())
}

/// The table as Rust: an assertion for each number, a function that compiles only for the right
/// argument types, and an exhaustive pattern for each struct, so that no field escapes.
fn rust_assertions(table: &Path) -> Result<String, Box<dyn Error>> {
    let text = fs::read_to_string(table)?;
    let mut rust = String::from("use std::mem::{align_of, offset_of, size_of};\n");
    let mut fields: Vec<(String, Vec<String>)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let Some((kind, rest)) = line
            .strip_prefix("VCCL_")
            .and_then(|line| line.split_once('('))
        else {
            continue;
        };
        let bad = || format!("{}:{}: not understood: {line}", table.display(), number + 1);
        let rest = rest.strip_suffix(')').ok_or_else(bad)?;
        // Argument types come last, in parentheses of their own.
        let (rest, types) = match rest.split_once(", (") {
            Some((rest, types)) => {
                let types = types.strip_suffix(')').ok_or_else(bad)?;
                let version = rest.split(", ").next().unwrap_or_default();
                let types: Option<Vec<String>> = types
                    .split(", ")
                    .map(|token| rust_type(version, token))
                    .collect();
                (rest, types.ok_or_else(bad)?.join(", "))
            }
            None => (rest, String::new()),
        };
        let words: Vec<&str> = rest.split(", ").collect();
        let [version, name, more @ ..] = &words[..] else {
            return Err(bad().into());
        };
        let path = format!("super::{version}::{name}");
        let call = format!("unsafe extern \"C\" fn({types}) -> std::ffi::c_int");
        match (kind, more) {
            ("STRUCT", [size, align]) => {
                writeln!(
                    rust,
                    "const _: () = assert!(size_of::<{path}>() == {size});"
                )?;
                writeln!(
                    rust,
                    "const _: () = assert!(align_of::<{path}>() == {align});"
                )?;
                fields.push((path, Vec::new()));
            }
            ("FIELD" | "CALL", [field, offset]) => {
                writeln!(
                    rust,
                    "const _: () = assert!(offset_of!({path}, {field}) == {offset});"
                )?;
                if kind == "CALL" {
                    writeln!(
                        rust,
                        "const _: fn(&{path}) -> Option<{call}> = |net| net.{field};"
                    )?;
                }
                let last = fields.last_mut().filter(|(last, _)| *last == path);
                last.ok_or_else(bad)?.1.push((*field).to_string());
            }
            ("CALLBACK", []) => writeln!(rust, "const _: fn({path}) -> {call} = |f| f;")?,
            ("LOGGER", []) => writeln!(
                rust,
                "const _: fn({path}) -> unsafe extern \"C\" fn({types}, ...) = |f| f;"
            )?,
            ("CONST", [value]) => writeln!(rust, "const _: () = assert!({path} == {value});")?,
            _ => return Err(bad().into()),
        }
    }
    if fields.is_empty() {
        return Err(format!("{}: no struct in it", table.display()).into());
    }
    for (path, fields) in fields {
        let pattern: Vec<String> = fields.iter().map(|field| format!("{field}: _")).collect();
        writeln!(
            rust,
            "const _: fn(&{path}) = |{path} {{ {} }}| ();",
            pattern.join(", ")
        )?;
    }
    Ok(rust)
}

/// The Rust type of an argument that the table names, for a line about `version`.
fn rust_type(version: &str, token: &str) -> Option<String> {
    let own = |name: &str| format!("*mut super::{version}::{name}");
    Some(match token {
        "PVOID" => "*mut std::ffi::c_void".into(),
        "PPVOID" => "*mut *mut std::ffi::c_void".into(),
        "INT" => "std::ffi::c_int".into(),
        "PINT" => "*mut std::ffi::c_int".into(),
        "SIZE" => "usize".into(),
        "PSIZE" => "*mut usize".into(),
        "U64" => "u64".into(),
        "I64" => "i64".into(),
        "ULONG" => "std::ffi::c_ulong".into(),
        "PCHAR" => "*const std::ffi::c_char".into(),
        "LOGFN" => "Option<super::types::LogFn>".into(),
        "PROFFN" => "Option<super::types::ProfilerFn>".into(),
        "PPROPS" => own("Properties"),
        "PPDEVH" => "*mut *mut super::types::DeviceHandle".into(),
        "PCONFIG" => own("CommConfig"),
        "PVDEV" => own("VDeviceProps"),
        "PATTR" => own("NetAttr"),
        _ => return None,
    })
}
