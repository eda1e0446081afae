//! Which address of this host a listener gives to others.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

use nix::net::if_::InterfaceFlags;

use crate::error::{Error, Result, ResultCode};

/// One address of one interface that is up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// The interface.
    pub name: String,
    /// Its address, with port 0.
    pub address: SocketAddr,
    /// Whether only this host can reach it.
    pub loopback: bool,
}

/// `NCCL_SOCKET_IFNAME`: names or prefixes, `^` before them all for "none of these", `=` for whole names.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Filter {
    exclude: bool,
    exact: bool,
    names: Vec<String>,
}

impl Filter {
    /// Reads it.
    pub fn parse(text: &str) -> Filter {
        let (mut exclude, mut exact, mut rest) = (false, false, text.trim());
        while let Some(c @ ('^' | '=')) = rest.chars().next() {
            match c {
                '^' => exclude = true,
                _ => exact = true,
            }
            rest = rest[1..].trim_start();
        }
        let names = rest
            .split(',')
            .map(|n| n.trim().to_string())
            .filter(|n| !n.is_empty())
            .collect();
        Filter {
            exclude,
            exact,
            names,
        }
    }

    /// Whether it allows an interface.
    pub fn allows(&self, name: &str) -> bool {
        if self.names.is_empty() {
            return true;
        }
        let named = self.names.iter().any(|n| match self.exact {
            true => n == name,
            false => name.starts_with(n.as_str()),
        });
        named != self.exclude
    }
}

/// Chooses among what there is. With no filter: the first interface that is neither loopback nor docker's,
/// then docker's, then loopback. IPv4 before IPv6 on the same interface, unless `family` says otherwise;
/// link-local addresses last.
pub fn choose(
    all: &[Candidate],
    filter: Option<&Filter>,
    family: Option<i32>,
) -> Option<Candidate> {
    let usable = |c: &&Candidate| {
        filter.is_none_or(|f| f.allows(&c.name))
            && match family {
                Some(libc::AF_INET) => c.address.is_ipv4(),
                Some(libc::AF_INET6) => c.address.is_ipv6(),
                _ => true,
            }
    };
    let rank = |c: &Candidate| {
        let place = match (c.loopback, c.name.starts_with("docker")) {
            (false, false) => 0,
            (false, true) => 1,
            (true, _) => 2,
        };
        let kind = match c.address.ip() {
            IpAddr::V4(a) if !a.is_link_local() => 0,
            IpAddr::V6(a) if !is_link_local(&a) => 1,
            IpAddr::V4(_) => 2,
            IpAddr::V6(_) => 3,
        };
        (place, kind)
    };
    // The first of the least, so that the system's order decides among equals.
    all.iter().filter(usable).min_by_key(|c| rank(c)).cloned()
}

fn is_link_local(a: &Ipv6Addr) -> bool {
    a.segments()[0] & 0xffc0 == 0xfe80
}

fn candidates() -> Result<Vec<Candidate>> {
    let found = nix::ifaddrs::getifaddrs()
        .map_err(|e| Error::system("listing the network interfaces", e))?;
    Ok(found
        .filter(|i| {
            i.flags
                .contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING)
        })
        .filter_map(|i| {
            let a = i.address?;
            let address = match (a.as_sockaddr_in(), a.as_sockaddr_in6()) {
                (Some(v4), _) => SocketAddr::new(v4.ip().into(), 0),
                (_, Some(v6)) => SocketAddrV6::new(v6.ip(), 0, 0, v6.scope_id()).into(),
                _ => return None,
            };
            Some(Candidate {
                loopback: i.flags.contains(InterfaceFlags::IFF_LOOPBACK),
                name: i.interface_name,
                address,
            })
        })
        .collect())
}

/// The address to listen on, and the interface that has it.
pub fn own_address(ifname: Option<&str>, family: Option<i32>) -> Result<Candidate> {
    let all = candidates()?;
    let filter = ifname.map(Filter::parse);
    choose(&all, filter.as_ref(), family).ok_or_else(|| {
        let mut names: Vec<&str> = all.iter().map(|c| c.name.as_str()).collect();
        names.dedup();
        Error::new(
            ResultCode::SYSTEM,
            format!(
                "no network interface to listen on: NCCL_SOCKET_IFNAME is {}, and with an address are up: \
                 {}{}",
                ifname.unwrap_or("not set"),
                match names.is_empty() {
                    true => "none".to_string(),
                    false => names.join(", "),
                },
                match family {
                    None => "",
                    Some(_) => " (NCCL_SOCKET_FAMILY restricts them to one family)",
                }
            ),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, ip: &str, loopback: bool) -> Candidate {
        Candidate {
            name: name.into(),
            address: SocketAddr::new(ip.parse().unwrap(), 0),
            loopback,
        }
    }

    #[test]
    fn the_filter_has_nccls_syntax() {
        let allows = |f: &str, n: &str| Filter::parse(f).allows(n);
        assert!(allows("eth", "eth0") && allows("eth", "eth11") && !allows("eth", "ib0"));
        assert!(allows("=eth1", "eth1") && !allows("=eth1", "eth11"));
        assert!(!allows("^docker,lo", "docker0") && allows("^docker,lo", "eth0"));
        assert!(allows("^=eth1", "eth11") && !allows("^=eth1", "eth1"));
        assert!(allows("eth0, ib0", "ib0") && allows("", "any"));
        // Blanks do not matter, as in the list of RDMA devices.
        for f in ["^ =eth1", " ^=eth1", "^= eth1 ", "= ^ eth1,"] {
            assert!(allows(f, "eth11") && !allows(f, "eth1"), "{f:?}");
        }
    }

    #[test]
    fn loopback_and_docker_come_last() {
        let all = [
            candidate("lo", "127.0.0.1", true),
            candidate("docker0", "172.17.0.1", false),
            candidate("eth0", "fe80::1", false),
            candidate("eth0", "fd00::1", false),
            candidate("eth0", "10.0.0.1", false),
        ];
        let ip = |c: Option<Candidate>| c.unwrap().address.ip().to_string();
        assert_eq!(ip(choose(&all, None, None)), "10.0.0.1");
        assert_eq!(ip(choose(&all, None, Some(libc::AF_INET6))), "fd00::1");
        assert_eq!(ip(choose(&all[..3], None, None)), "fe80::1");
        assert_eq!(ip(choose(&all[..2], None, None)), "172.17.0.1");
        assert_eq!(ip(choose(&all[..1], None, None)), "127.0.0.1");
        let lo = Filter::parse("lo");
        assert_eq!(ip(choose(&all, Some(&lo), None)), "127.0.0.1");
        assert_eq!(choose(&all, Some(&Filter::parse("ib")), None), None);
    }

    #[test]
    fn this_host_has_an_address() {
        assert!(own_address(None, None).is_ok());
        let e = own_address(Some("=no-such-interface"), None).unwrap_err();
        assert!(e.text().contains("=no-such-interface"), "{e}");
    }
}
