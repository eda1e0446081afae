//! What must hold of every parser of bytes that others wrote, whatever they are: the body of each target in
//! `fuzz/`, of the same name. The tests replay the inputs that are kept there.
//!
//! Each function panics where a property does not hold, and says whether it met something that was accepted.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};

use crate::config::{Config, ContextKind, Source, Transport};
use crate::error::{Error, ResultCode};
use crate::ibverbs::filter::Filter as HcaFilter;
use crate::ibverbs::sys::{MTU_256, MTU_4096};
use crate::net::handle::{
    attempt, checksum, set_attempt, Handle, Rdma, ATTEMPT, CHECKED, HANDLE_LEN,
};
use crate::transport::copy_engine::wire::{ExportKind, Message, MAX_FDS, MAX_PACKET, MAX_TEXT};
use crate::transport::staging::{CHUNKS, LARGE};
use crate::transport::tcp::interfaces::Filter as InterfaceFilter;
use crate::transport::tcp::recv::RecvConnection;
use crate::transport::tcp::send::SendConnection;
use crate::transport::tcp::service::Service;
use crate::transport::tcp::wire::{
    answer, check_answer, kind, purpose, Frame, Hello, Post, ANSWER_LEN, FIRST, FRAME_LEN,
    HELLO_LEN, HELLO_MAGIC, MAX_SOCKETS, POST_LEN,
};
use crate::transport::verbs::wire::{
    check, done_of, done_words, Descriptor, Imm, Offer, Reply, DESCRIPTOR_WORDS, MAX_GIDS,
    MAX_PORTS, MAX_QPS, OFFER_LEN, OFFER_MAGIC, REASON, REPLY_LEN, REPLY_MAGIC, RING, SHORT,
};
use crate::transport::{End, Memory, RecvEnd, Region, SendEnd};

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
    assert!((4 << 10..=16 << 20).contains(&c.host_chunk) && c.host_chunk % 4096 == 0);
    assert!((64 << 10..=256 << 20).contains(&c.staging_chunk) && c.staging_chunk % 4096 == 0);
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// Replays what fuzzing has found worth keeping: each input that reaches something new.
    fn replay(name: &str, target: fn(&[u8]) -> bool) {
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

    targets!(handle hca_filter interface_filter link_wire settings tcp_receiver tcp_sender tcp_wire
             verbs_wire);
}
