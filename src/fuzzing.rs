//! What must hold of every parser of bytes that others wrote, whatever they are: the body of each target in
//! `fuzz/`, of the same name. The tests replay the inputs that are kept there.
//!
//! Each function panics where a property does not hold, and says whether it met something that was accepted.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::socket::{
    accept, bind, connect, listen, recv, sendmsg, setsockopt, socket, sockopt, AddressFamily,
    Backlog, ControlMessage, MsgFlags, SockFlag, SockType,
};

use crate::config::{self, Config, ContextKind, Source, Transport};
use crate::error::{Error, ResultCode};
use crate::ibverbs::devices::{LinkLayer, Port};
use crate::ibverbs::filter::Filter as HcaFilter;
use crate::ibverbs::sys::{MTU_256, MTU_4096};
use crate::net::handle::{
    attempt, checksum, set_attempt, Handle, Rdma, ATTEMPT, CHECKED, HANDLE_LEN,
};
use crate::sync::lock;
use crate::transport::copy_engine::link;
use crate::transport::copy_engine::recv::RecvConnection as LinkRecv;
use crate::transport::copy_engine::send::SendConnection as LinkSend;
use crate::transport::copy_engine::shm::Shm;
use crate::transport::copy_engine::steps::side;
use crate::transport::copy_engine::wire::{
    ExportKind, Message, Target, MAX_FDS, MAX_PACKET, MAX_TEXT, PROTOCOL,
};
use crate::transport::copy_engine::{Address, Connecting, Listening};
use crate::transport::staging::{CHUNKS, LARGE};
use crate::transport::tcp::interfaces::Filter as InterfaceFilter;
use crate::transport::tcp::recv::RecvConnection;
use crate::transport::tcp::send::SendConnection;
use crate::transport::tcp::service::{Accepted, Guests, Listener, Service, GREETING};
use crate::transport::tcp::wire::{
    answer, check_answer, kind, purpose, Frame, Hello, Post, ANSWER_LEN, FIRST, FRAME_LEN,
    HELLO_LEN, HELLO_MAGIC, MAX_SOCKETS, POST_LEN,
};
use crate::transport::verbs::wire::{
    check, done_of, done_words, Descriptor, Imm, Offer, PortOffer, QpOffer, Reply,
    DESCRIPTOR_WORDS, MAX_GIDS, MAX_PORTS, MAX_QPS, OFFER_LEN, OFFER_MAGIC, REASON, REPLY_LEN,
    REPLY_MAGIC, RING, SHORT,
};
use crate::transport::verbs::Negotiation;
use crate::transport::{random, End, Memory, RecvEnd, Region, SendEnd};

/// The first `N` bytes; zeros where there are fewer.
fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut all = [0; N];
    let n = bytes.len().min(N);
    all[..n].copy_from_slice(&bytes[..n]);
    all
}

fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let mut all = [0; N];
    for (w, b) in all.iter_mut().zip(bytes.chunks(4)) {
        *w = u32::from_le_bytes(padded(b));
    }
    all
}

/// Takes decisions out of an input, one after the other; zeros behind its end.
struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    fn some(&mut self, n: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(n.min(self.0.len()));
        self.0 = tail;
        head
    }

    fn u8(&mut self) -> u8 {
        padded::<1>(self.some(1))[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(padded(self.some(2)))
    }
}

/// The handle of a listener: as it comes, and with its checksums made good.
pub fn handle(bytes: &[u8]) -> bool {
    let mut h: [u8; HANDLE_LEN] = padded(bytes);
    let mut accepted = check_handle(&h);
    let sum = checksum(&h[..CHECKED]);
    h[CHECKED..ATTEMPT].copy_from_slice(&sum.to_le_bytes());
    accepted |= check_handle(&h);
    if h[ATTEMPT..] != [0; 8] {
        let n = u32::from_le_bytes(padded(&h[ATTEMPT..]));
        set_attempt(&mut h, Some(n));
        assert_eq!(attempt(&h).ok(), (n > 0).then_some(Some(n)));
        accepted |= check_handle(&h);
    }
    accepted
}

fn check_handle(h: &[u8; HANDLE_LEN]) -> bool {
    if let Ok(n) = attempt(h) {
        let mut again = *h;
        set_attempt(&mut again, n);
        assert_eq!(again, *h, "the attempt {n:?}");
    }
    let Ok(known) = Handle::decode(h) else {
        return false;
    };
    assert!(known.rdma.is_none_or(|Rdma { ports, .. }| ports > 0));
    assert!(known.tcp.is_none_or(|t| t.secret == known.address.secret));
    let mut again = [0; HANDLE_LEN];
    known.encode(&mut again);
    assert_eq!(again[..ATTEMPT], h[..ATTEMPT], "{known:?}");
    true
}

/// The messages over TCP: as they come, and from 128 on with the first bytes made good.
pub fn tcp_wire(bytes: &[u8]) -> bool {
    let Some((which, bytes)) = bytes.split_first() else {
        return false;
    };
    match which % 4 {
        0 => {
            let mut from: [u8; HELLO_LEN] = padded(bytes);
            if *which >= 128 {
                from[..8].copy_from_slice(&HELLO_MAGIC);
            }
            let Some(h) = Hello::decode(&from) else {
                return false;
            };
            assert!(h.socket < h.sockets && usize::from(h.sockets) <= MAX_SOCKETS);
            assert!(h.purpose == purpose::TCP || (h.purpose, h.sockets) == (purpose::VERBS, 1));
            assert_eq!(h.encode(), from);
        }
        1 => {
            let from: [u8; FRAME_LEN] = padded(bytes);
            let Some(f) = Frame::decode(&from) else {
                return false;
            };
            match f.kind {
                kind::DATA => assert!(f.offset <= f.total && f.len <= f.total - f.offset),
                kind::TOO_LARGE => assert_eq!((f.offset, f.len), (0, 0)),
                k => panic!("frames of kind {k}"),
            }
            assert_eq!(f.encode(), from);
        }
        2 => {
            let from: [u8; POST_LEN] = padded(bytes);
            assert_eq!(Post::decode(&from).encode(), from);
        }
        _ => {
            let from: [u8; ANSWER_LEN] = padded(bytes);
            assert_eq!(check_answer(&from).is_ok(), from == answer());
            return from == answer();
        }
    }
    true
}

/// The messages between processes of a host.
pub fn link_wire(bytes: &[u8]) -> bool {
    let Some(m) = Message::decode(bytes) else {
        return false;
    };
    match &m {
        Message::Refused { text }
        | Message::ConnectFailed { text, .. }
        | Message::RegionFailed { text, .. }
        | Message::HostDrainFailed { text, .. } => {
            assert!(text.len() <= MAX_TEXT, "{} bytes of text", text.len());
            assert!(!text.chars().any(char::is_control), "{text:?}");
        }
        Message::Export {
            kind: ExportKind::Vmm { sizes, .. },
            ..
        } => assert!(sizes.len() <= MAX_FDS),
        _ => {}
    }
    let fits = (0..=MAX_FDS).filter(|n| m.fits_descriptors(*n)).count();
    assert_eq!(fits, 1, "{m:?}");
    let again = m.encode();
    assert!(again.len() <= MAX_PACKET);
    assert_eq!(again, bytes, "{m:?}");
    true
}

fn check_offer(o: &Offer) {
    assert!((1..=MAX_PORTS).contains(&o.ports.len()));
    assert!((1..=MAX_QPS).contains(&o.qps.len()));
    assert!(o.qps.iter().all(|q| q.number < 1 << 24 && q.psn < 1 << 24));
    for p in &o.ports {
        assert!((MTU_256..=MTU_4096).contains(&i32::from(p.mtu)));
        assert!(usize::from(p.n_gids) <= MAX_GIDS);
        let (used, free) = p.gids.split_at(p.n_gids.into());
        assert!(used.iter().all(|g| match o.infiniband {
            true => g.version == 0,
            false => g.version == 1 || g.version == 2,
        }));
        assert!(free.iter().all(|g| *g == Default::default()));
        assert!(!p.name().chars().any(char::is_control), "{:?}", p.name());
    }
}

/// What is said while RDMA is set up, and what is written into memory then: as it comes, and with its checks,
/// or from 128 on its first bytes, made good.
pub fn verbs_wire(bytes: &[u8]) -> bool {
    let Some((which, bytes)) = bytes.split_first() else {
        return false;
    };
    match which % 5 {
        0 => {
            let mut from: [u8; OFFER_LEN] = padded(bytes);
            if *which >= 128 {
                from[..8].copy_from_slice(&OFFER_MAGIC);
            }
            let Some(o) = Offer::decode(&from) else {
                return false;
            };
            check_offer(&o);
            assert!(*o.encode() == from, "{o:?}");
        }
        1 => {
            let mut from: [u8; REPLY_LEN] = padded(bytes);
            if *which >= 128 {
                // Its kind, which stands at its end, first, and then what is about it.
                let kind = bytes.first().copied().unwrap_or(0);
                from[..8].copy_from_slice(&REPLY_MAGIC);
                from[REPLY_LEN - 8] = kind;
                if kind == 2 {
                    from[8..REPLY_LEN - 8].fill(0);
                    let reason = &mut from[REPLY_LEN - 8 - REASON..REPLY_LEN - 8];
                    reason.copy_from_slice(&padded::<REASON>(&bytes[1..]));
                }
            }
            let Some(r) = Reply::decode(&from) else {
                return false;
            };
            match &r {
                Reply::Ready { offer, gids } => {
                    check_offer(offer);
                    assert_eq!(gids.len(), offer.qps.len());
                }
                Reply::Refused(why) => {
                    assert!(why.len() <= REASON && !why.chars().any(char::is_control));
                }
            }
            assert!(*r.encode() == from, "{r:?}");
        }
        2 => {
            let mut w: [u32; DESCRIPTOR_WORDS] = words(bytes);
            let mut accepted = false;
            for _ in 0..2 {
                for seq in [w[10], w[10].wrapping_add(1)] {
                    if let Some(d) = Descriptor::of(&w, seq) {
                        assert_eq!((d.seq, seq), (w[10], w[10]));
                        assert_eq!(d.words(), w, "{d:?}");
                        accepted = true;
                    }
                }
                w[DESCRIPTOR_WORDS - 1] = check(&w[..DESCRIPTOR_WORDS - 1]);
            }
            return accepted;
        }
        3 => {
            let mut w: [u32; 4] = words(bytes);
            let mut accepted = false;
            for _ in 0..2 {
                if let Some((total, kind, striped)) = done_of(&w) {
                    assert!(kind <= 0xff);
                    assert_eq!(done_words(total, kind, striped), w);
                    accepted = true;
                }
                w[3] = check(&w[..3]);
            }
            return accepted;
        }
        _ => {
            let bits = u32::from_le_bytes(padded(bytes));
            let Some(imm) = Imm::decode(bits) else {
                return false;
            };
            match imm {
                Imm::Short { slot, total, .. } => {
                    assert!((slot as usize) < RING && u64::from(total) < SHORT);
                }
                Imm::Long { slot } => assert!((slot as usize) < RING),
                Imm::Chunk {
                    slot, chunk, bytes, ..
                } => {
                    assert!((slot as usize) < RING && (chunk as usize) < CHUNKS);
                    assert!(bytes as usize <= LARGE);
                }
            }
            assert_eq!(imm.encode(), bits, "{imm:?}");
        }
    }
    true
}

/// `VCCL_IB_HCA`: a port, the list, and behind a NUL a device.
pub fn hca_filter(bytes: &[u8]) -> bool {
    let mut c = Choices(bytes);
    let port = c.u8();
    let text = String::from_utf8_lossy(c.0);
    let (text, device) = text.split_once('\0').unwrap_or((&text, "mlx5_1"));
    let f = match HcaFilter::parse(text) {
        Ok(f) => f,
        Err(why) => {
            assert!(why.contains("allowed are"), "{why}");
            return false;
        }
    };
    assert_eq!(HcaFilter::parse(&f.to_string()).as_ref(), Ok(&f), "{f}");
    for e in f.entries() {
        assert!(!e.name.is_empty() && e.name == e.name.trim() && e.port != Some(0));
        assert!(!e.name.contains([',', ':']), "{e}");
        assert_eq!(f.matches(&e.name, e.port.unwrap_or(port)), !f.excludes());
    }
    let all = f.entries().is_empty();
    assert!(f.may_match(device) || !f.matches(device, port));
    assert!(!all || f.matches(device, port));
    let missing = f.unmatched([(device, port)]).len();
    assert!(missing <= f.entries().len());
    let listed = missing < f.entries().len();
    assert_eq!(f.matches(device, port), all || listed != f.excludes());
    !all
}

/// `VCCL_SOCKET_IFNAME`: the list, and behind a NUL an interface.
pub fn interface_filter(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let (text, name) = text.split_once('\0').unwrap_or((&text, "eth1"));
    let allows = |text: &str, name: &str| InterfaceFilter::parse(text).allows(name);
    let sign = |c: char| c == '^' || c == '=' || c.is_whitespace();
    let list = text.trim_start_matches(sign);
    let mut names = list.split(',').map(str::trim).filter(|n| !n.is_empty());
    let Some(first) = names.next() else {
        assert!(allows(text, name));
        return false;
    };
    let (plain, exact) = (allows(list, name), allows(&format!("={list}"), name));
    assert!(plain || !exact, "a whole name begins with itself");
    assert!(allows(list, first) && allows(&format!("={list}"), first));
    assert_eq!(allows(&format!("^{list}"), name), !plain);
    assert_eq!(allows(&format!("^={list}"), name), !exact);
    // Where the lists of devices say the same, they mean the same.
    if !text.contains(':') && !text.contains(char::is_whitespace) {
        if let Ok(f) = HcaFilter::parse(text) {
            assert_eq!(allows(text, name), f.matches(name, 1), "{text:?}");
        }
    }
    true
}

/// The settings, one a line: a letter that names it (from `A` on; from `a` on NCCL's own of that meaning), and
/// its value.
pub fn settings(bytes: &[u8]) -> bool {
    static NAMES: OnceLock<Vec<&'static str>> = OnceLock::new();
    let names = NAMES.get_or_init(|| {
        let rows = Config::read(&|_| None);
        rows.0.rows().iter().map(|r| r.name).collect()
    });
    let text = String::from_utf8_lossy(bytes);
    let mut set: Vec<(String, &str)> = Vec::new();
    for line in text.split('\n') {
        let Some(letter) = line.chars().next() else {
            continue;
        };
        let (own, i) = match letter {
            'A'..='_' => (true, letter as usize - 'A' as usize),
            'a'..='\x7f' => (false, letter as usize - 'a' as usize),
            _ => continue,
        };
        let name = match own {
            true => names[i].to_string(),
            false => names[i].replace("VCCL_", "NCCL_"),
        };
        if set.iter().all(|(n, _)| *n != name) {
            set.push((name, &line[1..]));
        }
    }
    let asked = |n: &str| set.iter().find(|s| s.0 == n).map(|s| s.1.to_string());
    let (c, complaints) = Config::read(&asked);
    check_settings(&c);
    let taken = |r: &&crate::config::Row| r.source == Source::Environment;
    let n_taken = c.rows().iter().filter(taken).count();
    assert!(complaints.len() + n_taken <= set.len());
    for r in c.rows() {
        let own = asked(r.name);
        let refused = format!("{}=", r.name);
        let refused = complaints.iter().any(|c| c.starts_with(&refused));
        match r.source {
            Source::Default => assert!(r.value == r.default && refused >= own.is_some()),
            Source::Environment => assert!(!refused && own.is_none_or(|v| v == r.value)),
        }
    }
    if n_taken == 0 {
        return false;
    }
    // What is told of the settings in force says all of them.
    let row = |n: &str| c.rows().iter().find(|r| r.name == n);
    let (again, complaints) = Config::read(&|n| row(n).map(|r| r.value.clone()));
    assert_eq!(complaints, [""; 0]);
    assert!(again.rows().iter().all(|r| r.source == Source::Environment));
    macro_rules! same {
        ($($field:ident)*) => {
            $(assert_eq!(again.$field, c.$field, stringify!($field));)*
        };
    }
    same!(cuda_context streams host_chunk staging_chunk staging_memory max_mappings speed_mbps
          connect_timeout_s close_timeout_ms transports socket_ifname socket_family socket_threads
          sockets_per_thread ib timing);
    true
}

/// The bounds of the documentation.
fn check_settings(c: &Config) {
    assert!(matches!(
        c.cuda_context,
        ContextKind::Primary | ContextKind::Private
    ));
    assert!((1..=1024).contains(&c.streams));
    assert!((4 << 10..=16 << 20).contains(&c.host_chunk) && c.host_chunk.is_multiple_of(4096));
    assert!(
        (64 << 10..=256 << 20).contains(&c.staging_chunk) && c.staging_chunk.is_multiple_of(4096)
    );
    assert!(c.staging_memory <= 1 << 40);
    assert!((1..=1_000_000).contains(&c.max_mappings));
    assert!((1000..=10_000_000).contains(&c.speed_mbps));
    assert!((1..=3600).contains(&c.connect_timeout_s));
    assert!((10..=60_000).contains(&c.close_timeout_ms));
    let ways = [Transport::CopyEngine, Transport::Verbs, Transport::Tcp];
    assert!(ways.iter().any(|t| c.transports.allow(*t)));
    assert!(matches!(
        c.socket_family,
        None | Some(libc::AF_INET | libc::AF_INET6)
    ));
    assert!((1..=16).contains(&c.socket_threads) && (1..=64).contains(&c.sockets_per_thread));
    assert!((1..=2).contains(&c.ib.roce_version) && c.ib.service_level <= 15);
    assert!((1..=31).contains(&c.ib.timeout) && c.ib.retries <= 7);
    assert!((1..=16).contains(&c.ib.qps) && c.ib.routing_threshold <= 1 << 30);
}

/// Connected sockets: ours as a connection has them, and the peer's.
fn sockets(n: usize) -> (Vec<TcpStream>, Vec<Option<UnixStream>>) {
    (0..n)
        .map(|_| {
            let (ours, theirs) = UnixStream::pair().expect("a socket pair");
            ours.set_nonblocking(true).expect("non-blocking");
            theirs.set_nonblocking(true).expect("non-blocking");
            // Only reads, writes and shutdowns come, which do not ask what kind of a stream it is.
            (TcpStream::from(OwnedFd::from(ours)), Some(theirs))
        })
        .unzip()
}

fn service() -> Arc<Service> {
    static SERVICE: OnceLock<Arc<Service>> = OnceLock::new();
    let get = || Service::get().expect("this host has an address");
    SERVICE.get_or_init(get).clone()
}

fn peer() -> std::net::SocketAddr {
    ([127, 0, 0, 1], 1).into()
}

fn host_region(bytes: &[u8]) -> Region {
    Region {
        addr: bytes.as_ptr() as u64,
        len: bytes.len() as u64,
        memory: Memory::Host,
        id: 0,
        keys: None,
    }
}

/// Errors of a connection are its peer's fault, or of the sizes that the two sides name.
fn check_error(e: &Error) {
    let code = e.code();
    assert!(
        code == ResultCode::REMOTE || code == ResultCode::INVALID_USAGE,
        "{e}"
    );
}

/// The receiving end of a connection over TCP, and a peer that sends frames and noise over its sockets.
///
/// What is received is what was sent and no byte more; nothing is written beside a receive's buffer, nor into
/// it once it is over.
pub fn tcp_receiver(bytes: &[u8]) -> bool {
    const MAX: usize = 8;
    /// Bytes of a buffer, and between two of them.
    const ROOM: usize = 512;
    const GUARD: usize = 64;
    /// A byte that no payload has.
    const NEVER: u8 = 0xee;

    struct Posted {
        len: usize,
        outcome: Option<Result<usize, ResultCode>>,
        then: Vec<u8>,
    }

    let mut c = Choices(bytes);
    let n = 1 + usize::from(c.u8() % 3);
    let (ours, mut theirs) = sockets(n);
    let end = RecvConnection::new(service(), ours, peer());
    let mut memory = vec![NEVER; MAX * (ROOM + GUARD)];
    let region = host_region(&memory);
    let base = memory.as_mut_ptr();
    let at = |i: usize| i * (ROOM + GUARD);
    // SAFETY: the memory lives to the end, and the range is inside. Raw, because the connection writes there.
    let look =
        |i: usize, n: usize| unsafe { std::slice::from_raw_parts(base.add(at(i)), n).to_vec() };
    let mut posted: Vec<Posted> = Vec::new();
    // Of each receive, how many bytes frames have had, and where the last ended.
    let mut sent = [(0u64, 0u64); MAX + 1];
    let mut accepted = false;
    let mut test = |posted: &mut Vec<Posted>, i: usize| {
        let p = &mut posted[i];
        if p.outcome.is_some() {
            return;
        }
        let outcome = match end.poll(i) {
            Ok(None) => return,
            Ok(Some(n)) => Ok(n),
            Err(e) => {
                check_error(&e);
                Err(e.code())
            }
        };
        p.then = look(i, ROOM);
        match outcome {
            Ok(n) => {
                assert!(n <= p.len, "{n} bytes for {}", p.len);
                assert!(p.then[..n].iter().all(|b| *b != NEVER), "not all has come");
                assert!(p.then[n..].iter().all(|b| *b == NEVER), "more has come");
                accepted = true;
            }
            Err(ResultCode::INVALID_USAGE) => {
                assert!(
                    p.then.iter().all(|b| *b == NEVER),
                    "nothing was to be written"
                );
            }
            Err(_) => {}
        }
        p.outcome = Some(outcome);
    };
    let write = |to: &mut Option<UnixStream>, bytes: &[u8]| {
        if let Some(s) = to {
            // What does not fit is lost: the peer is not to be trusted anyway.
            let _ = s.write(bytes);
        }
    };
    while !c.0.is_empty() {
        let op = c.u8();
        let k = usize::from(op >> 4) % n;
        match op & 7 {
            0 if posted.len() < MAX => {
                let (len, tag) = (usize::from(c.u16()) % (ROOM + 1), u32::from(op >> 6));
                let i = posted.len();
                let addr = base as u64 + at(i) as u64;
                match end.recv(i, addr, len as u64, tag, &region) {
                    Ok(true) => posted.push(Posted {
                        len,
                        outcome: None,
                        then: Vec::new(),
                    }),
                    Ok(false) => {}
                    Err(e) => check_error(&e),
                }
            }
            0 | 1 => {
                // Likely to be right in all but what `how` says.
                let (i, how) = (usize::from(c.u8()) % (MAX + 1), c.u8());
                let (promised, next) = sent[i];
                let total = match how & 1 {
                    0 => posted.get(i).map_or(0, |p| p.len as u64),
                    _ => c.u16().into(),
                };
                let offset = match how & 2 {
                    0 => next,
                    _ => c.u8().into(),
                };
                let len = match how & 12 {
                    0 | 4 => total.saturating_sub(promised),
                    8 => c.u8().into(),
                    _ => c.u16().into(),
                };
                let f = Frame {
                    kind: kind::DATA,
                    seq: FIRST.wrapping_add(i as u32),
                    total,
                    offset,
                    len,
                };
                sent[i] = (promised + len, offset + len);
                let payload: Vec<u8> = (0..len.min(2048)).map(|i| i as u8 & 0x7f).collect();
                write(&mut theirs[k], &[&f.encode()[..], &payload].concat());
            }
            2 => {
                let f = Frame {
                    kind: u32::from(c.u8()),
                    seq: FIRST.wrapping_add(u32::from(c.u8())),
                    total: c.u16().into(),
                    offset: c.u8().into(),
                    len: c.u8().into(),
                };
                write(&mut theirs[k], &f.encode());
            }
            3 => {
                let n = usize::from(c.u8());
                let noise: Vec<u8> = c
                    .some(n)
                    .iter()
                    .map(|b| b.saturating_sub((*b == NEVER).into()))
                    .collect();
                write(&mut theirs[k], &noise);
            }
            4 => drop(theirs[k].take()),
            5 => drop(end.check().map_err(|e| check_error(&e))),
            _ if !posted.is_empty() => {
                let i = usize::from(c.u8()) % posted.len();
                test(&mut posted, i);
            }
            _ => {}
        }
    }
    for _ in 0..2 {
        for i in 0..posted.len() {
            test(&mut posted, i);
        }
    }
    for (i, p) in posted.iter().enumerate() {
        if p.outcome.is_some() {
            assert!(look(i, ROOM) == p.then, "written to after it was over");
        }
        let all = look(i, ROOM + GUARD);
        assert!(
            all[p.len..].iter().all(|b| *b == NEVER),
            "beside its buffer"
        );
    }
    drop(end);
    accepted
}

/// The sending end of a connection over TCP, and a peer that posts receives and noise.
///
/// What goes out are whole frames, for receives that were posted, with the bytes that were to be sent; and as
/// long as the peer reads, every send comes to an end.
pub fn tcp_sender(bytes: &[u8]) -> bool {
    const MAX: usize = 8;
    const MOST: usize = 160 << 10;
    static SOURCE: OnceLock<Vec<u8>> = OnceLock::new();
    let source = SOURCE.get_or_init(|| (0..MOST).map(|i| (i * 7 + (i >> 8)) as u8).collect());

    let mut c = Choices(bytes);
    let n = 1 + usize::from(c.u8() % 3);
    let (ours, mut theirs) = sockets(n);
    let end = SendConnection::new(service(), ours, peer());
    let region = host_region(source);
    let mut said: Vec<u8> = Vec::new();
    let mut heard: Vec<Vec<u8>> = vec![Vec::new(); n];
    let mut live: [Option<usize>; MAX] = [None; MAX];
    let (mut broken, mut accepted) = (false, false);
    // What the peer says on the socket that it posts receives on, as far as it got through.
    let mut say = |to: &mut Option<UnixStream>, bytes: &[u8]| {
        if let Some(n) = to.as_mut().and_then(|s| s.write(bytes).ok()) {
            said.extend_from_slice(&bytes[..n]);
        }
    };
    let hear = |theirs: &mut [Option<UnixStream>], heard: &mut [Vec<u8>]| {
        let mut some = false;
        for (s, to) in theirs.iter_mut().zip(heard) {
            let Some(s) = s else { continue };
            let mut buffer = [0; 64 << 10];
            loop {
                match s.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(n) => to.extend_from_slice(&buffer[..n]),
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => break,
                }
                some = true;
            }
        }
        some
    };
    let mut test = |live: &mut [Option<usize>; MAX], broken: &mut bool, i: usize| {
        let Some(len) = live[i] else { return };
        match end.poll(i) {
            Ok(None) => return,
            Ok(Some(n)) => {
                assert_eq!(n, len);
                accepted = true;
            }
            Err(e) => {
                check_error(&e);
                *broken |= e.code() == ResultCode::REMOTE;
            }
        }
        live[i] = None;
    };
    while !c.0.is_empty() {
        let op = c.u8();
        match op & 7 {
            0 | 1 => {
                let p = Post {
                    seq: FIRST.wrapping_add(u32::from(c.u8())),
                    tag: u32::from(op >> 6),
                    capacity: u64::from(c.u16()) << (op >> 4 & 3),
                };
                say(&mut theirs[0], &p.encode());
            }
            2 => {
                let n = usize::from(c.u8());
                say(&mut theirs[0], c.some(n));
            }
            3 => drop(theirs[usize::from(op >> 4) % n].take()),
            4 => drop(hear(&mut theirs, &mut heard)),
            5 => {
                if let Err(e) = end.check() {
                    check_error(&e);
                    broken = true;
                }
            }
            6 => {
                let len = (usize::from(c.u16()) << (op >> 4 & 3)).min(MOST);
                let tag = u32::from(op >> 6);
                if let Some(i) = live.iter().position(|l| l.is_none()) {
                    match end.send(i, region.addr, len as u64, tag, &region) {
                        Ok(true) => live[i] = Some(len),
                        Ok(false) => {}
                        Err(e) => {
                            check_error(&e);
                            broken = true;
                        }
                    }
                }
            }
            _ => test(&mut live, &mut broken, usize::from(c.u8()) % MAX),
        }
    }
    loop {
        let before = live;
        for i in 0..MAX {
            test(&mut live, &mut broken, i);
        }
        if !hear(&mut theirs, &mut heard) && before == live {
            break;
        }
    }
    let gone = theirs.iter().any(|s| s.is_none());
    assert!(
        broken || gone || live.iter().all(|l| l.is_none()),
        "a send hangs"
    );
    // Those that are in order are receives that it may answer.
    let posts: Vec<Post> = said
        .chunks_exact(POST_LEN)
        .map(|p| Post::decode(&padded(p)))
        .zip(0..)
        .take_while(|(p, i)| p.seq == FIRST.wrapping_add(*i))
        .map(|(p, _)| p)
        .collect();
    let mut brought = vec![0; posts.len()];
    for all in &heard {
        let mut rest = &all[..];
        while let Some((head, behind)) = rest.split_at_checked(FRAME_LEN) {
            let f = Frame::decode(&padded(head)).expect("a frame");
            let i = f.seq.wrapping_sub(FIRST) as usize;
            let p = posts.get(i).expect("a receive that was posted");
            if f.kind == kind::TOO_LARGE {
                assert!(f.total > p.capacity && f.total as usize <= MOST);
            } else {
                assert!(f.total <= p.capacity && f.total as usize <= MOST);
            }
            let n = behind.len().min(f.len as usize);
            assert!(
                behind[..n] == source[f.offset as usize..][..n],
                "other bytes"
            );
            brought[i] += n as u64;
            assert!(brought[i] <= f.total, "more bytes than the message has");
            assert!(broken || gone || n as u64 == f.len, "a frame is cut");
            rest = &behind[n..];
        }
        assert!(broken || gone || rest.is_empty(), "a head is cut");
    }
    accepted
}

/// The listener's side of setting up RDMA, as far as it goes without a device: a connector offers queue pairs, or
/// says anything else.
///
/// It is refused in so many words once it has made an offer, and told nothing else.
pub fn verbs_greeter(bytes: &[u8]) -> bool {
    let mut c = Choices(bytes);
    let (mut ours, mut theirs) = sockets(1);
    let (ours, theirs) = (ours.remove(0), &mut theirs[0]);
    let port = Port {
        device: "nowhere0".into(),
        port: 1,
        pci_path: None,
        guid: 0,
        speed_mbps: 0,
        link_layer: LinkLayer::Ethernet,
        latency_us: 0.0,
        lid: 0,
        mtu: 3,
        gids: 1,
        max_qp: 1,
    };
    let mut negotiation = Negotiation::new(vec![port], ours, service(), peer());
    let (n_ports, n_qps) = (usize::from(c.u8()), usize::from(c.u8()));
    let mut offer = Offer {
        block: 4096,
        ports: vec![PortOffer::default(); 1 + n_ports % MAX_PORTS],
        qps: vec![QpOffer { number: 1, psn: 1 }; 1 + n_qps % MAX_QPS],
        infiniband: false,
        traffic_class: 0,
        stages: false,
    };
    offer.ports.iter_mut().for_each(|p| p.mtu = 3);
    let good = offer.encode();
    let (mut said, mut closed) = (Vec::new(), false);
    let mut outcome = Ok(false);
    while !c.0.is_empty() && outcome.is_ok() {
        let op = c.u8();
        let n = usize::from(c.u16());
        let words = match op & 3 {
            0 => good.get(said.len()..).unwrap_or(&[]),
            1 => c.some(n & 127),
            2 => {
                closed |= theirs.take().is_some();
                &[]
            }
            _ => {
                outcome = negotiation.poll();
                &[]
            }
        };
        let words = &words[..n.min(words.len())];
        if let Some(n) = theirs.as_mut().and_then(|s| s.write(words).ok()) {
            said.extend_from_slice(&words[..n]);
        }
    }
    let outcome = outcome.and_then(|_| negotiation.poll());
    let offer = said.first_chunk().map(Offer::decode);
    match &outcome {
        Ok(ready) => assert!(!ready && offer.is_none() && !closed),
        Err(e) => assert!(offer.is_some() || closed, "{e}"),
    }
    assert!(negotiation.finish().is_err(), "there is no device");
    let mut heard = Vec::new();
    let Some(mut theirs) = theirs.take() else {
        return false;
    };
    // The negotiation's end is the end of what it says.
    let _ = theirs.read_to_end(&mut heard);
    let offered = matches!(offer, Some(Some(_)));
    match heard.first_chunk().map(Reply::decode) {
        None => assert!(heard.is_empty() && !offered),
        Some(Some(Reply::Refused(why))) => {
            assert!(offered && heard.len() == REPLY_LEN && !why.is_empty());
        }
        Some(reply) => panic!("{reply:?}"),
    }
    offered
}

/// Waits for what the kernel or the other end owes, which is a matter of moments.
fn until<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(t) = f() {
            return t;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::yield_now();
    }
}

/// A message over an honest peer's connection, and its end. `pump` is what the services' threads would do.
fn carry(mut send: impl SendEnd, mut recv: impl RecvEnd, mut pump: impl FnMut()) {
    let from: Vec<u8> = (0..3000).map(|i| i as u8).collect();
    let mut to = vec![0; from.len()];
    let (src, dst, len) = (
        from.as_ptr() as u64,
        to.as_mut_ptr() as u64,
        from.len() as u64,
    );
    let source = send.register(src, len, false).expect("host memory");
    let room = recv.register(dst, len, false).expect("host memory");
    until("the receive", || {
        recv.recv(0, dst, len, 0, &room)
            .expect("posts")
            .then_some(())
    });
    until("the send", || {
        pump();
        send.send(0, src, len, 0, &source)
            .expect("sends")
            .then_some(())
    });
    let (mut sent, mut came) = (None, None);
    until("the message", || {
        pump();
        sent = sent.or_else(|| send.poll(0).expect("is sent"));
        came = came.or_else(|| recv.poll(0).expect("comes"));
        sent.zip(came)
    });
    // The sender first: then the receiver need not wait for it.
    send.deregister(source).expect("no more of it");
    send.close().expect("ends");
    recv.deregister(room).expect("no more of it");
    recv.close().expect("ends");
    assert_eq!((sent, came), (Some(to.len()), Some(to.len())));
    assert!(to == from, "other bytes");
}

/// A socket that has connected to a listener over TCP, and what was said over it.
struct Caller {
    honest: bool,
    socket: Option<TcpStream>,
    name: SocketAddr,
    said: Vec<u8>,
    /// The service has looked since it said all.
    heard: bool,
    /// It says again what the honest peer said: whether that had been heard by then.
    repeats: Option<bool>,
}

/// Its end is to be a reset, which leaves no port in use.
fn ends_at_once(s: &TcpStream) {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    setsockopt(s, sockopt::Linger, &linger).expect("an option");
}

impl Caller {
    fn new(to: SocketAddr, honest: bool) -> Caller {
        let socket = TcpStream::connect(to).expect("the queue has room");
        ends_at_once(&socket);
        socket.set_nonblocking(true).expect("non-blocking");
        let name = socket.local_addr().expect("a name");
        Caller {
            honest,
            socket: Some(socket),
            name,
            said: Vec::new(),
            heard: false,
            repeats: None,
        }
    }

    fn say(&mut self, bytes: &[u8]) {
        let Some(s) = &mut self.socket else { return };
        let Ok(n) = s.write(bytes) else { return };
        self.said.extend_from_slice(&bytes[..n]);
        if !self.honest {
            return;
        }
        // Until it is there: not to be heard by then would be no fault.
        until("the acknowledgement", || {
            let mut rest: libc::c_int = 0;
            // SAFETY: the call writes an int.
            let r = unsafe { libc::ioctl(s.as_raw_fd(), libc::TIOCOUTQ, &raw mut rest) };
            let over = r != 0 || rest == 0 || !matches!(s.take_error(), Ok(None));
            over.then_some(())
        });
    }

    /// What it may have of a listener, by what it said.
    fn asks(&self, l: &Listener) -> Option<Hello> {
        let h = Hello::decode(self.said.first_chunk()?)?;
        let good = h.listener == l.id
            && h.secret == l.secret
            && l.allows[usize::from(h.purpose == purpose::VERBS)];
        good.then_some(h)
    }
}

/// A service that listens over TCP, and all who have called.
struct Hall {
    service: Arc<Service>,
    guests: Guests,
    /// Guests at a time, and incomplete connections.
    most: usize,
    /// Its secret may be known to strangers.
    known: Arc<Listener>,
    /// Its secret is the honest peer's.
    hidden: Arc<Listener>,
    callers: Vec<Caller>,
    /// What the honest peer says, by socket in the order in which it connects them.
    hellos: Vec<Hello>,
    /// It says all at once where it has connected, or in two pieces when it comes to that.
    prompt: bool,
    cut: usize,
    /// Steps that it has made.
    step: usize,
    /// Strangers who know a secret had filled the table of what is incomplete before the honest peer came.
    crowded: bool,
}

impl Hall {
    fn new(c: &mut Choices) -> Hall {
        let (head, cut) = (c.u8(), usize::from(c.u8()));
        let (most, cut) = ([3, 8, 5, 2][cut >> 6], cut & 63);
        let (service, guests) =
            Service::at(([127, 0, 0, 1], 0).into(), "lo".into(), most).expect("listens");
        let (n, first) = (1 + u16::from(head >> 2 & 3), u16::from(head >> 4 & 3));
        let known = service.listen([1; 16], [head & 1 == 0, head & 2 == 0]);
        let hidden = service.listen([2; 16], [true, false]);
        let hello = |k| Hello {
            listener: hidden.id,
            secret: hidden.secret,
            connection: [9; 16],
            socket: (k + first) % n,
            sockets: n,
            purpose: purpose::TCP,
        };
        Hall {
            hellos: (0..n).map(hello).collect(),
            service: Arc::new(service),
            guests,
            most,
            known,
            hidden,
            callers: Vec::new(),
            prompt: head & 64 == 0,
            cut,
            step: 0,
            crowded: false,
        }
    }

    fn call(&mut self, honest: bool) {
        self.callers
            .push(Caller::new(self.service.address(), honest));
    }

    /// What the honest peer does next; whether there was something.
    fn go_on(&mut self) -> bool {
        loop {
            let Some(hello) = self.hellos.get(self.step / 3).map(Hello::encode) else {
                return false;
            };
            match self.step % 3 {
                0 => self.call(true),
                piece => {
                    let own = self.callers.iter_mut().rev().find(|c| c.honest);
                    own.expect("it has called").say(match piece {
                        1 => &hello[..self.cut],
                        _ => &hello[self.cut..],
                    });
                }
            }
            self.step += 1;
            if !self.prompt || self.step.is_multiple_of(3) {
                return true;
            }
        }
    }

    fn round(&mut self) {
        let asks = |c: &Caller| c.asks(&self.hidden).or(c.asks(&self.known)).is_some();
        if self.callers.iter().all(|c| !c.honest || !c.heard) {
            let others = self.callers.iter().filter(|c| !c.honest && asks(c));
            self.crowded = others.count() >= self.most;
        }
        for c in &mut self.callers {
            c.heard = c.said.len() >= HELLO_LEN;
        }
        self.guests.round();
        let [pending, parties, _] = self.guests.held();
        assert!(pending.max(parties) <= self.most, "{pending}, {parties}");
    }

    /// A greeting of a stranger's: good for the known listener, but for what the input says.
    fn greet(&mut self, k: usize, c: &mut Choices) {
        let how = c.u8();
        let mut h = Hello {
            listener: self.known.id,
            secret: self.known.secret,
            connection: [c.u8() & 3; 16],
            socket: 0,
            sockets: 1,
            purpose: purpose::TCP,
        };
        if how & 1 != 0 {
            let bits = c.u8();
            h.secret[usize::from(bits >> 4)] ^= 1 << (bits & 7);
        }
        if how & 2 != 0 {
            let n = c.u8();
            (h.socket, h.sockets) = (u16::from(n & 15), u16::from(n >> 4));
        }
        if how & 4 != 0 {
            h.purpose = u16::from(c.u8() % 3);
        }
        if how & 8 != 0 {
            h.listener = h.listener.wrapping_add(c.u8().into());
        }
        let mut bytes = h.encode().to_vec();
        if how & 16 != 0 {
            bytes[usize::from(c.u8()) % HELLO_LEN] ^= 1;
        }
        if how & 32 != 0 {
            bytes.truncate(c.u8().into());
        }
        if how & 64 != 0 {
            let n = usize::from(c.u8());
            bytes.extend_from_slice(c.some(n));
        }
        self.callers[k].say(&bytes);
    }

    /// Says again what somebody said.
    fn repeat(&mut self, k: usize, of: usize) {
        let of = &self.callers[of];
        let n = of.said.len().min(HELLO_LEN);
        let (said, late) = (of.said[..n].to_vec(), of.heard);
        if of.honest || of.repeats.is_some() {
            let late = late && of.honest && self.callers[k].said.is_empty();
            self.callers[k].repeats.get_or_insert(late);
        }
        self.callers[k].say(&said);
    }

    /// Looks at a connection that a listener has; whether it has sockets of the honest peer's, and whether of
    /// others.
    fn check(&self, l: &Listener, a: &Accepted) -> [bool; 2] {
        let mut of = [false; 2];
        let mut id = None;
        for (i, s) in a.sockets.iter().enumerate() {
            let Ok(name) = s.peer_addr() else {
                // A stranger has reset it.
                of[1] = true;
                continue;
            };
            let caller = self.callers.iter().rev().find(|c| c.name == name);
            let caller = caller.expect("someone who has called");
            let h = caller.asks(l).expect("it knows the secret");
            assert_eq!(*id.get_or_insert(h.connection), h.connection);
            let place = (h.socket.into(), h.sockets.into(), h.purpose);
            assert_eq!(place, (i, a.sockets.len(), a.purpose));
            of[usize::from(!caller.honest)] = true;
        }
        of
    }
}

/// The service that listens over TCP; strangers that say anything, know the secret of one listener, and
/// repeat what they have seen; and an honest peer, which comes to another listener.
///
/// Only who knows a listener's secret has a connection, of the sockets that asked for it; the honest peer has
/// one, and it carries a message; no more is kept than may be, and in the end nothing.
pub fn tcp_greeter(bytes: &[u8]) -> bool {
    /// All callers.
    const MAX: usize = 20;
    let mut c = Choices(bytes);
    let mut hall = Hall::new(&mut c);
    let mut passed = Duration::ZERO;
    while !c.0.is_empty() {
        let op = c.u8();
        let n = hall.callers.len();
        let k = usize::from(op >> 3) % n.max(1);
        let stranger = hall.callers.get(k).is_some_and(|c| !c.honest);
        match op & 7 {
            0 if n < MAX => hall.call(false),
            0 | 1 if stranger => hall.greet(k, &mut c),
            2 if stranger => {
                let n = usize::from(c.u8());
                hall.callers[k].say(c.some(n));
            }
            3 if stranger => hall.repeat(k, usize::from(c.u8()) % n),
            4 if stranger && c.u8() & 1 == 0 => drop(hall.callers[k].socket.take()),
            4 if stranger => {
                if let Some(s) = &hall.callers[k].socket {
                    let _ = s.shutdown(std::net::Shutdown::Write);
                }
            }
            5 => drop(hall.go_on()),
            6 => hall.round(),
            7 => {
                let time = Duration::from_secs(u64::from(c.u8() & 31));
                hall.guests.pass(time);
                passed += time;
            }
            _ => {}
        }
    }
    while hall.go_on() {
        hall.round();
    }
    hall.round();
    // Some of it is too slow for the service; who listens in can be as good as the honest peer.
    let patience = Duration::from_secs(config::current().connect_timeout_s);
    let slow = !hall.prompt && (hall.callers.len() > hall.most || passed >= GREETING);
    let excused = slow || hall.crowded || passed >= patience;
    let repeats: Vec<bool> = hall.callers.iter().filter_map(|c| c.repeats).collect();
    let mut accepted = None;
    let mut others = Vec::new();
    for l in [hall.known.clone(), hall.hidden.clone()] {
        for a in lock(&l.waiting).take().into_iter().flatten() {
            match hall.check(&l, &a) {
                [true, false] => assert!(accepted.replace(a).is_none(), "twice"),
                [honest, _] => {
                    // A repetition that comes too late takes nothing over.
                    assert!(!honest || excused || repeats != [true], "taken over");
                    others.push(a);
                }
            }
        }
    }
    let good = accepted.is_some();
    assert!(good || excused || !repeats.is_empty(), "turned away");
    for c in &mut hall.callers {
        let asks = c.asks(&hall.known).or(c.asks(&hall.hidden)).is_some();
        let heard = |s: &mut TcpStream| s.read(&mut [0; 64]).unwrap_or(0);
        let n = c.socket.as_mut().filter(|_| !asks).map_or(0, heard);
        assert_eq!(n, 0, "an answer to who does not know the secret");
    }
    if let Some(a) = accepted {
        let Hall {
            callers, hellos, ..
        } = &mut hall;
        let own = callers.iter_mut().filter(|c| c.honest);
        let own = own
            .zip(hellos)
            .map(|(c, h)| (h.socket, c.socket.take().expect("open")));
        let mut own: Vec<(u16, TcpStream)> = own.collect();
        own.sort_by_key(|(i, _)| *i);
        let mut own: Vec<TcpStream> = own.into_iter().map(|(_, s)| s).collect();
        let mut said = [0; ANSWER_LEN];
        until("the answer", || own[0].read_exact(&mut said).ok());
        check_answer(&said).expect("the listener's answer");
        a.sockets.iter().for_each(ends_at_once);
        let service = || hall.service.clone();
        let send = SendConnection::new(service(), own, hall.service.address());
        carry(
            send,
            RecvConnection::new(service(), a.sockets, a.peer),
            || {},
        );
    }
    drop(others);
    hall.callers.clear();
    hall.guests.pass(Duration::from_secs(3600));
    until("the service to forget", || {
        hall.round();
        (hall.guests.held() == [0; 3]).then_some(())
    });
    good
}

/// What is said over a link, to whoever that address is of: good, but for what the input says.
fn link_message(c: &mut Choices, to: &Address) -> Message {
    let (which, how) = (c.u8(), c.u8());
    let (conn, region, export) = (
        u64::from(how & 3),
        u32::from(how >> 2 & 3),
        u64::from(how >> 4 & 1),
    );
    let text = "no".to_string();
    match which % 18 {
        0 => Message::Hello {
            version: PROTOCOL + u32::from(how & 1),
            target: match how & 2 {
                0 => to.process,
                _ => [how; 16],
            },
            source: [how; 16],
        },
        1 | 2 => {
            let mut secret = to.secret;
            secret[usize::from(how >> 4)] ^= how >> 2 & 1;
            Message::Connect {
                conn,
                listener: to.listener + u64::from(how >> 3 & 1),
                secret,
                host_chunk: 4096 + 1000 * u64::from(c.u8()),
                first: FIRST,
            }
        }
        3 => Message::Welcome,
        4 => Message::Refused { text },
        5 => Message::Connected { conn },
        6 => Message::ConnectFailed { conn, text },
        7 => {
            let n = usize::from(c.u8()) % (MAX_FDS + 1);
            let kind = match how & 32 {
                0 => ExportKind::Vmm {
                    sizes: vec![4096; n],
                    total: c.u8().into(),
                },
                _ => ExportKind::Ipc {
                    handle: [how; 64],
                    base: 4096,
                    size: 4096,
                },
            };
            let uuid = [how; 16];
            Message::Export { export, uuid, kind }
        }
        8 => {
            let target = match c.u8() % 3 {
                0 => Target::HostRing,
                1 => Target::Mapped {
                    export,
                    offset: c.u8().into(),
                },
                _ => Target::DeviceRing {
                    export,
                    chunk: c.u8().into(),
                },
            };
            Message::Region {
                conn,
                region: region << (how >> 2 & 24),
                len: c.u16().into(),
                target,
            }
        }
        9 => Message::RegionReady { conn, region },
        10 => Message::RegionFailed { conn, region, text },
        11 => Message::Drop { conn, region },
        12 => Message::Dropped { conn, region },
        13 => Message::WantHostDrain { conn },
        14 => match how & 4 {
            0 => Message::HostDrainReady { conn },
            _ => Message::HostDrainFailed { conn, text },
        },
        15 => Message::Close { conn },
        16 => Message::Withdraw { export },
        _ => Message::CloseAck { conn },
    }
}

/// Another process of the host, at its end of a link.
struct Stranger {
    socket: Option<OwnedFd>,
    /// It has connected to us, not we to it; and has greeted.
    calls: bool,
    greeted: bool,
    /// It has said what ends a link.
    broke: bool,
    /// Connections that it may have, as it knows the secret.
    owed: Vec<u64>,
}

impl Stranger {
    fn new(socket: OwnedFd, calls: bool) -> Stranger {
        Stranger {
            socket: Some(socket),
            calls,
            greeted: false,
            broke: false,
            owed: Vec::new(),
        }
    }

    fn hear(&mut self) {
        if let Some(s) = &self.socket {
            let _ = recv(s.as_raw_fd(), &mut [0; 256], MsgFlags::MSG_DONTWAIT);
        }
    }

    fn say(&mut self, packet: &[u8], fds: &[RawFd], to: &Address) {
        let Some(s) = &self.socket else { return };
        let rights = [ControlMessage::ScmRights(fds)];
        let rights = &rights[..usize::from(!fds.is_empty())];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let iov = [IoSlice::new(packet)];
        if sendmsg::<()>(s.as_raw_fd(), &iov, rights, flags, None).is_err() {
            return;
        }
        let message = Message::decode(packet);
        let senders = matches!(
            message,
            Some(
                Message::Connect { .. }
                    | Message::RegionReady { .. }
                    | Message::RegionFailed { .. }
                    | Message::Dropped { .. }
                    | Message::CloseAck { .. }
                    | Message::WantHostDrain { .. }
            )
        );
        // Others do not all arrive, which is no breach.
        let arrive = fds.len() <= MAX_FDS;
        let fits = |m: &Message| !arrive || m.fits_descriptors(fds.len());
        self.broke |= match &message {
            None => true,
            Some(m) if !fits(m) => true,
            Some(Message::Hello { .. }) => !self.calls,
            Some(Message::Close { .. }) => self.calls && !self.greeted,
            Some(_) => senders != self.calls || self.calls && !self.greeted,
        };
        match message {
            Some(Message::Hello { target, .. }) => self.greeted |= target == to.process,
            Some(Message::Connect {
                conn,
                listener,
                secret,
                ..
            }) => {
                let knows = (listener, secret) == (to.listener, to.secret);
                if self.greeted && knows && !self.owed.contains(&conn) {
                    self.owed.push(conn);
                }
            }
            _ => {}
        }
    }

    /// Reads to the end; whether it has come.
    fn is_let_go(&self) -> bool {
        let Some(s) = &self.socket else { return true };
        loop {
            match recv(s.as_raw_fd(), &mut [0; 256], MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) => return e != nix::errno::Errno::EAGAIN,
            }
        }
    }
}

fn packets() -> OwnedFd {
    socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .expect("a Unix socket")
}

/// Connections of a process that strangers take part in.
#[derive(Default)]
struct Doubtful {
    connecting: Vec<Connecting>,
    sends: Vec<LinkSend>,
    recvs: Vec<LinkRecv>,
    accepted: usize,
    /// Those that were closed: their numbers are free again.
    closed: usize,
}

impl Doubtful {
    fn accept(&mut self, known: &Listening) -> bool {
        let accepted = known.accept().map(|(_, r)| self.recvs.push(r));
        self.accepted += usize::from(accepted.is_some());
        accepted.is_some()
    }

    /// What their user would do next. `c` says how much of it; `memory`: what all those have that were accepted.
    fn go_on(&mut self, c: &mut Choices, known: &Listening, memory: &Shm) {
        let how = c.u8();
        let buffer = [0; 64];
        let region = host_region(&buffer);
        if how & 1 != 0 {
            self.connecting.retain_mut(|c| match c.poll() {
                Ok(None) => true,
                Ok(Some((_, send))) => {
                    self.sends.push(send);
                    false
                }
                Err(_) => false,
            });
        }
        if how & 2 != 0 {
            self.accept(known);
        }
        if how & 4 != 0 {
            for s in &self.sends {
                // Whatever comes of it: there is nobody to send to.
                let _ = s.send(0, region.addr, 0, 0, &region);
                let _ = s.poll(0);
            }
        }
        if how & 8 != 0 {
            for r in &self.recvs {
                let _ = r.register(region.addr, region.len, false);
                let _ = r.poll(0);
            }
        }
        if how & 16 != 0 {
            self.connecting.pop();
            self.sends.pop();
        }
        if how & 32 != 0 {
            // Only so it need not be waited for.
            memory
                .shared()
                .sender
                .store(side::CLOSED, Ordering::Release);
            self.closed += usize::from(self.recvs.pop().is_some());
        }
    }
}

fn open_files() -> usize {
    let all = std::fs::read_dir("/proc/thread-self/fd").expect("this thread's files");
    all.count()
}

/// The service that reads links; strangers that say anything, whether they call or are called, with any
/// descriptors, and know the secret of one listener; and an honest process, which comes to another listener.
///
/// Only who has greeted and knows a listener's secret has a connection; the honest process has one, and it
/// carries a message; who breaks the rules is let go; and in the end no link and no descriptor is left.
pub fn link_states(bytes: &[u8]) -> bool {
    let before = open_files();
    let good = among_strangers(bytes);
    assert_eq!(open_files(), before, "descriptors are left");
    good
}

fn among_strangers(bytes: &[u8]) -> bool {
    /// Strangers at a time, and connections to them.
    const MAX: usize = 6;
    let mut c = Choices(bytes);
    let ours = Arc::new(link::Service::by_hand().expect("a service"));
    let theirs = Arc::new(link::Service::by_hand().expect("a service"));
    let known = Listening::of(ours.clone());
    let hidden = Listening::of(ours.clone());
    let (to, mut honest) = (
        known.address(),
        Connecting::of(theirs.clone(), hidden.address()),
    );
    let (memory, sealed) = Shm::create(4096).expect("memory");
    let unsealed = memfd_create(c"bad", MFdFlags::MFD_CLOEXEC).expect("memory");
    let (_pipe, end) = nix::unistd::pipe().expect("a pipe");
    let mut strangers: Vec<Stranger> = Vec::new();
    let mut doubtful = Doubtful::default();
    let mut reached = None;
    let mut called = Vec::new();
    while !c.0.is_empty() {
        let op = c.u8();
        let k = usize::from(op >> 3) % strangers.len().max(1);
        match op & 7 {
            0 if strangers.len() < MAX => {
                let s = packets();
                connect(s.as_raw_fd(), &link::address(&to.process)).expect("listens");
                strangers.push(Stranger::new(s, true));
            }
            1..=3 if k < strangers.len() => {
                let packet = match op & 7 {
                    3 => {
                        let n = usize::from(c.u8());
                        c.some(n).to_vec()
                    }
                    _ => link_message(&mut c, &to).encode(),
                };
                let fits =
                    |n: &usize| Message::decode(&packet).is_some_and(|m| m.fits_descriptors(*n));
                let (how, which) = (c.u8(), usize::from(c.u8()));
                let n = match how & 128 {
                    0 => (0..=MAX_FDS).find(fits).unwrap_or(0),
                    _ => usize::from(how & 127),
                };
                let own = strangers[k].socket.as_ref().map_or(0, |s| s.as_raw_fd());
                let kinds = [&sealed, &end, &unsealed].map(|f| f.as_raw_fd());
                let kinds = [kinds[0], kinds[1], kinds[2], own];
                let fds: Vec<RawFd> = match which {
                    0 => vec![kinds[0]; n],
                    _ => (which..which + n).map(|i| kinds[i % 4]).collect(),
                };
                strangers[k].say(&packet, &fds, &to);
            }
            4 if k < strangers.len() && c.u8() & 1 == 0 => drop(strangers[k].socket.take()),
            4 if k < strangers.len() => strangers[k].hear(),
            5 if called.len() < MAX => {
                // A stranger that we call, or one that we have called before.
                let process = match called.get(usize::from(op >> 3)) {
                    Some(p) => *p,
                    None => random(),
                };
                let s = packets();
                let fresh = bind(s.as_raw_fd(), &link::address(&process)).is_ok()
                    && !called.contains(&process);
                listen(&s, Backlog::MAXALLOWABLE).ok();
                let mut asked = Connecting::of(ours.clone(), Address { process, ..to });
                drop(asked.poll());
                doubtful.connecting.push(asked);
                if fresh {
                    called.push(process);
                    let raw = accept(s.as_raw_fd()).expect("we have called");
                    // SAFETY: the kernel has just made the descriptor for us.
                    let s = unsafe { OwnedFd::from_raw_fd(raw) };
                    strangers.push(Stranger::new(s, false));
                }
            }
            6 => {
                ours.round();
                if op & 8 != 0 {
                    theirs.round();
                    let go_on = || honest.poll().expect("it may have a connection");
                    reached = reached.take().or_else(go_on);
                }
            }
            7 => doubtful.go_on(&mut c, &known, &memory),
            _ => {}
        }
    }
    let (_, send) = until("the honest process to be accepted", || {
        ours.round();
        theirs.round();
        let go_on = || honest.poll().expect("it may have a connection");
        reached.take().or_else(go_on)
    });
    let (_, recv) = hidden.accept().expect("it says that it was accepted");
    assert!(hidden.accept().is_none(), "who does not know the secret");
    carry(send, recv, || {
        ours.round();
        theirs.round();
    });
    memory
        .shared()
        .sender
        .store(side::CLOSED, Ordering::Release);
    while doubtful.accept(&known) {}
    let accepted = doubtful.accepted;
    let owed: usize = strangers.iter().map(|s| s.owed.len()).sum();
    assert!(
        accepted <= owed + doubtful.closed,
        "who does not know the secret"
    );
    let stay = strangers.iter().find(|s| s.broke && !s.is_let_go());
    assert!(stay.is_none(), "who breaks the rules");
    drop((doubtful, strangers, honest, theirs));
    until("the links to end", || {
        ours.round();
        (ours.links() == 0).then_some(())
    });
    accepted > 0
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// Replays what fuzzing has found worth keeping: each input that reaches something new.
    fn replay(name: &'static str, target: fn(&[u8]) -> bool) {
        if name == "link_states" {
            // It counts descriptors: those of other tests' threads are not to be among them.
            let alone = move || {
                let (first, last) = (3u32, u32::MAX);
                // SAFETY: no pointers; this thread uses none of the descriptors, and others keep theirs.
                let r = unsafe {
                    libc::syscall(
                        libc::SYS_close_range,
                        first,
                        last,
                        libc::CLOSE_RANGE_UNSHARE,
                    )
                };
                assert_eq!(r, 0);
                replay_all(name, target);
            };
            return std::thread::spawn(alone).join().unwrap();
        }
        replay_all(name, target);
    }

    fn replay_all(name: &str, target: fn(&[u8]) -> bool) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fuzz/corpus")
            .join(name);
        let (mut all, mut accepted) = (0, 0);
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            match std::panic::catch_unwind(|| target(&bytes)) {
                Ok(good) => accepted += usize::from(good),
                Err(_) => panic!("{} fails", path.display()),
            }
            all += 1;
        }
        // So that the inputs still mean something after a change of the format.
        assert!(accepted > 0, "{name}: none of {all} is accepted any more");
    }

    macro_rules! targets {
        ($($name:ident)*) => {
            $(#[test]
            fn $name() {
                replay(stringify!($name), super::$name);
            })*

            #[test]
            fn every_kept_input_is_replayed() {
                let known = [$(stringify!($name)),*];
                let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
                for folder in ["corpus", "fuzz_targets"] {
                    let mut found: Vec<String> = std::fs::read_dir(fuzz.join(folder))
                        .unwrap()
                        .map(|e| e.unwrap().path().file_stem().unwrap().to_str().unwrap().to_string())
                        .collect();
                    found.sort();
                    assert_eq!(found, known, "fuzz/{folder}");
                }
            }
        };
    }

    targets!(handle hca_filter interface_filter link_states link_wire settings tcp_greeter tcp_receiver
             tcp_sender tcp_wire verbs_greeter verbs_wire);
}
