//! The 128 bytes by which a connector finds a listener. They travel through NCCL's bootstrap from
//! another process, perhaps of another machine: everything in them is checked.
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | magic |
//! | 4..8 | version |
//! | 8..24 | the listening process |
//! | 24..32 | the listener in it |
//! | 32..48 | secret |
//! | 48..64 | the host's boot id |
//! | 64..72 | the network namespace's inode |
//! | 72..76 | TCP: family (0: none, 4, 6), whether it is for data, port |
//! | 76..96 | TCP: address, scope |
//! | 96..104 | TCP: the listener in that process; its secret is that above |
//! | 104..106 | RDMA: ports (0: none), whether they are InfiniBand |
//! | 106..112 | zero |
//! | 112..120 | checksum of the bytes before |
//! | 120..128 | the connector's: which attempt this copy of the handle belongs to |

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::OnceLock;

use crate::error::{Error, Result};
use crate::transport::copy_engine::Address;
use crate::transport::tcp;

/// Bytes of a handle: `NCCL_NET_HANDLE_MAXSIZE`.
pub const HANDLE_LEN: usize = 128;

const MAGIC: [u8; 4] = *b"vccl";
const VERSION: u32 = 1;
pub(crate) const CHECKED: usize = 112;
pub(crate) const ATTEMPT: usize = 120;

/// Where a process runs, as far as it decides whether others can reach it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The host's boot id: differs between hosts whatever their names, and between two boots.
    pub boot: [u8; 16],
    /// The network namespace.
    pub network: u64,
}

impl Place {
    /// Where this process runs, as seen at the first call. What cannot be read is zero.
    pub fn here() -> Place {
        static HERE: OnceLock<Place> = OnceLock::new();
        *HERE.get_or_init(Place::look)
    }

    fn look() -> Place {
        use std::os::unix::fs::MetadataExt;
        let mut boot = [0; 16];
        if let Ok(text) = std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
            let digits: Vec<u8> = text
                .bytes()
                .filter_map(|b| (b as char).to_digit(16))
                .map(|d| d as u8)
                .collect();
            for (b, d) in boot.iter_mut().zip(digits.chunks_exact(2)) {
                *b = d[0] << 4 | d[1];
            }
        }
        let network = std::fs::metadata("/proc/self/ns/net").map_or(0, |m| m.ino());
        Place { boot, network }
    }
}

/// What a handle says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle {
    /// The listener.
    pub address: Address,
    /// Where it is.
    pub place: Place,
    /// Where it listens over TCP, if it does.
    pub tcp: Option<tcp::Address>,
    /// Data may come over TCP; else it is there to set up RDMA.
    pub data: bool,
    /// Its RDMA ports, if it has any.
    pub rdma: Option<Rdma>,
}

/// What a listener says of its RDMA ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rdma {
    /// How many.
    pub ports: u8,
    /// They are InfiniBand and not RoCE.
    pub infiniband: bool,
}

/// FNV-1a, 64 bits: finds damage, not malice. Strangers are kept out by the secret.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ *b as u64).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Handle {
    /// Writes the handle.
    pub fn encode(&self, to: &mut [u8; HANDLE_LEN]) {
        to.fill(0);
        to[0..4].copy_from_slice(&MAGIC);
        to[4..8].copy_from_slice(&VERSION.to_le_bytes());
        to[8..24].copy_from_slice(&self.address.process);
        to[24..32].copy_from_slice(&self.address.listener.to_le_bytes());
        to[32..48].copy_from_slice(&self.address.secret);
        to[48..64].copy_from_slice(&self.place.boot);
        to[64..72].copy_from_slice(&self.place.network.to_le_bytes());
        if let Some(t) = &self.tcp {
            to[74..76].copy_from_slice(&t.at.port().to_le_bytes());
            match t.at {
                SocketAddr::V4(a) => {
                    to[72] = 4;
                    to[76..80].copy_from_slice(&a.ip().octets());
                }
                SocketAddr::V6(a) => {
                    to[72] = 6;
                    to[76..92].copy_from_slice(&a.ip().octets());
                    to[92..96].copy_from_slice(&a.scope_id().to_le_bytes());
                }
            }
            to[96..104].copy_from_slice(&t.listener.to_le_bytes());
        }
        to[73] = self.data.into();
        if let Some(r) = &self.rdma {
            to[104] = r.ports;
            to[105] = r.infiniband.into();
        }
        let sum = checksum(&to[..CHECKED]);
        to[CHECKED..ATTEMPT].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads a handle, or says why it is none.
    pub fn decode(from: &[u8; HANDLE_LEN]) -> Result<Handle> {
        fn take<const N: usize>(from: &[u8; HANDLE_LEN], at: usize) -> [u8; N] {
            from[at..at + N].try_into().expect("within the handle")
        }
        if from[0..4] != MAGIC {
            return Err(Error::invalid_argument(
                "the handle is not one of vccl's: do all ranks load this plugin?",
            ));
        }
        let version = u32::from_le_bytes(take(from, 4));
        if version != VERSION {
            return Err(Error::invalid_argument(format!(
                "the handle has version {version}, this vccl knows {VERSION}: use the same library on \
                 all ranks"
            )));
        }
        if checksum(&from[..CHECKED]) != u64::from_le_bytes(take(from, CHECKED)) {
            return Err(Error::invalid_argument(
                "the handle was damaged or cut on its way: its checksum is wrong",
            ));
        }
        let port = u16::from_le_bytes(take(from, 74));
        let at = match from[72] {
            0 => None,
            4 => {
                let ip: [u8; 4] = take(from, 76);
                Some(SocketAddr::new(IpAddr::from(ip), port))
            }
            6 => {
                let ip: [u8; 16] = take(from, 76);
                let scope = u32::from_le_bytes(take(from, 92));
                Some(SocketAddrV6::new(ip.into(), port, 0, scope).into())
            }
            n => {
                return Err(Error::invalid_argument(format!(
                "the handle has an address of the unknown family {n}: use the same library on all \
                     ranks"
            )))
            }
        };
        let secret = take(from, 32);
        let tcp = at.map(|at| tcp::Address {
            at,
            listener: u64::from_le_bytes(take(from, 96)),
            secret,
        });
        let rdma = (from[104] > 0).then_some(Rdma {
            ports: from[104],
            infiniband: from[105] != 0,
        });
        let handle = Handle {
            tcp,
            data: from[73] != 0,
            rdma,
            address: Address {
                process: take(from, 8),
                listener: u64::from_le_bytes(take(from, 24)),
                secret,
            },
            place: Place {
                boot: take(from, 48),
                network: u64::from_le_bytes(take(from, 64)),
            },
        };
        // Nothing stands where nothing belongs, and each handle is written in one way.
        let mut again = [0; HANDLE_LEN];
        handle.encode(&mut again);
        if again[..ATTEMPT] != from[..ATTEMPT] {
            return Err(Error::invalid_argument(
                "the handle has words in it that this vccl does not know: use the same library on all ranks",
            ));
        }
        Ok(handle)
    }
}

fn attempt_check(handle: &[u8; HANDLE_LEN], attempt: u32) -> u32 {
    let sum = &handle[CHECKED..ATTEMPT];
    checksum(&[sum, &attempt.to_le_bytes()].concat()) as u32
}

/// The attempt that this copy of a handle belongs to, from 1 on; `None` before the first call.
pub fn attempt(handle: &[u8; HANDLE_LEN]) -> Result<Option<u32>> {
    let word = |at: usize| u32::from_le_bytes(handle[at..at + 4].try_into().expect("4 bytes"));
    match (word(ATTEMPT), word(ATTEMPT + 4)) {
        (0, 0) => Ok(None),
        (n, check) if n > 0 && check == attempt_check(handle, n) => Ok(Some(n)),
        _ => Err(Error::invalid_argument(
            "the handle was damaged: pass the same memory to connect each time",
        )),
    }
}

/// Notes the attempt in the connector's copy of the handle, which NCCL passes again.
pub fn set_attempt(handle: &mut [u8; HANDLE_LEN], attempt: Option<u32>) {
    let (n, check) = attempt.map_or((0, 0), |n| (n, attempt_check(handle, n)));
    handle[ATTEMPT..ATTEMPT + 4].copy_from_slice(&n.to_le_bytes());
    handle[ATTEMPT + 4..].copy_from_slice(&check.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn handle() -> Handle {
        Handle {
            address: Address {
                process: [1; 16],
                listener: 77,
                secret: [9; 16],
            },
            place: Place {
                boot: [3; 16],
                network: 5,
            },
            tcp: Some(tcp::Address {
                at: "10.1.2.3:456".parse().unwrap(),
                listener: 8,
                secret: [9; 16],
            }),
            data: true,
            rdma: Some(Rdma {
                ports: 2,
                infiniband: true,
            }),
        }
    }

    #[test]
    fn round_trip_with_and_without_attempt() {
        let mut bytes = [0xAA; HANDLE_LEN];
        handle().encode(&mut bytes);
        assert_eq!(attempt(&bytes).unwrap(), None);
        assert_eq!(Handle::decode(&bytes).unwrap(), handle());
        set_attempt(&mut bytes, Some(12345));
        assert_eq!(attempt(&bytes).unwrap(), Some(12345));
        assert_eq!(Handle::decode(&bytes).unwrap(), handle());
        for bit in ATTEMPT * 8..HANDLE_LEN * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(attempt(&bad).is_err(), "bit {bit}");
        }
        set_attempt(&mut bytes, None);
        assert_eq!(attempt(&bytes).unwrap(), None);
    }

    #[test]
    fn tcp_addresses_of_all_kinds() {
        let scoped = SocketAddrV6::new("fe80::1".parse().unwrap(), 7, 0, 3);
        for at in [
            Some(scoped.into()),
            Some("[fd00::2]:65535".parse().unwrap()),
            None,
        ] {
            let mut h = handle();
            h.tcp = at.map(|at| tcp::Address {
                at,
                ..h.tcp.unwrap()
            });
            let mut bytes = [0xAA; HANDLE_LEN];
            h.encode(&mut bytes);
            assert_eq!(Handle::decode(&bytes).unwrap(), h);
        }
    }

    #[test]
    fn every_damaged_bit_is_found() {
        let mut good = [0; HANDLE_LEN];
        handle().encode(&mut good);
        for bit in 0..ATTEMPT * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Handle::decode(&bad).is_err(), "bit {bit}");
        }
        for cut in 0..ATTEMPT {
            let mut bad = good;
            bad[cut..].fill(0);
            assert!(Handle::decode(&bad).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn what_no_handle_says_is_refused() {
        let with = |h: Handle, at: usize, byte: u8| {
            let mut bytes = [0; HANDLE_LEN];
            h.encode(&mut bytes);
            bytes[at] = byte;
            let sum = checksum(&bytes[..CHECKED]);
            bytes[CHECKED..ATTEMPT].copy_from_slice(&sum.to_le_bytes());
            Handle::decode(&bytes)
        };
        let h = handle();
        let bare = Handle {
            tcp: None,
            rdma: None,
            data: false,
            ..h
        };
        assert_eq!(with(h, 73, 1).unwrap(), h);
        for (h, at, byte) in [
            (h, 73, 2),     // whether it is for data
            (h, 80, 1),     // behind an IPv4 address
            (h, 95, 1),     // its scope
            (h, 105, 2),    // whether it is InfiniBand
            (h, 106, 1),    // free
            (h, 111, 0x80), // free
            (bare, 74, 1),  // a port without an address
            (bare, 96, 1),  // a listener without one
            (bare, 105, 1), // InfiniBand without a port
        ] {
            let e = with(h, at, byte).unwrap_err();
            assert!(e.text().contains("does not know"), "byte {at}: {e}");
        }
        // 0 is no attempt, even with its check.
        let mut bytes = [0; HANDLE_LEN];
        h.encode(&mut bytes);
        set_attempt(&mut bytes, Some(0));
        assert!(attempt(&bytes).is_err());
    }

    proptest! {
        #[test]
        fn noise_is_refused(bytes in any::<[[u8; 32]; 4]>()) {
            let mut all = [0; HANDLE_LEN];
            for (a, b) in all.chunks_exact_mut(32).zip(&bytes) {
                a.copy_from_slice(b);
            }
            prop_assert!(Handle::decode(&all).is_err());
        }
    }

    #[test]
    fn this_place_is_known() {
        let here = Place::here();
        assert_eq!(here, Place::here());
        assert!(here.network != 0 && here.boot != [0; 16]);
    }
}
