//! Every setting: its name, type, default, meaning, and where its value came from.
//!
//! Settings are read from the environment at each `init`, because NCCL loads, unloads and loads the
//! library again within one process. A value that cannot be used is named in a warning together
//! with what is allowed, and the default stands.

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, RwLock};

use crate::ibverbs::filter::Filter as HcaFilter;

/// Where a setting's value came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Nothing set it.
    Default,
    /// The environment variable of the setting's name.
    Environment,
}

/// One setting as documented for users: the row of a table.
#[derive(Clone, Debug)]
pub struct Row {
    /// The environment variable.
    pub name: &'static str,
    /// What may stand there, for people.
    pub allowed: &'static str,
    /// The default, for people.
    pub default: &'static str,
    /// What it does, in one sentence.
    pub doc: &'static str,
    /// The value in force.
    pub value: String,
    /// Where the value came from.
    pub source: Source,
}

/// Which CUDA context the copies are issued in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ContextKind {
    /// The one that is current when NCCL connects: the GPU's primary context.
    Primary,
    /// One of our own for each GPU: calls that block in the application's context do not block it.
    Private,
}

impl fmt::Display for ContextKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ContextKind::Primary => "primary",
            ContextKind::Private => "private",
        })
    }
}

/// A way for data to go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// Copy engines and shared memory, inside a host.
    CopyEngine,
    /// RDMA.
    Verbs,
    /// TCP.
    Tcp,
}

/// Those that connections may take.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transports(Vec<Transport>);

impl Transports {
    fn parse(s: &str) -> Option<Transports> {
        s.split(',')
            .map(|t| match t.trim() {
                "copy_engine" => Some(Transport::CopyEngine),
                "verbs" => Some(Transport::Verbs),
                "tcp" => Some(Transport::Tcp),
                _ => None,
            })
            .collect::<Option<Vec<_>>>()
            .map(Transports)
    }

    /// Whether connections may take it.
    pub fn allow(&self, t: Transport) -> bool {
        self.0.contains(&t)
    }
}

/// Addresses with the same first bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    address: IpAddr,
    bits: u8,
}

impl Range {
    fn parse(s: &str) -> Option<Range> {
        let (address, bits) = s.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let bits = bits.parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        (bits <= most).then_some(Range { address, bits })
    }

    /// Whether it has that address in it. One of no bits has all, of either family.
    pub fn holds(&self, address: IpAddr) -> bool {
        fn same(a: u128, b: u128, width: u32, bits: u8) -> bool {
            bits == 0 || (a ^ b) >> (width - u32::from(bits)) == 0
        }
        match (self.address, address) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                same(u32::from(a).into(), u32::from(b).into(), 32, self.bits)
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => same(a.into(), b.into(), 128, self.bits),
            _ => self.bits == 0,
        }
    }
}

/// Settings of RDMA.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ib {
    /// `VCCL_IB_DISABLE`: no RDMA.
    pub disable: bool,
    /// `VCCL_IB_HCA`: the devices and ports that may be used.
    pub hca: HcaFilter,
    /// `VCCL_IB_GID_INDEX`: entry of the table of GIDs; `None`: chosen.
    pub gid_index: Option<u8>,
    /// `VCCL_IB_ROCE_VERSION_NUM`: 1 or 2.
    pub roce_version: u8,
    /// `VCCL_IB_ADDR_FAMILY`: whether RoCE takes IPv6 addresses first.
    pub ipv6: bool,
    /// `VCCL_IB_ADDR_RANGE`: the addresses that RoCE may use.
    pub range: Range,
    /// `VCCL_IB_TC`: traffic class; `None`: what the communicator asks for.
    pub traffic_class: Option<u8>,
    /// `VCCL_IB_SL`: service level.
    pub service_level: u8,
    /// `VCCL_IB_PKEY`: index of the partition key.
    pub pkey_index: u16,
    /// `VCCL_IB_TIMEOUT`: how long an acknowledgement is waited for: 4.096 us times two to that.
    pub timeout: u8,
    /// `VCCL_IB_RETRY_CNT`: how often a write is tried again.
    pub retries: u8,
    /// `VCCL_IB_QPS_PER_CONNECTION`: queue pairs for each pair of ports of a connection.
    pub qps: usize,
    /// `VCCL_IB_ADAPTIVE_ROUTING`; `None`: where the fabric is InfiniBand.
    pub adaptive_routing: Option<bool>,
    /// `VCCL_IB_AR_THRESHOLD`: bytes from which on a message is written so that its packets may take
    /// several routes.
    pub routing_threshold: usize,
    /// `VCCL_IB_PCI_RELAXED_ORDERING`: whether writes may overtake each other on the PCI bus.
    pub relaxed_ordering: bool,
    /// `VCCL_IB_GPU_DIRECT`: whether the device may be given GPU memory, where a test shows that it works.
    pub gpu_direct: bool,
}

/// All settings, read once per `init`.
#[derive(Clone, Debug)]
pub struct Config {
    /// `VCCL_CUDA_CONTEXT`
    pub cuda_context: ContextKind,
    /// `VCCL_STREAMS`: streams for each GPU; connections beyond that share them.
    pub streams: usize,
    /// `VCCL_HOST_CHUNK`: bytes of one chunk of the staging ring in shared host memory.
    pub host_chunk: usize,
    /// `VCCL_STAGING_CHUNK`: bytes of one chunk of the staging ring in the receiver's GPU.
    pub staging_chunk: usize,
    /// `VCCL_STAGING_MEMORY`: bytes of all such rings of the process together.
    pub staging_memory: usize,
    /// `VCCL_MAX_MAPPINGS`: mappings of peers' memory that this process keeps at most.
    pub max_mappings: usize,
    /// `VCCL_SPEED`: the speed that the device reports, in Mbit/s.
    pub speed_mbps: i32,
    /// `VCCL_CONNECT_TIMEOUT`: seconds that a connection may take to come about.
    pub connect_timeout_s: u64,
    /// `VCCL_CLOSE_TIMEOUT`: milliseconds that close and deregMr wait for copies and for the peer.
    pub close_timeout_ms: u64,
    /// `VCCL_TRANSPORT`: the ways that connections may take.
    pub transports: Transports,
    /// `VCCL_SOCKET_IFNAME`: the network interfaces that TCP may use; `None`: any.
    pub socket_ifname: Option<String>,
    /// `VCCL_SOCKET_FAMILY`: `AF_INET` or `AF_INET6`; `None`: either.
    pub socket_family: Option<i32>,
    /// `VCCL_SOCKET_NTHREADS`: with the next, how many sockets a connection over TCP has.
    pub socket_threads: usize,
    /// `VCCL_NSOCKS_PERTHREAD`
    pub sockets_per_thread: usize,
    /// `VCCL_IB_*`
    pub ib: Ib,
    /// `VCCL_TIMING`: measure each message's stages, and log the means when its connection closes.
    pub timing: bool,
    rows: Vec<Row>,
}

/// Bytes with an optional binary suffix K, M or G.
fn parse_bytes(s: &str) -> Option<usize> {
    let s = s.trim();
    let (digits, shift) = match s.as_bytes().last()? {
        b'k' | b'K' => (&s[..s.len() - 1], 10),
        b'm' | b'M' => (&s[..s.len() - 1], 20),
        b'g' | b'G' => (&s[..s.len() - 1], 30),
        _ => (s, 0),
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

/// Settings of NCCL's that we obey.
const NCCL_TAILS: [&str; 19] = [
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_ROCE_VERSION_NUM",
    "NCCL_IB_ADDR_FAMILY",
    "NCCL_IB_ADDR_RANGE",
    "NCCL_IB_TC",
    "NCCL_IB_SL",
    "NCCL_IB_PKEY",
    "NCCL_IB_TIMEOUT",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_ADAPTIVE_ROUTING",
    "NCCL_IB_AR_THRESHOLD",
    "NCCL_IB_PCI_RELAXED_ORDERING",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
];

struct Reader<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
    rows: Vec<Row>,
    complaints: Vec<String>,
}

impl Reader<'_> {
    fn read<T: Clone>(
        &mut self,
        (name, allowed, default, doc): (&'static str, &'static str, &'static str, &'static str),
        parse: impl Fn(&str) -> Option<T>,
    ) -> T {
        let fallback = || parse(default).expect("a default is allowed by its own setting");
        // NCCL's own setting of the same meaning counts where ours is not set.
        let known = NCCL_TAILS
            .iter()
            .find(|n| name.strip_prefix("VCCL_") == n.strip_prefix("NCCL_"));
        let of = |n: &'static str| (self.get)(n).map(|text| (n, text));
        let text = of(name).or_else(|| of(known?));
        let (value, text, source) = match text {
            None => (fallback(), default.to_string(), Source::Default),
            Some((name, text)) => match parse(text.trim()) {
                Some(v) => (v, text, Source::Environment),
                None => {
                    self.complaints.push(format!(
                        "{name}={text} is not usable and was ignored; allowed: {allowed}; \
                         using the default, {default}"
                    ));
                    (fallback(), default.to_string(), Source::Default)
                }
            },
        };
        self.rows.push(Row {
            name,
            allowed,
            default,
            doc,
            value: text,
            source,
        });
        value
    }
}

/// A whole number; as NCCL reads them, `0x` makes it hexadecimal, and a 0 in front octal.
fn number(s: &str) -> Option<i64> {
    let (minus, digits) = match s.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, s),
    };
    let (radix, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let n = i64::from_str_radix(digits, radix).ok()?;
    Some(if minus { -n } else { n })
}

fn in_range<T: PartialOrd + TryFrom<i64>>(lo: T, hi: T) -> impl Fn(&str) -> Option<T> {
    move |s| {
        let n = T::try_from(number(s)?).ok()?;
        (n >= lo && n <= hi).then_some(n)
    }
}

/// A byte, or -1 for none.
fn byte(s: &str) -> Option<Option<u8>> {
    match number(s)? {
        -1 => Some(None),
        n => Some(Some(u8::try_from(n).ok()?)),
    }
}

fn flag(s: &str) -> Option<bool> {
    match s {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

fn chunk(lo: usize, hi: usize) -> impl Fn(&str) -> Option<usize> {
    move |s| parse_bytes(s).filter(|v| (lo..=hi).contains(v) && v % 4096 == 0)
}

impl Ib {
    fn read(r: &mut Reader<'_>) -> Ib {
        Ib {
            disable: r.read(
                ("VCCL_IB_DISABLE", "0 or 1", "0", "1: no RDMA. This and all VCCL_IB_* settings but \
                  the last follow the NCCL_IB_* of the same name where they are not set."),
                flag,
            ),
            hca: r.read(
                (
                    "VCCL_IB_HCA",
                    "names or prefixes with an optional :port, `^` before them for all others, `=` for \
                     whole names",
                    "any",
                    "The RDMA devices and ports that may be used. A number is whole: mlx5_1 does not stand for mlx5_10. \
                     An entry that names nothing is warned of.",
                ),
                |s| HcaFilter::parse(if s == "any" { "" } else { s }).ok(),
            ),
            gid_index: r.read(
                (
                    "VCCL_IB_GID_INDEX",
                    "-1 to 255",
                    "-1",
                    "Entry of the port's table of GIDs; -1: the one that fits the peer's best, by type, family \
                     and subnet.",
                ),
                byte,
            ),
            roce_version: r.read(
                ("VCCL_IB_ROCE_VERSION_NUM", "1 or 2", "2", "The version of RoCE."),
                in_range(1u8, 2),
            ),
            ipv6: r.read(
                (
                    "VCCL_IB_ADDR_FAMILY",
                    "AF_INET or AF_INET6",
                    "AF_INET",
                    "The addresses that RoCE takes first.",
                ),
                |s| match s {
                    "AF_INET" => Some(false),
                    "AF_INET6" => Some(true),
                    _ => None,
                },
            ),
            range: r.read(
                (
                    "VCCL_IB_ADDR_RANGE",
                    "an address, /, bits",
                    "::/0",
                    "The addresses that RoCE may use.",
                ),
                Range::parse,
            ),
            traffic_class: r.read(
                (
                    "VCCL_IB_TC",
                    "-1 to 255",
                    "-1",
                    "Traffic class; -1: what the communicator asks for, else 0.",
                ),
                byte,
            ),
            service_level: r.read(
                ("VCCL_IB_SL", "0 to 15", "0", "Service level."),
                in_range(0u8, 15),
            ),
            pkey_index: r.read(
                ("VCCL_IB_PKEY", "0 to 65535", "0", "Index of the partition key."),
                in_range(0u16, u16::MAX),
            ),
            timeout: r.read(
                (
                    "VCCL_IB_TIMEOUT",
                    "1 to 31",
                    "20",
                    "How long an acknowledgement is waited for: 4.096 us times two to that.",
                ),
                in_range(1u8, 31),
            ),
            retries: r.read(
                (
                    "VCCL_IB_RETRY_CNT",
                    "0 to 7",
                    "7",
                    "How often a write that is not acknowledged is tried again.",
                ),
                in_range(0u8, 7),
            ),
            qps: r.read(
                (
                    "VCCL_IB_QPS_PER_CONNECTION",
                    "1 to 16",
                    "1",
                    "Queue pairs of a connection for each pair of ports; large messages are split over them.",
                ),
                in_range(1usize, 16),
            ),
            adaptive_routing: r.read(
                (
                    "VCCL_IB_ADAPTIVE_ROUTING",
                    "-1, 0 or 1",
                    "-1",
                    "Whether packets of a message may take several routes: its bytes and what announces them \
                     are then written apart. -1: on InfiniBand.",
                ),
                |s| match s {
                    "-1" => Some(None),
                    s => flag(s).map(Some),
                },
            ),
            routing_threshold: r.read(
                (
                    "VCCL_IB_AR_THRESHOLD",
                    "0 to 1G",
                    "8192",
                    "Bytes of a message beyond which that is done.",
                ),
                |s| parse_bytes(s).filter(|v| *v <= 1 << 30),
            ),
            relaxed_ordering: r.read(
                (
                    "VCCL_IB_PCI_RELAXED_ORDERING",
                    "0, 1 or 2",
                    "2",
                    "Whether the device's writes of data may overtake each other on the PCI bus: 0 never, 1 and \
                     2 where the device and library can.",
                ),
                |s| match s {
                    "0" => Some(false),
                    "1" | "2" => Some(true),
                    _ => None,
                },
            ),
            gpu_direct: r.read(
                (
                    "VCCL_IB_GPU_DIRECT",
                    "0 or 1",
                    "1",
                    "1: the RDMA device reads and writes GPU memory itself, if a test at the start shows that it \
                     can; else, and with 0, copy engines move it through page-locked memory.",
                ),
                flag,
            ),
        }
    }
}

impl Config {
    /// Reads every setting through `get`; also returns one text for each value that was refused.
    pub fn read(get: &dyn Fn(&str) -> Option<String>) -> (Config, Vec<String>) {
        let mut r = Reader {
            get,
            rows: Vec::new(),
            complaints: Vec::new(),
        };
        let config = Config {
            cuda_context: r.read(
                (
                    "VCCL_CUDA_CONTEXT",
                    "private or primary",
                    "private",
                    "The CUDA context of the copies. One of our own for each GPU (some 500 MiB of its \
                     memory) is not held up by calls that wait for kernels in the application's, as \
                     cudaFree does; in the application's primary context they can hang the job.",
                ),
                |s| match s {
                    "primary" => Some(ContextKind::Primary),
                    "private" => Some(ContextKind::Private),
                    _ => None,
                },
            ),
            streams: r.read(
                (
                    "VCCL_STREAMS",
                    "1 to 1024",
                    "32",
                    "CUDA streams for each GPU; connections beyond that number share them.",
                ),
                in_range(1usize, 1024),
            ),
            host_chunk: r.read(
                (
                    "VCCL_HOST_CHUNK",
                    "4K to 16M, a multiple of 4K",
                    "64K",
                    "Bytes of each of the 8 chunks through which a connection moves host memory.",
                ),
                chunk(4 << 10, 16 << 20),
            ),
            staging_chunk: r.read(
                (
                    "VCCL_STAGING_CHUNK",
                    "64K to 256M, a multiple of 4K",
                    "8M",
                    "Bytes of each of the 4 chunks in the receiver's GPU through which memory goes that \
                     cannot be exported.",
                ),
                chunk(64 << 10, 256 << 20),
            ),
            staging_memory: r.read(
                (
                    "VCCL_STAGING_MEMORY",
                    "0 to 1024G",
                    "1G",
                    "Bytes of GPU memory that a process uses for such chunks at most, over all \
                     connections; connections beyond that go through the host.",
                ),
                |s| parse_bytes(s).filter(|v| *v <= 1 << 40),
            ),
            max_mappings: r.read(
                (
                    "VCCL_MAX_MAPPINGS",
                    "1 to 1000000",
                    "8192",
                    "Mappings of peers' allocations that a process keeps at most; memory beyond that is \
                     staged.",
                ),
                in_range(1usize, 1_000_000),
            ),
            speed_mbps: r.read(
                (
                    "VCCL_SPEED",
                    "1000 to 10000000",
                    "400000",
                    "Speed in Mbit/s that the device reports; NCCL chooses channels and algorithms by it.",
                ),
                in_range(1000i32, 10_000_000),
            ),
            connect_timeout_s: r.read(
                (
                    "VCCL_CONNECT_TIMEOUT",
                    "1 to 3600",
                    "60",
                    "Seconds that a connection may take to come about before connect reports an error.",
                ),
                in_range(1u64, 3600),
            ),
            close_timeout_ms: r.read(
                (
                    "VCCL_CLOSE_TIMEOUT",
                    "10 to 60000",
                    "800",
                    "Milliseconds that close and deregMr wait for copies in flight and for the peer.",
                ),
                in_range(10u64, 60_000),
            ),
            transports: r.read(
                (
                    "VCCL_TRANSPORT",
                    "copy_engine, verbs and tcp, with commas between",
                    "copy_engine,verbs,tcp",
                    "The ways that connections may take; each takes the best of them that its two ends can \
                     prove: copy_engine inside a host, verbs (RDMA) between hosts, tcp else.",
                ),
                Transports::parse,
            ),
            socket_ifname: r.read(
                (
                    "VCCL_SOCKET_IFNAME",
                    "names or prefixes, `^` before them for all others, `=` for whole names",
                    "any",
                    "The network interfaces that TCP may use. Not set, NCCL_SOCKET_IFNAME counts.",
                ),
                |s| Some((s != "any").then(|| s.to_string())),
            ),
            socket_family: r.read(
                (
                    "VCCL_SOCKET_FAMILY",
                    "any, AF_INET or AF_INET6",
                    "any",
                    "The addresses that TCP may use. Not set, NCCL_SOCKET_FAMILY counts.",
                ),
                |s| match s {
                    "any" => Some(None),
                    "AF_INET" => Some(Some(libc::AF_INET)),
                    "AF_INET6" => Some(Some(libc::AF_INET6)),
                    _ => None,
                },
            ),
            socket_threads: r.read(
                (
                    "VCCL_SOCKET_NTHREADS",
                    "1 to 16",
                    "1",
                    "Threads that move the bytes of each connection over TCP, once it has large messages; \
                     1: the one that polls, alone. Times VCCL_NSOCKS_PERTHREAD: its sockets. Not set, \
                     NCCL_SOCKET_NTHREADS counts.",
                ),
                in_range(1usize, 16),
            ),
            sockets_per_thread: r.read(
                (
                    "VCCL_NSOCKS_PERTHREAD",
                    "1 to 64",
                    "1",
                    "See VCCL_SOCKET_NTHREADS; 64 sockets are the most. Not set, NCCL_NSOCKS_PERTHREAD \
                     counts.",
                ),
                in_range(1usize, 64),
            ),
            ib: Ib::read(&mut r),
            timing: r.read(
                (
                    "VCCL_TIMING",
                    "0 or 1",
                    "0",
                    "Measure each message's stages; the means are logged when its connection closes.",
                ),
                flag,
            ),
            rows: Vec::new(),
        };
        (
            Config {
                rows: r.rows,
                ..config
            },
            r.complaints,
        )
    }

    /// The settings as rows of a table, for `vccl env` and the documentation.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The settings with their defaults as a Markdown table.
    pub fn markdown(&self) -> String {
        let mut table =
            String::from("| setting | default | allowed | what it does |\n|---|---|---|---|\n");
        for r in &self.rows {
            table += &format!(
                "| `{}` | {} | {} | {} |\n",
                r.name, r.default, r.allowed, r.doc
            );
        }
        table
    }
}

static CURRENT: RwLock<Option<Arc<Config>>> = RwLock::new(None);

/// Reads the environment anew; refused values are warned of.
pub fn reload() -> Arc<Config> {
    let (config, complaints) = Config::read(&|name| {
        // What is no UTF-8 is no value of any setting, and is refused as such.
        std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
    });
    for c in complaints {
        log::warn!("{c}");
    }
    let config = Arc::new(config);
    *CURRENT.write().unwrap_or_else(|e| e.into_inner()) = Some(config.clone());
    config
}

/// The settings in force. Not for the data path: connections keep what they need.
pub fn current() -> Arc<Config> {
    if let Some(c) = CURRENT.read().unwrap_or_else(|e| e.into_inner()).as_ref() {
        return c.clone();
    }
    reload()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> (Config, Vec<String>) {
        Config::read(&|n| pairs.iter().find(|p| p.0 == n).map(|p| p.1.to_string()))
    }

    #[test]
    fn defaults_are_allowed_and_marked() {
        let (c, complaints) = with(&[]);
        assert!(complaints.is_empty());
        assert_eq!(c.rows().len(), 31);
        assert!(c
            .rows()
            .iter()
            .all(|r| r.source == Source::Default && r.value == r.default));
        assert_eq!(c.host_chunk, 64 << 10);
    }

    #[test]
    fn the_documentation_has_this_table() {
        let table = with(&[]).0.markdown();
        for page in ["README.md", "docs/settings.md"] {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
            let text = std::fs::read_to_string(&path).unwrap();
            let found = text
                .split_once("<!-- settings: begin -->\n")
                .and_then(|(_, rest)| rest.split_once("<!-- settings: end -->"))
                .map(|(table, _)| table);
            assert_eq!(
                found,
                Some(table.as_str()),
                "{page} is to have this table:\n{table}"
            );
        }
    }

    #[test]
    fn values_from_the_environment() {
        let (c, complaints) = with(&[
            ("VCCL_HOST_CHUNK", "1M"),
            ("VCCL_CUDA_CONTEXT", "primary"),
            ("VCCL_TIMING", " 1 "),
        ]);
        assert!(complaints.is_empty(), "{complaints:?}");
        assert_eq!(c.host_chunk, 1 << 20);
        assert_eq!(c.cuda_context, ContextKind::Primary);
        assert!(c.timing);
        let row = c
            .rows()
            .iter()
            .find(|r| r.name == "VCCL_HOST_CHUNK")
            .unwrap();
        assert_eq!(
            (row.source, row.value.as_str()),
            (Source::Environment, "1M")
        );
    }

    #[test]
    fn ranges_of_addresses() {
        let holds = |range: &str, a: &str| Range::parse(range).unwrap().holds(a.parse().unwrap());
        assert!(holds("::/0", "10.1.2.3") && holds("0.0.0.0/0", "fd00::1"));
        assert!(holds("10.1.0.0/16", "10.1.255.3") && !holds("10.1.0.0/16", "10.2.0.1"));
        assert!(holds("10.1.0.7/32", "10.1.0.7") && !holds("10.1.0.7/32", "10.1.0.6"));
        assert!(holds("fd00:1::/32", "fd00:1::5") && !holds("fd00:1::/32", "fd00:2::5"));
        assert!(!holds("fd00::/8", "10.0.0.1"));
        for bad in [
            "",
            "10.0.0.0",
            "10.0.0.0/33",
            "fd00::/129",
            "x/8",
            "10.0.0.0/-1",
        ] {
            assert_eq!(Range::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn nccl_s_own_settings_count_where_ours_are_not_set() {
        let (c, complaints) = with(&[
            ("NCCL_IB_HCA", "=mlx5_1"),
            ("NCCL_IB_TC", "106"),
            ("NCCL_IB_QPS_PER_CONNECTION", "4"),
            ("VCCL_IB_QPS_PER_CONNECTION", "2"),
            ("NCCL_IB_GID_INDEX", "3"),
        ]);
        assert!(complaints.is_empty(), "{complaints:?}");
        assert!(c.ib.hca.matches("mlx5_1", 1) && !c.ib.hca.matches("mlx5_10", 1));
        assert_eq!((c.ib.traffic_class, c.ib.qps), (Some(106), 2));
        assert_eq!(c.ib.gid_index, Some(3));
    }

    #[test]
    fn numbers_are_read_as_nccl_reads_them() {
        for (text, n) in [
            ("0", Some(0)),
            ("-1", Some(-1)),
            ("106", Some(106)),
            ("0x6a", Some(106)),
            ("0X6A", Some(106)),
            ("0152", Some(106)),
            ("-0x1", Some(-1)),
            ("", None),
            ("-", None),
            ("0x", None),
            ("08", None),
            ("--1", None),
            ("0x-1", None),
            ("1e3", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(number(text), n, "{text}");
        }
        let (c, complaints) = with(&[("NCCL_IB_TC", "0x6a"), ("NCCL_IB_TIMEOUT", "99")]);
        assert_eq!(c.ib.traffic_class, Some(106));
        assert_eq!(complaints.len(), 1);
        assert!(
            complaints[0].starts_with("NCCL_IB_TIMEOUT=99 "),
            "{complaints:?}"
        );
    }

    #[test]
    fn refused_values_are_named_and_the_default_stands() {
        for (name, bad) in [
            ("VCCL_HOST_CHUNK", "5000"),
            ("VCCL_HOST_CHUNK", "99999999999999999999G"),
            ("VCCL_HOST_CHUNK", ""),
            ("VCCL_STREAMS", "0"),
            ("VCCL_STREAMS", "many"),
            ("VCCL_CUDA_CONTEXT", "Primary "),
            ("VCCL_SPEED", "-1"),
            ("VCCL_TIMING", "yes"),
        ] {
            let (c, complaints) = with(&[(name, bad)]);
            assert_eq!(complaints.len(), 1, "{name}={bad}");
            assert!(
                complaints[0].contains(name) && complaints[0].contains("allowed"),
                "{complaints:?}"
            );
            assert!(c.rows().iter().all(|r| r.source == Source::Default));
        }
    }
}
