//! The devices that NCCL sees: one for each active RDMA port, or one for everything where there is none.

use std::ffi::{c_int, CString};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, RwLock};

use super::handle::Place;
use super::{Properties, MAX_MESSAGE, PTR_CUDA, PTR_HOST};
use crate::config::{self, Config, Transport};
use crate::error::{Error, Result};
use crate::ibverbs::devices::{enumerate, of_kernel, Found, Port};
use crate::ibverbs::verbs;
use crate::sync::lock;
use crate::transport::verbs::wire::MAX_PORTS;

/// A device. Lives as long as the process, for NCCL keeps pointers into it.
#[derive(Debug)]
pub struct Device {
    /// What NCCL is told.
    pub properties: Properties,
    /// Its RDMA ports: none for the device of a host without RDMA, several for a virtual one.
    pub ports: Vec<Port>,
    /// The devices that it joins, itself if it is no virtual one.
    pub members: Vec<c_int>,
}

/// All devices, in NCCL's numbering; those that NCCL has joined come last.
static TABLE: RwLock<Vec<&'static Device>> = RwLock::new(Vec::new());
/// Why the last look found no RDMA port; empty: it found some.
static NO_RDMA: RwLock<String> = RwLock::new(String::new());

fn read() -> Vec<&'static Device> {
    TABLE.read().unwrap_or_else(|e| e.into_inner()).clone()
}

/// The ports to use, or why there are none.
fn find(config: &Config) -> std::result::Result<Vec<Port>, String> {
    if !config.transports.allow(Transport::Verbs) {
        return Err("VCCL_TRANSPORT excludes verbs".into());
    }
    if config.ib.disable {
        return Err("VCCL_IB_DISABLE or NCCL_IB_DISABLE is 1".into());
    }
    let verbs = verbs().map_err(str::to_string)?;
    // Before anything is registered. Kernels from 5.12 on need nothing done.
    if let Err(e) = verbs.fork_init() {
        log::info!("{e}: a process that forks may lose what it has registered");
    }
    let found: Found = enumerate(verbs, &config.ib.hca).map_err(|e| e.text().to_string())?;
    for s in &found.skipped {
        log::info!("RDMA device {s}: not used");
    }
    for e in &found.unmatched {
        log::warn!(
            "VCCL_IB_HCA={}: {e} names no RDMA device or port of this host",
            config.ib.hca
        );
    }
    match (found.ports.is_empty(), found.devices) {
        (false, _) => Ok(found.ports),
        (true, 0) => Err(none_of(&of_kernel())),
        (true, _) => Err("no RDMA port is active".into()),
    }
}

/// Why libibverbs finds no device, where the kernel has these.
fn none_of(kernel: &[String]) -> String {
    if kernel.is_empty() {
        return "there is no RDMA device".into();
    }
    format!(
        "the kernel has RDMA devices ({}), of which libibverbs finds none: is /dev/infiniband there and allowed, \
         in this container too, and is their driver for libibverbs installed?",
        kernel.join(", ")
    )
}

fn ptr_support() -> c_int {
    PTR_HOST
        | if crate::cuda::driver().is_ok() {
            PTR_CUDA
        } else {
            0
        }
}

fn name(text: String) -> CString {
    CString::new(text.replace('\0', "")).expect("no NUL is left")
}

impl Device {
    /// The device of a host without RDMA.
    fn plain(config: &Config) -> Device {
        let boot = Place::here().boot;
        let half = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("8 bytes"));
        Device {
            properties: Properties {
                name: name("vccl0".into()),
                // NCCL must not take the device for one behind a GPU's bridge: it then looks for GPUs
                // where there are none.
                pci_path: None,
                guid: half(&boot[..8]) ^ half(&boot[8..]),
                ptr_support: ptr_support(),
                speed_mbps: config.speed_mbps,
                port: 1,
                latency_us: 0.0,
                max_comms: 1 << 16,
                max_recvs: 1,
                max_p2p_bytes: MAX_MESSAGE,
                max_coll_bytes: MAX_MESSAGE,
            },
            ports: Vec::new(),
            members: vec![0],
        }
    }

    fn of_ports(ports: Vec<Port>, members: Vec<c_int>) -> Device {
        let first = &ports[0];
        // NCCL knows devices by name: the ports of one HCA must not have the same.
        let own = |p: &Port| match p.port {
            1 => p.device.clone(),
            n => format!("{}:{n}", p.device),
        };
        let names: Vec<String> = ports.iter().map(own).collect();
        let speed: i64 = ports.iter().map(|p| i64::from(p.speed_mbps)).sum();
        let path = first.pci_path.as_ref();
        Device {
            properties: Properties {
                name: name(names.join("+")),
                pci_path: path.and_then(|p| CString::new(p.as_os_str().as_bytes()).ok()),
                guid: first.guid,
                ptr_support: ptr_support(),
                speed_mbps: speed.min(c_int::MAX.into()) as c_int,
                port: first.port.into(),
                latency_us: first.latency_us,
                max_comms: ports.iter().map(|p| p.max_qp).min().unwrap_or(0).max(1),
                max_recvs: 1,
                max_p2p_bytes: MAX_MESSAGE,
                max_coll_bytes: MAX_MESSAGE,
            },
            ports,
            members,
        }
    }
}

/// A device for each port, or one for a host without any.
fn physical(config: &Config, ports: Vec<Port>) -> Vec<Device> {
    match ports.is_empty() {
        true => vec![Device::plain(config)],
        false => (0..)
            .zip(ports)
            .map(|(i, p)| Device::of_ports(vec![p], vec![i]))
            .collect(),
    }
}

/// That there is no RDMA here, and why.
pub fn no_rdma() -> String {
    match &**NO_RDMA.read().unwrap_or_else(|e| e.into_inner()) {
        "" => "this device has no RDMA port".into(),
        why => format!("no RDMA here: {why}"),
    }
}

/// Looks for devices. `fresh`: nobody uses those that were found before.
pub fn look(config: &Config, fresh: bool) {
    let mut table = TABLE.write().unwrap_or_else(|e| e.into_inner());
    if !fresh && !table.is_empty() {
        return;
    }
    let (ports, why) = match find(config) {
        Ok(ports) => (ports, String::new()),
        Err(why) => {
            log::info!("no RDMA: {why}");
            (Vec::new(), why)
        }
    };
    *NO_RDMA.write().unwrap_or_else(|e| e.into_inner()) = why;
    let devices = physical(config, ports);
    let physical = table.iter().filter(|d| d.members.len() == 1);
    let same = |(a, b): (&&Device, &Device)| {
        a.ports == b.ports && a.properties.speed_mbps == b.properties.speed_mbps
    };
    if physical.clone().count() == devices.len() && physical.zip(&devices).all(same) {
        return;
    }
    for d in devices.iter().filter(|d| !d.ports.is_empty()) {
        let p = &d.ports[0];
        log::info!(
            "RDMA device {}: port {}, {}, {} Mbit/s",
            d.properties.name.to_string_lossy(),
            p.port,
            p.link_layer,
            p.speed_mbps
        );
    }
    *table = devices
        .into_iter()
        .map(|d| &*Box::leak(Box::new(d)))
        .collect();
}

/// How many there are.
pub fn count() -> c_int {
    let known = read().len();
    if known == 0 {
        look(&config::current(), true);
        return read().len() as c_int;
    }
    known as c_int
}

/// Device `dev`.
pub fn get(dev: c_int) -> Result<&'static Device> {
    let n = count();
    let found = usize::try_from(dev)
        .ok()
        .and_then(|i| read().get(i).copied());
    found.ok_or_else(|| {
        Error::invalid_argument(format!("there is no device {dev}: vccl has {n}, from 0 on"))
    })
}

/// Joins devices into a virtual one; its number.
pub fn join(members: &[c_int]) -> Result<c_int> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one_at_a_time = lock(&ONE);
    let parts = members
        .iter()
        .map(|m| get(*m))
        .collect::<Result<Vec<_>>>()?;
    let ports: Vec<Port> = parts.iter().flat_map(|d| d.ports.clone()).collect();
    if parts.is_empty() || parts.iter().any(|d| d.ports.is_empty()) {
        return Err(Error::invalid_usage(
            "only devices with an RDMA port can be joined into a virtual device",
        ));
    }
    if ports.len() > MAX_PORTS {
        return Err(Error::invalid_usage(format!(
            "a virtual device of {} ports is asked for: {MAX_PORTS} are the most",
            ports.len()
        )));
    }
    if ports.iter().any(|p| p.link_layer != ports[0].link_layer) {
        return Err(Error::invalid_usage(
            "InfiniBand and RoCE ports cannot be joined into a virtual device",
        ));
    }
    if (1..ports.len()).any(|i| ports[..i].contains(&ports[i])) {
        return Err(Error::invalid_usage(
            "a port is named twice for a virtual device",
        ));
    }
    if members.len() == 1 {
        return Ok(members[0]);
    }
    let mut table = TABLE.write().unwrap_or_else(|e| e.into_inner());
    // NCCL asks anew for each of its communicators.
    if let Some(i) = table.iter().position(|d| d.members == members) {
        return Ok(i as c_int);
    }
    let device = Device::of_ports(ports, members.to_vec());
    log::info!(
        "virtual device {}: {} Mbit/s",
        device.properties.name.to_string_lossy(),
        device.properties.speed_mbps
    );
    table.push(Box::leak(Box::new(device)));
    Ok(table.len() as c_int - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ibverbs::devices::LinkLayer;
    use std::collections::HashSet;

    #[test]
    fn devices_that_only_the_kernel_sees_are_named() {
        assert_eq!(none_of(&[]), "there is no RDMA device");
        let text = none_of(&["mlx5_0".into(), "mlx5_1".into()]);
        for part in ["mlx5_0, mlx5_1", "/dev/infiniband", "driver"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }

    fn port(device: &str, port: u8, link_layer: LinkLayer, speed_mbps: u32) -> Port {
        Port {
            device: device.into(),
            port,
            pci_path: Some(format!("/sys/devices/pci0000:00/{device}").into()),
            guid: 7,
            speed_mbps,
            link_layer,
            latency_us: 0.0,
            lid: 1,
            mtu: 5,
            gids: 16,
            max_qp: 1000,
        }
    }

    #[test]
    fn forty_devices_of_both_kinds_have_names_of_their_own() {
        let config = Config::read(&|_| None).0;
        let ports = (0..20).flat_map(|i| {
            let kind = match i % 2 {
                0 => LinkLayer::InfiniBand,
                _ => LinkLayer::Ethernet,
            };
            [1, 2].map(|p| port(&format!("mlx5_{i}"), p, kind, 400_000))
        });
        let devices = physical(&config, ports.collect());
        assert_eq!(devices.len(), 40);
        let names: HashSet<_> = devices.iter().map(|d| &d.properties.name).collect();
        assert_eq!(names.len(), 40);
        assert_eq!(devices[2].properties.name.to_str(), Ok("mlx5_1"));
        assert_eq!(devices[3].properties.name.to_str(), Ok("mlx5_1:2"));
        assert_eq!(
            (devices[3].properties.port, devices[3].properties.guid),
            (2, 7)
        );
        for (i, d) in (0..).zip(&devices) {
            assert_eq!(d.members, [i]);
        }
    }

    #[test]
    fn a_host_without_rdma_has_one_device() {
        let config = Config::read(&|_| None).0;
        let devices = physical(&config, Vec::new());
        assert_eq!(devices.len(), 1);
        assert!(devices[0].ports.is_empty() && devices[0].properties.pci_path.is_none());
    }

    #[test]
    fn a_virtual_device_adds_up_its_parts() {
        let ports = [1, 2].map(|p| port("mlx5_0", p, LinkLayer::Ethernet, 200_000));
        let d = Device::of_ports(ports.to_vec(), vec![0, 1]);
        assert_eq!(d.properties.name.to_str(), Ok("mlx5_0+mlx5_0:2"));
        assert_eq!(d.properties.speed_mbps, 400_000);
        let huge = port("x", 1, LinkLayer::Ethernet, u32::MAX);
        let d = Device::of_ports(vec![huge; 4], vec![0, 1, 2, 3]);
        assert_eq!(d.properties.speed_mbps, c_int::MAX);
    }
}
