//! Which address of a port a connection uses.

use std::net::{IpAddr, Ipv6Addr};

use super::wire::{GidEntry, PortOffer, MAX_GIDS};
use crate::config::Ib;
use crate::error::{Error, Result};
use crate::ibverbs::sys::Gid;
use crate::ibverbs::{Context, GidType};

/// The address that a RoCE GID stands for.
pub fn address(gid: &Gid) -> IpAddr {
    let v6 = Ipv6Addr::from(gid.0);
    match v6.to_ipv4_mapped() {
        Some(v4) => v4.into(),
        None => v6.into(),
    }
}

fn is_link_local(gid: &Gid) -> bool {
    match address(gid) {
        IpAddr::V4(a) => a.is_link_local(),
        IpAddr::V6(a) => a.segments()[0] & 0xffc0 == 0xfe80,
    }
}

/// An entry of a port's table, with its index there.
pub type Indexed = (u8, GidEntry);

/// Chooses among a table's entries, best first.
fn ranked(mut table: Vec<Indexed>, ib: &Ib) -> Vec<Indexed> {
    table.retain(|(_, g)| g.version == ib.roce_version && ib.range.holds(address(&g.gid)));
    table.sort_by_key(|(_, g)| (is_link_local(&g.gid), address(&g.gid).is_ipv6() != ib.ipv6));
    table.truncate(MAX_GIDS);
    table
}

/// The addresses that a port has now, those that the settings like best first.
pub fn candidates(
    context: &Context,
    port: u8,
    entries: i32,
    infiniband: bool,
    ib: &Ib,
) -> Result<Vec<Indexed>> {
    let fixed = ib.gid_index.or(infiniband.then_some(0));
    if let Some(index) = fixed {
        let gid = context.query_gid(port, index.into())?;
        if gid == Gid::default() {
            return Err(Error::invalid_usage(format!(
                "GID {index} of {}:{port} is not set (VCCL_IB_GID_INDEX): `show_gids` or \
                 /sys/class/infiniband/{}/ports/{port}/gids tells which are",
                context.name(),
                context.name()
            )));
        }
        let version = match context.gid_type(port, index.into())? {
            _ if infiniband => 0,
            Some(GidType::InfiniBandOrRoceV1) => 1,
            Some(GidType::RoceV2) => 2,
            None => ib.roce_version,
        };
        return Ok(vec![(index, GidEntry { gid, version })]);
    }
    let mut table = Vec::new();
    for index in 0..entries.clamp(0, 256) {
        // A free entry is all zeros, or an error.
        let Ok(gid) = context.query_gid(port, index) else {
            continue;
        };
        if gid == Gid::default() {
            continue;
        }
        let version = match context.gid_type(port, index)? {
            Some(GidType::InfiniBandOrRoceV1) => 1,
            Some(GidType::RoceV2) => 2,
            None => continue,
        };
        table.push((index as u8, GidEntry { gid, version }));
    }
    let found = table.len();
    let chosen = ranked(table, ib);
    if chosen.is_empty() {
        return Err(Error::invalid_usage(format!(
            "{}:{port} has no address to use: {found} GIDs are set, none is of RoCE version {} in {}; give \
             its interface an address, or see VCCL_IB_ROCE_VERSION_NUM and VCCL_IB_ADDR_RANGE",
            context.name(),
            ib.roce_version,
            if found == 0 { "any range" } else { "the range" },
        )));
    }
    Ok(chosen)
}

/// Bits that two addresses have in common at their beginning.
fn common(a: &Gid, b: &Gid) -> u32 {
    (u128::from_be_bytes(a.0) ^ u128::from_be_bytes(b.0)).leading_zeros()
}

/// The two addresses, as numbers in the offers, that fit each other best: the same version of RoCE and
/// family, not link-local where that can be had, and in the smallest common subnet.
pub fn choose(a: &PortOffer, b: &PortOffer, ipv6: bool) -> Option<(u8, u8)> {
    let (of_a, of_b) = (&a.gids[..a.n_gids as usize], &b.gids[..b.n_gids as usize]);
    if let ([x], [y]) = (of_a, of_b) {
        // Somebody named them, or there are no others: so be it, if they speak the same. (Version 2 has IP headers.)
        let alike = x.version == y.version
            && (x.version != 2 || address(&x.gid).is_ipv6() == address(&y.gid).is_ipv6());
        return alike.then_some((0, 0));
    }
    let mut best = None;
    for (i, x) in of_a.iter().enumerate() {
        for (j, y) in of_b.iter().enumerate() {
            let v6 = address(&x.gid).is_ipv6();
            let local = is_link_local(&x.gid);
            if x.version != y.version
                || v6 != address(&y.gid).is_ipv6()
                || local != is_link_local(&y.gid)
            {
                continue;
            }
            let score = (!local, v6 == ipv6, common(&x.gid, &y.gid));
            if best.is_none_or(|(s, _)| score > s) {
                best = Some((score, (i as u8, j as u8)));
            }
        }
    }
    best.map(|(_, pair)| pair)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn gid(text: &str) -> Gid {
        Gid(match text.parse::<IpAddr>().unwrap() {
            IpAddr::V4(a) => a.to_ipv6_mapped().octets(),
            IpAddr::V6(a) => a.octets(),
        })
    }

    fn table(all: &[(&str, u8)]) -> Vec<Indexed> {
        all.iter()
            .enumerate()
            .map(|(i, (a, version))| {
                (
                    i as u8,
                    GidEntry {
                        gid: gid(a),
                        version: *version,
                    },
                )
            })
            .collect()
    }

    fn ib(pairs: &[(&str, &str)]) -> Ib {
        let get = |n: &str| pairs.iter().find(|p| p.0 == n).map(|p| p.1.to_string());
        let (config, complaints) = Config::read(&get);
        assert!(complaints.is_empty(), "{complaints:?}");
        config.ib
    }

    const TABLE: [(&str, u8); 6] = [
        ("fe80::1", 1),
        ("fe80::1", 2),
        ("10.1.0.1", 1),
        ("10.1.0.1", 2),
        ("fd00::1", 2),
        ("10.2.0.1", 2),
    ];

    #[test]
    fn the_settings_rank() {
        let ranks = |pairs: &[(&str, &str)]| {
            let chosen = ranked(table(&TABLE), &ib(pairs));
            chosen.iter().map(|c| c.0).collect::<Vec<_>>()
        };
        assert_eq!(ranks(&[]), [3, 5, 4, 1]);
        assert_eq!(ranks(&[("VCCL_IB_ADDR_FAMILY", "AF_INET6")]), [4, 3, 5, 1]);
        assert_eq!(ranks(&[("VCCL_IB_ROCE_VERSION_NUM", "1")]), [2, 0]);
        assert_eq!(ranks(&[("NCCL_IB_ADDR_RANGE", "10.2.0.0/16")]), [5]);
        assert_eq!(ranks(&[("NCCL_IB_ADDR_RANGE", "10.3.0.0/16")]), [0u8; 0]);
    }

    fn offer(all: &[(&str, u8)]) -> PortOffer {
        let mut p = PortOffer {
            n_gids: all.len() as u8,
            ..PortOffer::default()
        };
        for (to, (_, g)) in p.gids.iter_mut().zip(table(all)) {
            *to = g;
        }
        p
    }

    #[test]
    fn two_ends_take_what_fits() {
        let a = offer(&[
            ("10.1.0.1", 2),
            ("10.2.0.1", 2),
            ("fd00::1", 2),
            ("fe80::1", 2),
        ]);
        let same_subnet = offer(&[("10.9.0.2", 2), ("10.2.0.2", 2)]);
        assert_eq!(choose(&a, &same_subnet, false), Some((1, 1)));
        let six_only = offer(&[("fe80::2", 2), ("fd00::2", 2)]);
        assert_eq!(choose(&a, &six_only, false), Some((2, 1)));
        let local_only = offer(&[("fe80::2", 2), ("fe80::3", 2)]);
        assert_eq!(choose(&a, &local_only, false), Some((3, 0)));
        let both = offer(&[("10.1.0.2", 2), ("fd00::2", 2)]);
        assert_eq!(choose(&a, &both, true), Some((2, 1)));
        let other_version = offer(&[("10.1.0.2", 1), ("10.2.0.2", 1)]);
        assert_eq!(choose(&a, &other_version, false), None);
        // Who names one entry at each end is to have these, if that can be.
        let one = |a, version| offer(&[(a, version)]);
        for (a, b, version, found) in [
            ("fe80::1", "fd00::2", 2, true),
            ("10.1.0.1", "fd00::2", 1, true),
            ("10.1.0.1", "fd00::2", 2, false),
            ("10.1.0.1", "192.168.0.1", 2, true),
        ] {
            let pair = choose(&one(a, version), &one(b, version), false);
            assert_eq!(pair, found.then_some((0, 0)), "{a} {b} {version}");
        }
    }
}
