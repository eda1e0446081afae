//! Which ports there are to send through: one entry for each active port that the filter chooses.

use std::fmt;
use std::path::{Path, PathBuf};

use super::filter::{Entry, Filter};
use super::{sys, Verbs, SYSFS};
use crate::error::Result;

/// The speed of a port that tells none, in Mbit/s: what NCCL takes then.
const UNKNOWN_MBPS: u32 = 10_000;
/// The kernel's number for what is no iWARP and no other kind of device.
const NODE_CA: u32 = 1;

/// What a port speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinkLayer::InfiniBand => "InfiniBand",
            LinkLayer::Ethernet => "RoCE",
        })
    }
}

/// An active port.
#[derive(Clone, PartialEq, Debug)]
pub struct Port {
    /// The device's name.
    pub device: String,
    /// The port's number, from 1 on.
    pub port: u8,
    /// The device's place below `/sys/devices`; none if it is no PCI device (soft-RoCE).
    pub pci_path: Option<PathBuf>,
    /// What the functions of one card have in common.
    pub guid: u64,
    /// In Mbit/s.
    pub speed_mbps: u32,
    /// What it speaks.
    pub link_layer: LinkLayer,
    /// In microseconds; 0 stands for unknown.
    pub latency_us: f32,
    /// The port's local identifier; InfiniBand only.
    pub lid: u16,
    /// `IBV_MTU_*`: 1 for 256 up to 5 for 4096.
    pub mtu: i32,
    /// Entries of the table of GIDs.
    pub gids: i32,
    /// Queue pairs that the device can have.
    pub max_qp: i32,
}

/// A device or port that is there and chosen but of no use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Skipped {
    /// The device's name.
    pub device: String,
    /// The port; none if it is the whole device.
    pub port: Option<u8>,
    /// Why.
    pub reason: String,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device)?;
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// What there is.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Found {
    /// The ports to use, in the library's order.
    pub ports: Vec<Port>,
    /// What is chosen but of no use, and why.
    pub skipped: Vec<Skipped>,
    /// Entries of the filter that name nothing there is.
    pub unmatched: Vec<Entry>,
    /// Devices, whether they are chosen or not.
    pub devices: usize,
}

/// A port's attributes with the kernel's own figure of its speed in Mbit/s, or why there are none.
type Asked = std::result::Result<(sys::PortAttr, Option<u32>), String>;

/// What was learned of a device by opening it.
#[derive(Clone, Debug)]
struct Opened {
    node_guid: u64,
    card_guid: u64,
    max_qp: i32,
    ports: Vec<(u8, Asked)>,
}

/// A device, as far as it was looked at.
#[derive(Clone, Debug)]
struct Probe {
    name: String,
    pci_path: Option<PathBuf>,
    /// The kind of the device, if the kernel tells.
    node_type: Option<u32>,
    /// None if the filter wants none of its ports.
    opened: Option<std::result::Result<Opened, String>>,
}

/// Lanes of a port, from the bit in `active_width`.
pub fn lanes(width: u8) -> Option<u32> {
    match width {
        1 => Some(1),
        2 => Some(4),
        4 => Some(8),
        8 => Some(12),
        16 => Some(2),
        _ => None,
    }
}

/// Speed of a lane in Mbit/s, from the bit in `active_speed` or `active_speed_ex`.
pub fn lane_mbps(speed: u32) -> Option<u32> {
    match speed {
        1 => Some(2_500),      // SDR
        2 => Some(5_000),      // DDR
        4 | 8 => Some(10_000), // QDR, FDR10
        16 => Some(14_000),    // FDR
        32 => Some(25_000),    // EDR
        64 => Some(50_000),    // HDR
        128 => Some(100_000),  // NDR
        256 => Some(200_000),  // XDR
        _ => None,
    }
}

/// A port's speed in Mbit/s. `rate` is the kernel's own figure: what the library tells ends at NDR,
/// as [`sys::PortAttr`] says, and the kernel puts NDR there for what is faster.
fn speed_mbps(attr: &sys::PortAttr, rate: Option<u32>) -> u32 {
    let speed = match attr.active_speed_ex {
        0 => attr.active_speed.into(),
        wider => wider,
    };
    let told = lane_mbps(speed).and_then(|lane| Some(lane * lanes(attr.active_width)?));
    told.max(rate)
        .filter(|&mbps| mbps > 0)
        .unwrap_or(UNKNOWN_MBPS)
}

/// Mbit/s, from a text such as `100 Gb/sec (4X EDR)`.
fn parse_rate(text: &str) -> Option<u32> {
    let (number, rest) = text.trim().split_once(' ')?;
    let gbps: f64 = number.parse().ok()?;
    let known = rest.starts_with("Gb/sec") && gbps > 0.0 && gbps < 1e6;
    known.then_some((gbps * 1000.0).round() as u32)
}

/// A port's state, for people.
fn state(state: i32) -> String {
    let name = match state {
        0 => "NOP",
        1 => "DOWN",
        2 => "INIT: no subnet manager has set it up",
        3 => "ARMED",
        4 => "ACTIVE",
        5 => "ACTIVE_DEFER",
        _ => return format!("state {state}"),
    };
    name.into()
}

fn usable(attr: &sys::PortAttr) -> std::result::Result<LinkLayer, String> {
    if attr.state != sys::PORT_ACTIVE {
        return Err(format!("the port is not active ({})", state(attr.state)));
    }
    match attr.link_layer {
        sys::LINK_LAYER_INFINIBAND => Ok(LinkLayer::InfiniBand),
        sys::LINK_LAYER_ETHERNET => Ok(LinkLayer::Ethernet),
        other => Err(format!(
            "its link layer {other} is neither InfiniBand nor Ethernet"
        )),
    }
}

/// Chooses among what was found.
fn choose(probes: Vec<Probe>, filter: &Filter) -> Found {
    let mut found = Found {
        devices: probes.len(),
        ..Found::default()
    };
    let mut seen: Vec<(String, u8)> = Vec::new();
    for probe in probes {
        let skip = |port, reason| Skipped {
            device: probe.name.clone(),
            port,
            reason,
        };
        let opened = match probe.opened {
            Some(Ok(opened)) => opened,
            other => {
                // Its ports are not known: an entry that names one of them names something.
                seen.extend((1..=u8::MAX).map(|port| (probe.name.clone(), port)));
                if let Some(Err(reason)) = other {
                    found.skipped.push(skip(None, reason));
                }
                continue;
            }
        };
        seen.extend(opened.ports.iter().map(|(p, _)| (probe.name.clone(), *p)));
        if let Some(kind) = probe.node_type.filter(|&kind| kind != NODE_CA) {
            let reason = format!("devices of kind {kind} (iWARP and others) are not supported");
            found.skipped.push(skip(None, reason));
            continue;
        }
        for (port, attr) in opened.ports {
            if !filter.matches(&probe.name, port) {
                continue;
            }
            let usable = attr.and_then(|(attr, rate)| Ok((usable(&attr)?, attr, rate)));
            let (link_layer, attr, rate) = match usable {
                Ok(all) => all,
                Err(reason) => {
                    found.skipped.push(skip(Some(port), reason));
                    continue;
                }
            };
            found.ports.push(Port {
                device: probe.name.clone(),
                port,
                pci_path: probe.pci_path.clone(),
                guid: match opened.card_guid {
                    0 => opened.node_guid,
                    guid => guid,
                },
                speed_mbps: speed_mbps(&attr, rate),
                link_layer,
                latency_us: 0.0,
                lid: attr.lid,
                mtu: attr.active_mtu,
                gids: attr.gid_tbl_len,
                max_qp: opened.max_qp,
            });
        }
    }
    let seen = seen.iter().map(|(name, port)| (name.as_str(), *port));
    found.unmatched = filter.unmatched(seen).into_iter().cloned().collect();
    found
}

/// What the files of a device below `sysfs` tell: its place on the PCI bus, and its kind.
fn files(sysfs: &Path, device: &str) -> (Option<PathBuf>, Option<u32>) {
    let folder = sysfs.join(device);
    let pci_path = folder.join("device").canonicalize().ok();
    let kind = std::fs::read_to_string(folder.join("node_type")).ok();
    let kind = kind.and_then(|text| text.split(':').next()?.trim().parse().ok());
    (pci_path, kind)
}

fn rate(sysfs: &Path, device: &str, port: u8) -> Option<u32> {
    let path = sysfs.join(format!("{device}/ports/{port}/rate"));
    parse_rate(&std::fs::read_to_string(path).ok()?)
}

fn open(device: &super::Device<'_>, filter: &Filter) -> Result<Opened> {
    let context = device.open()?;
    let attr = context.query_device()?;
    let name = context.name();
    let ports = (1..=attr.phys_port_cnt)
        .map(|port| {
            // A port that is not wanted is listed all the same: entries may name it.
            if !filter.matches(name, port) {
                return (port, Err(String::new()));
            }
            let queried = context.query_port(port).map_err(|e| e.text().to_owned());
            (
                port,
                queried.map(|a| (a, rate(Path::new(SYSFS), name, port))),
            )
        })
        .collect();
    let opened = Opened {
        node_guid: u64::from_be(attr.node_guid),
        card_guid: u64::from_be(attr.sys_image_guid),
        max_qp: attr.max_qp,
        ports,
    };
    context.destroy()?;
    Ok(opened)
}

/// Looks at all devices. One that cannot be opened is skipped; only a failing list is an error.
pub fn enumerate(verbs: &'static Verbs, filter: &Filter) -> Result<Found> {
    let list = verbs.devices()?;
    let probe = |device: super::Device<'_>| {
        let name = device.name();
        let (pci_path, node_type) = files(Path::new(SYSFS), &name);
        let wanted = filter.may_match(&name);
        let opened = wanted.then(|| open(&device, filter).map_err(|e| e.text().to_owned()));
        Probe {
            name,
            pci_path,
            node_type,
            opened,
        }
    };
    Ok(choose(list.iter().map(probe).collect(), filter))
}

/// The RDMA devices that the kernel shows, whoever may use them.
pub fn of_kernel() -> Vec<String> {
    let names = std::fs::read_dir(SYSFS).into_iter();
    let mut names: Vec<String> = names
        .flatten()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(state: i32, width: u8, speed: u8) -> sys::PortAttr {
        sys::PortAttr {
            state,
            active_width: width,
            active_speed: speed,
            link_layer: sys::LINK_LAYER_ETHERNET,
            lid: 7,
            active_mtu: 5,
            gid_tbl_len: 16,
            ..Default::default()
        }
    }

    fn device(name: &str, ports: &[sys::PortAttr]) -> Probe {
        Probe {
            name: name.into(),
            pci_path: Some(PathBuf::from("/sys/devices/pci0000:00/0000:00:01.0")),
            node_type: Some(1),
            opened: Some(Ok(Opened {
                node_guid: 5,
                card_guid: 9,
                max_qp: 100,
                ports: (1u8..).zip(ports.iter().map(|a| Ok((*a, None)))).collect(),
            })),
        }
    }

    fn names(found: &Found) -> Vec<String> {
        let name = |p: &Port| format!("{}:{}", p.device, p.port);
        found.ports.iter().map(name).collect()
    }

    #[test]
    fn each_active_port_is_an_entry() {
        let up = attr(4, 2, 32);
        let mut infiniband = up;
        infiniband.link_layer = sys::LINK_LAYER_INFINIBAND;
        let probes = vec![
            device("a", &[up, attr(1, 2, 32), infiniband]),
            device("b", &[up]),
        ];
        let found = choose(probes, &Filter::default());
        assert_eq!(names(&found), ["a:1", "a:3", "b:1"]);
        assert_eq!(
            found.ports[0],
            Port {
                device: "a".into(),
                port: 1,
                pci_path: Some(PathBuf::from("/sys/devices/pci0000:00/0000:00:01.0")),
                guid: 9,
                speed_mbps: 100_000,
                link_layer: LinkLayer::Ethernet,
                latency_us: 0.0,
                lid: 7,
                mtu: 5,
                gids: 16,
                max_qp: 100,
            }
        );
        assert_eq!(found.ports[1].link_layer, LinkLayer::InfiniBand);
        assert_eq!(found.skipped.len(), 1);
        assert_eq!(
            found.skipped[0].to_string(),
            "a:2: the port is not active (DOWN)"
        );
    }

    #[test]
    fn there_is_no_limit_of_devices() {
        let up = attr(4, 2, 32);
        let probes = (0..200).map(|i| device(&format!("mlx5_{i}"), &[up, up]));
        let found = choose(probes.collect(), &Filter::default());
        assert_eq!(found.ports.len(), 400);
    }

    #[test]
    fn what_cannot_be_used_is_skipped_with_the_reason() {
        let up = attr(4, 2, 32);
        let mut closed = device("closed", &[]);
        closed.opened = Some(Err("cannot open".into()));
        let mut iwarp = device("iwarp", &[up]);
        iwarp.node_type = Some(4);
        let mut odd = up;
        odd.link_layer = 0;
        let mut broken = device("broken", &[]);
        if let Some(Ok(opened)) = &mut broken.opened {
            opened.ports = vec![(1, Err("cannot query".into())), (2, Ok((up, None)))];
        }
        let probes = vec![closed, iwarp, device("odd", &[odd]), broken];
        let found = choose(probes, &Filter::default());
        assert_eq!(names(&found), ["broken:2"]);
        let skipped: Vec<_> = found.skipped.iter().map(|s| s.to_string()).collect();
        assert_eq!(
            skipped,
            [
                "closed: cannot open",
                "iwarp: devices of kind 4 (iWARP and others) are not supported",
                "odd:1: its link layer 0 is neither InfiniBand nor Ethernet",
                "broken:1: cannot query",
            ]
        );
    }

    #[test]
    fn the_filter_chooses_and_its_idle_entries_are_told() {
        let up = attr(4, 2, 32);
        let mut unopened = device("c", &[]);
        unopened.opened = None;
        let mut closed = device("d", &[]);
        closed.opened = Some(Err("cannot open".into()));
        let probes = vec![device("a", &[up, up]), device("b", &[up]), unopened, closed];
        let choose = |text| {
            let found = choose(probes.clone(), &Filter::parse(text).unwrap());
            let told: Vec<_> = found.unmatched.iter().map(|e| e.to_string()).collect();
            (names(&found), told)
        };
        let is = |names: &[&str], told: &[&str]| {
            let strings = |s: &[&str]| s.iter().map(|s| s.to_string()).collect::<Vec<_>>();
            (strings(names), strings(told))
        };
        assert_eq!(choose(""), is(&["a:1", "a:2", "b:1"], &[]));
        assert_eq!(choose("a:2"), is(&["a:2"], &[]));
        assert_eq!(choose("a:3,b"), is(&["b:1"], &["a:3"]));
        assert_eq!(choose("^=a:1,x"), is(&["a:2", "b:1"], &["x"]));
        assert_eq!(choose("^c:2,d:1"), is(&["a:1", "a:2", "b:1"], &[]));
    }

    #[test]
    fn speed_is_lanes_times_speed_of_a_lane() {
        for (width, speed, mbps) in [
            (1, 1, 2_500),     // 1x SDR
            (2, 4, 40_000),    // 4x QDR
            (2, 8, 40_000),    // 4x FDR10
            (2, 16, 56_000),   // 4x FDR
            (2, 32, 100_000),  // 4x EDR
            (16, 32, 50_000),  // 2x EDR
            (2, 64, 200_000),  // 4x HDR
            (2, 128, 400_000), // 4x NDR
            (4, 128, 800_000), // 8x NDR
            (8, 2, 60_000),    // 12x DDR
            (0, 32, 10_000),   // unknown
            (2, 0, 10_000),
            (3, 3, 10_000),
        ] {
            assert_eq!(
                speed_mbps(&attr(4, width, speed), None),
                mbps,
                "{width} {speed}"
            );
        }
        let mut wide = attr(4, 2, 128);
        wide.active_speed_ex = 256;
        assert_eq!(speed_mbps(&wide, None), 800_000);
    }

    #[test]
    fn the_kernel_knows_speeds_that_the_library_cannot_tell() {
        assert_eq!(speed_mbps(&attr(4, 2, 128), Some(800_000)), 800_000);
        assert_eq!(speed_mbps(&attr(4, 2, 0), Some(800_000)), 800_000);
        assert_eq!(speed_mbps(&attr(4, 2, 32), Some(25_000)), 100_000);
    }

    #[test]
    fn rates_are_read() {
        assert_eq!(parse_rate("100 Gb/sec (4X EDR)\n"), Some(100_000));
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)\n"), Some(2_500));
        assert_eq!(parse_rate("800 Gb/sec (4X XDR)"), Some(800_000));
        for odd in [
            "",
            "\n",
            "100",
            "x Gb/sec",
            "-1 Gb/sec",
            "0 Gb/sec",
            "1e300 Gb/sec",
            "nan Gb/sec",
            "5 Mb/sec",
        ] {
            assert_eq!(parse_rate(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn a_card_without_a_guid_has_its_devices() {
        let mut probe = device("a", &[attr(4, 2, 32)]);
        if let Some(Ok(opened)) = &mut probe.opened {
            opened.card_guid = 0;
        }
        probe.pci_path = None;
        let found = choose(vec![probe], &Filter::default());
        assert_eq!(found.ports[0].guid, 5);
        assert_eq!(found.ports[0].pci_path, None);
    }

    #[test]
    fn missing_files_tell_nothing() {
        let nowhere = Path::new("/nonexistent");
        assert_eq!(files(nowhere, "a"), (None, None));
        assert_eq!(rate(nowhere, "a", 1), None);
    }
}
