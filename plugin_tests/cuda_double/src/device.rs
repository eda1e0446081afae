//! Devices: which there are, which this process sees, and what they say of themselves.

use crate::abi::*;
use crate::driver::{entry, Kind};
use std::ffi::CStr;

/// The UUID of a device, the same in every process.
pub fn uuid(physical: u32) -> [u8; 16] {
    let mut bytes = *b"\x76\x63\x63\x6c\x2d\x67\x40\x75\xa2\x64\x6f\x75\x62\x6c\x65\x00";
    bytes[15] = physical as u8;
    bytes
}

fn uuid_text(physical: u32) -> String {
    let hex: Vec<String> = uuid(physical).iter().map(|b| format!("{b:02x}")).collect();
    let hex = hex.concat();
    format!(
        "GPU-{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

fn bus(physical: u32) -> i32 {
    0x10 + physical as i32
}

/// The machine's numbers of the devices that `CUDA_VISIBLE_DEVICES` leaves, in its order. As with
/// the driver, what follows the first name that fits no device is left out.
pub fn visible(total: u32, filter: Option<String>) -> Vec<u32> {
    let Some(filter) = filter else {
        return (0..total).collect();
    };
    let mut seen = Vec::new();
    for item in filter.split(',').map(str::trim) {
        let device = match item.parse::<u32>() {
            Ok(number) => Some(number).filter(|n| *n < total),
            Err(_) => Some(item)
                .filter(|t| t.len() > 4 && t.starts_with("GPU-"))
                .and_then(|t| (0..total).find(|d| uuid_text(*d).starts_with(t))),
        };
        match device {
            // A device named twice leaves none.
            Some(d) if seen.contains(&d) => return Vec::new(),
            Some(d) => seen.push(d),
            None => break,
        }
    }
    seen
}

entry!(Kind::Early, fn cuInit(flags: u32) |drv| {
    if flags != 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    drv.initialize()
});

entry!(Kind::Early, fn cuDriverGetVersion(version: Out<i32>) |drv| {
    let number = drv.settings().driver_version;
    version.set(number)
});

entry!(Kind::Early, fn cuGetErrorString(code: i32, text: Out<*const i8>) |_drv| {
    match describe(code) {
        Some((_, words)) => text.set(words.as_ptr().cast()),
        None => {
            text.set(std::ptr::null())?;
            Err(ERROR_INVALID_VALUE)
        }
    }
});

entry!(Kind::Early, fn cuGetErrorName(code: i32, text: Out<*const i8>) |_drv| {
    match describe(code) {
        Some((name, _)) => text.set(name.as_ptr().cast()),
        None => {
            text.set(std::ptr::null())?;
            Err(ERROR_INVALID_VALUE)
        }
    }
});

entry!(Kind::Plain, fn cuDeviceGetCount(count: Out<i32>) |drv| {
    count.set(drv.visible().len() as i32)
});

entry!(Kind::Plain, fn cuDeviceGet(device: Out<i32>, ordinal: i32) |drv| {
    drv.physical(ordinal)?;
    device.set(ordinal)
});

entry!(Kind::Plain, fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) |drv| {
    let physical = drv.physical(device)?;
    let s = drv.settings().clone();
    let yes = i32::from;
    value.set(match attribute {
        10 => 32,                                   // warp size
        13 => 1_980_000,                            // clock rate
        16 => 132,                                  // multiprocessors
        19 | 31 | 41 | 81 => 1,                     // host maps, concurrent kernels, unified addressing
        33 => bus(physical),                        // PCI bus
        34 | 50 => 0,                               // PCI device, domain
        39 => 2048,
        40 => 3,                                    // copy engines
        75 => 9,                                    // compute capability
        91 => yes(!s.host_alias),                   // host pointers serve as device pointers
        92 | 93 => 0,                               // the first version of stream memory operations
        116 => yes(s.peer_memory),                  // GPUDirect RDMA
        117 => 1,                                   // its writes can be flushed by the host
        118 => s.rdma_ordering,
        122 | 123 => yes(s.memops),                 // 64-bit operations, NOR waits
        99 => 1,                                    // host registration
        102 => yes(s.vmm),
        103 => yes(s.vmm && s.vmm_export),          // POSIX descriptors
        _ => 0,
    })
});

entry!(Kind::Plain, fn cuDeviceGetName(name: Out<u8>, len: i32, device: i32) |drv| {
    let physical = drv.physical(device)?;
    put_text(name, len, &format!("CUDA double {physical}"))
});

fn put_text(to: Out<u8>, len: i32, text: &str) -> Res {
    let room = usize::try_from(len).map_err(|_| ERROR_INVALID_VALUE)?;
    if room == 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let fits = text.len().min(room - 1);
    for (i, byte) in text.bytes().take(fits).enumerate() {
        to.set_at(i, byte)?;
    }
    to.set_at(fits, 0)
}

entry!(Kind::Plain, fn cuDeviceGetUuid(id: Out<[u8; 16]>, device: i32) |drv| {
    id.set(uuid(drv.physical(device)?))
});

entry!(Kind::Plain, fn cuDeviceGetUuid_v2(id: Out<[u8; 16]>, device: i32) |drv| {
    id.set(uuid(drv.physical(device)?))
});

fn bus_id(physical: u32) -> String {
    format!("0000:{:02x}:00.0", bus(physical))
}

entry!(Kind::Plain, fn cuDeviceGetPCIBusId(id: Out<u8>, len: i32, device: i32) |drv| {
    put_text(id, len, &bus_id(drv.physical(device)?))
});

entry!(Kind::Plain, fn cuDeviceGetByPCIBusId(device: Out<i32>, id: *const i8) |drv| {
    if id.is_null() {
        return Err(ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller gives a text that ends in NUL, as the interface demands.
    let wanted = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_lowercase();
    let found = drv.visible().iter().position(|d| bus_id(*d).ends_with(&wanted));
    device.set(found.filter(|_| wanted.len() >= 7).ok_or(ERROR_INVALID_DEVICE)? as i32)
});

entry!(Kind::Plain, fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) |drv| {
    let (from, to) = (drv.physical(device)?, drv.physical(peer)?);
    let reach = from != to && drv.settings().can_access(from, to);
    can.set(i32::from(reach))
});

entry!(Kind::Plain, fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) |drv| {
    drv.physical(device)?;
    let mib = drv.settings().device_mem_mib;
    bytes.set((mib << 20) as usize)
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_read_as_the_driver_reads_them() {
        let see = |t: &str| visible(4, Some(t.to_string()));
        assert_eq!(visible(2, None), [0, 1]);
        assert_eq!(see("3,1"), [3, 1]);
        assert_eq!(see("2,9,1"), [2]);
        assert_eq!(see(""), []);
        assert_eq!(see("1,1"), []);
        assert_eq!(see(&uuid_text(2)), [2]);
    }
}
