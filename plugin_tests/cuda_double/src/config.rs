//! Settings: read from `VCCL_DOUBLE_*` at `cuInit`, changed with `vccl_double_set`.

use std::collections::HashSet;

/// Which calls of an entry point a failure rule hits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum When {
    /// Every call.
    Always,
    /// The nth call from when the rule was made.
    Nth(u64),
    /// The nth call and those after it.
    From(u64),
}

impl When {
    fn parse(text: &str) -> Result<When, String> {
        let number = |t: &str| {
            t.parse::<u64>()
                .ok()
                .filter(|n| *n > 0)
                .ok_or(format!("'{text}' is no call number"))
        };
        if text == "*" {
            Ok(When::Always)
        } else if let Some(n) = text.strip_suffix('+') {
            Ok(When::From(number(n)?))
        } else {
            Ok(When::Nth(number(text)?))
        }
    }

    /// Does the rule hit this call, counted from 1?
    pub fn hits(self, call: u64) -> bool {
        match self {
            When::Always => true,
            When::Nth(n) => call == n,
            When::From(n) => call >= n,
        }
    }
}

/// A rule that makes an entry point fail.
#[derive(Clone, Debug, PartialEq)]
pub struct FailRule {
    /// The entry point, with or without its version suffix; `*` is every one.
    pub name: String,
    /// Which of its calls.
    pub when: When,
    /// The result that they return.
    pub code: i32,
    /// How many calls it has seen.
    pub seen: u64,
}

impl FailRule {
    /// Does the rule speak of this entry point?
    pub fn names(&self, entry: &str) -> bool {
        self.name == "*" || same_entry(&self.name, entry)
    }
}

/// Is `wanted` this entry point, version suffix or not?
pub fn same_entry(wanted: &str, entry: &str) -> bool {
    wanted == entry
        || entry
            .strip_prefix(wanted)
            .is_some_and(|s| matches!(s, "_v2" | "_v3"))
}

/// Which devices' copies never finish.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Hang {
    /// None.
    #[default]
    None,
    /// All.
    All,
    /// Those of these physical devices.
    Devices(HashSet<u32>),
}

/// Which pairs of devices can reach each other.
#[derive(Clone, Debug, PartialEq)]
pub enum Peers {
    /// All.
    All,
    /// None.
    None,
    /// These, from the accessing to the accessed.
    Pairs(HashSet<(u32, u32)>),
}

/// Everything that a test can set.
#[derive(Clone, Debug)]
pub struct Settings {
    pub devices: u32,
    pub device_mem_mib: u64,
    pub copy_delay_us: u64,
    pub copy_gbps: f64,
    pub op_delay_us: u64,
    pub peer: Peers,
    pub peer_strict: bool,
    pub vmm: bool,
    pub vmm_export: bool,
    pub ipc: bool,
    pub ipc_free_strict: bool,
    pub memops: bool,
    pub host_alias: bool,
    /// RDMA devices reach device memory by its address, as with nvidia-peermem.
    pub peer_memory: bool,
    /// What a device says of writes that come from RDMA: 0 none are ordered, 100 for their owner.
    pub rdma_ordering: i32,
    pub progress_strict: bool,
    pub allow_local: bool,
    /// A graph is being captured, in the global mode.
    pub capture: bool,
    pub hang: Hang,
    pub async_fail: Option<(When, i32)>,
    pub async_seen: u64,
    pub fail: Vec<FailRule>,
    pub report: String,
    pub va_gib: u64,
    pub driver_version: i32,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            devices: 2,
            device_mem_mib: 4096,
            copy_delay_us: 0,
            copy_gbps: 0.0,
            op_delay_us: 0,
            peer: Peers::All,
            peer_strict: true,
            vmm: true,
            vmm_export: true,
            ipc: true,
            ipc_free_strict: false,
            memops: true,
            host_alias: true,
            peer_memory: false,
            rdma_ordering: 100,
            progress_strict: true,
            allow_local: false,
            capture: false,
            hang: Hang::None,
            async_fail: None,
            async_seen: 0,
            fail: Vec::new(),
            report: String::new(),
            va_gib: 256,
            driver_version: 12080,
        }
    }
}

const KEYS: &[&str] = &[
    "DEVICES",
    "DEVICE_MEM_MIB",
    "COPY_DELAY_US",
    "COPY_GBPS",
    "OP_DELAY_US",
    "PEER",
    "PEER_STRICT",
    "VMM",
    "VMM_EXPORT",
    "IPC",
    "IPC_FREE_STRICT",
    "MEMOPS",
    "HOST_ALIAS",
    "PROGRESS_STRICT",
    "ALLOW_LOCAL",
    "CAPTURE",
    "HANG_COPIES",
    "HANG_DEVICES",
    "ASYNC_FAIL",
    "FAIL",
    "REPORT",
    "VA_GIB",
    "DRIVER_VERSION",
    "PEER_MEMORY",
    "RDMA_ORDERING",
];

impl Settings {
    /// The settings that the environment asks for; what cannot be read is told on stderr.
    pub fn from_env() -> Settings {
        let mut settings = Settings::default();
        for key in KEYS {
            if let Ok(value) = std::env::var(format!("VCCL_DOUBLE_{key}")) {
                if let Err(why) = settings.set(key, &value) {
                    eprintln!("cuda_double: VCCL_DOUBLE_{key}: {why}");
                }
            }
        }
        settings
    }

    /// Changes one setting; the key may be in any case and carry the prefix.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let key = key.to_ascii_uppercase();
        let key = key.strip_prefix("VCCL_DOUBLE_").unwrap_or(&key);
        let value = value.trim();
        match key {
            "DEVICES" => self.devices = number::<u32>(value)?.min(64),
            "DEVICE_MEM_MIB" => self.device_mem_mib = number(value)?,
            "COPY_DELAY_US" => self.copy_delay_us = number(value)?,
            "COPY_GBPS" => self.copy_gbps = number(value)?,
            "OP_DELAY_US" => self.op_delay_us = number(value)?,
            "PEER" => self.peer = peers(value)?,
            "PEER_STRICT" => self.peer_strict = flag(value)?,
            "VMM" => self.vmm = flag(value)?,
            "VMM_EXPORT" => self.vmm_export = flag(value)?,
            "IPC" => self.ipc = flag(value)?,
            "IPC_FREE_STRICT" => self.ipc_free_strict = flag(value)?,
            "MEMOPS" => self.memops = flag(value)?,
            "HOST_ALIAS" => self.host_alias = flag(value)?,
            "PEER_MEMORY" => self.peer_memory = flag(value)?,
            "RDMA_ORDERING" => self.rdma_ordering = number(value)?,
            "PROGRESS_STRICT" => self.progress_strict = flag(value)?,
            "ALLOW_LOCAL" => self.allow_local = flag(value)?,
            "CAPTURE" => self.capture = flag(value)?,
            "HANG_COPIES" => self.hang = if flag(value)? { Hang::All } else { Hang::None },
            "HANG_DEVICES" => {
                let devices = list(value)
                    .map(number)
                    .collect::<Result<HashSet<u32>, _>>()?;
                self.hang = if devices.is_empty() {
                    Hang::None
                } else {
                    Hang::Devices(devices)
                };
            }
            "ASYNC_FAIL" => {
                self.async_seen = 0;
                self.async_fail = async_fail(value)?;
            }
            "FAIL" => self.fail = list(value).map(fail_rule).collect::<Result<_, _>>()?,
            "REPORT" => self.report = value.to_string(),
            "VA_GIB" => self.va_gib = number::<u64>(value)?.clamp(1, 16 << 10),
            "DRIVER_VERSION" => self.driver_version = number(value)?,
            _ => return Err(format!("no such setting: {key}")),
        }
        Ok(())
    }

    /// Can `from` reach the memory of `to`?
    pub fn can_access(&self, from: u32, to: u32) -> bool {
        from == to
            || match &self.peer {
                Peers::All => true,
                Peers::None => false,
                Peers::Pairs(pairs) => pairs.contains(&(from, to)),
            }
    }

    /// Do copies of this device never finish?
    pub fn hangs(&self, device: u32) -> bool {
        match &self.hang {
            Hang::None => false,
            Hang::All => true,
            Hang::Devices(devices) => devices.contains(&device),
        }
    }

    /// Should this copy, the next that a worker starts, fail? Counts it.
    pub fn async_failure(&mut self) -> Option<i32> {
        let (when, code) = self.async_fail?;
        self.async_seen += 1;
        when.hits(self.async_seen).then_some(code)
    }
}

fn list(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim).filter(|t| !t.is_empty())
}

fn number<T: std::str::FromStr>(value: &str) -> Result<T, String> {
    value
        .parse()
        .map_err(|_| format!("'{value}' is no number that fits"))
}

fn flag(value: &str) -> Result<bool, String> {
    match value {
        "1" | "yes" | "true" | "on" => Ok(true),
        "0" | "no" | "false" | "off" | "" => Ok(false),
        _ => Err(format!("'{value}' is neither 0 nor 1")),
    }
}

fn peers(value: &str) -> Result<Peers, String> {
    if let Ok(all) = flag(value) {
        return Ok(if all { Peers::All } else { Peers::None });
    }
    let mut pairs = HashSet::new();
    for item in list(value) {
        if let Some((a, b)) = item.split_once('>') {
            pairs.insert((number(a)?, number(b)?));
        } else if let Some((a, b)) = item.split_once('-') {
            let (a, b) = (number(a)?, number(b)?);
            pairs.extend([(a, b), (b, a)]);
        } else {
            return Err(format!("'{item}' is neither A-B nor A>B"));
        }
    }
    Ok(Peers::Pairs(pairs))
}

fn async_fail(value: &str) -> Result<Option<(When, i32)>, String> {
    let (code, when) = value.split_once(':').unwrap_or((value, "*"));
    let code = number(code)?;
    Ok((code != 0).then_some((When::parse(when)?, code)))
}

fn fail_rule(text: &str) -> Result<FailRule, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let [name, when, code] = parts[..] else {
        return Err(format!("'{text}' is not NAME:CALL:CODE"));
    };
    Ok(FailRule {
        name: name.to_string(),
        when: When::parse(when)?,
        code: number(code)?,
        seen: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fail_rules_are_read() {
        let mut s = Settings::default();
        s.set("FAIL", "cuMemMap:3:2, cuMemcpyAsync:*:999,cuInit:2+:100")
            .unwrap();
        assert_eq!(s.fail[0].when, When::Nth(3));
        assert_eq!(s.fail[1].when, When::Always);
        assert!(s.fail[2].when.hits(5) && !s.fail[2].when.hits(1));
        assert!(s.set("FAIL", "cuMemMap:0:2").is_err());
        assert!(s.set("FAIL", "cuMemMap").is_err());
        assert_eq!(s.fail.len(), 3, "a bad value changes nothing");
        s.set("FAIL", "").unwrap();
        assert!(s.fail.is_empty());
    }

    #[test]
    fn version_suffixes_may_be_left_out() {
        assert!(same_entry("cuMemAlloc", "cuMemAlloc_v2"));
        assert!(same_entry("cuMemAlloc_v2", "cuMemAlloc_v2"));
        assert!(!same_entry("cuMemcpy", "cuMemcpyAsync"));
    }

    #[test]
    fn peers_and_hangs() {
        let mut s = Settings::default();
        assert!(s.can_access(0, 1));
        s.set("vccl_double_peer", "0>1").unwrap();
        assert!(s.can_access(0, 1) && !s.can_access(1, 0) && s.can_access(1, 1));
        s.set("peer", "0").unwrap();
        assert!(!s.can_access(0, 1));
        s.set("hang_devices", "1").unwrap();
        assert!(s.hangs(1) && !s.hangs(0));
        s.set("hang_copies", "0").unwrap();
        assert!(!s.hangs(1));
        assert!(s.set("nonsense", "1").is_err());
    }

    #[test]
    fn async_failures_count_copies() {
        let mut s = Settings::default();
        s.set("async_fail", "719:2").unwrap();
        assert_eq!(
            [s.async_failure(), s.async_failure(), s.async_failure()],
            [None, Some(719), None]
        );
        s.set("async_fail", "0").unwrap();
        assert_eq!(s.async_failure(), None);
    }
}
