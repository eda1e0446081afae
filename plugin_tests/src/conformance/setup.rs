//! How connections come about.

use std::time::{Duration, Instant};

use vccl::abi::types::{NCCL_PTR_CUDA, NCCL_PTR_HOST, NET_DEVICE_HOST};

use super::util::{
    accept, close_listen, connect, connect_within, listen, memory, recv, send, wait,
};
use super::Case;
use crate::error::{Context, Error, Result};
use crate::exchange::{exchange, simple, Shape, Stream};
use crate::net::{Comm, Handle};
use crate::rank::{close_limit, Ctx, Link};
use crate::{ensure, fail};

pub const CASES: &[Case] = &[
    Case::new("properties", "setup", 1, properties,
        "every device describes itself with values that NCCL takes, and no device has no properties")
    .without_memory(),
    Case::new("virtual_devices", "setup", 1, virtual_devices,
        "makeVDevice joins devices once however often it is asked, adds up their speeds, and refuses nonsense")
    .without_memory(),
    Case::new("connect_before_accept", "setup", 2, connect_before_accept,
        "connect may be called long before accept, never blocks, and the connection works both ways round"),
    Case::new("accept_first", "setup", 2, accept_first,
        "accept with nobody connecting gives NULL each time, and works once somebody does"),
    Case::new("unused_listeners", "setup", 2, unused_listeners,
        "listeners that nobody connects to can be closed, and leave no descriptor open")
    .processes_only(),
    Case::new("many_listeners", "setup", 2, many_listeners,
        "64 listeners at once each accept the one that has their handle"),
    Case::new("shared_handle", "setup", 3, shared_handle,
        "one handle used by six connectors of two ranks gives six connections whose data does not mix"),
];

fn virtual_devices(ctx: &mut Ctx) -> Result<()> {
    if ctx.plugin.abi() < 9 {
        return Err(Error::skip("NCCL joins devices from ABI version 9 on"));
    }
    let net = &ctx.session;
    let n = net.devices()?;
    // Device 0 may be one that cannot be joined: nonsense is refused all the same.
    for (count, members) in [
        (0, vec![]),
        (-1, vec![]),
        (i32::MAX, vec![0]),
        (i32::MIN, vec![0]),
        (9, vec![0; 9]),
        (1, vec![-1]),
        (1, vec![n]),
        (2, vec![0, 0]),
        (2, vec![0, n + 7]),
    ] {
        match net.make_v_device(count, &members) {
            Ok(d) => fail!("{count} devices {members:?} were joined into device {d}"),
            Err(e) => ensure!(e.code().is_some(), "{count} devices {members:?}: {e}"),
        }
        ensure!(
            net.devices()? == n,
            "a refused makeVDevice changed the number of devices"
        );
    }
    if n < 2 {
        return Err(Error::skip("there are not two devices to join"));
    }
    let parts = [net.properties(0)?, net.properties(1)?];
    let joined = net.make_v_device(2, &[0, 1])?;
    ensure!(
        joined == n && net.devices()? == n + 1,
        "the first virtual device of {n} has number {joined}"
    );
    let p = net.properties(joined)?;
    ensure!(
        p.speed == parts[0].speed + parts[1].speed,
        "its speed is {}, of {} and {}",
        p.speed,
        parts[0].speed,
        parts[1].speed
    );
    let (count, devs) = p.v_devices.clone().unwrap_or_default();
    ensure!(
        count == 2 && devs[..2] == [0, 1],
        "its vProps are {count} {devs:?}"
    );
    ensure!(
        parts.iter().all(|q| q.name != p.name),
        "it has the name of a part: {}",
        p.name
    );
    let again = net.make_v_device(2, &[0, 1])?;
    ensure!(
        again == joined && net.devices()? == n + 1,
        "the same devices, joined again, are number {again}"
    );
    let other = net.make_v_device(2, &[1, 0])?;
    ensure!(other == n + 1, "another order is another device: {other}");
    let (_, l) = net.listen(joined)?;
    net.close_listen(l)?;
    Ok(())
}

fn properties(ctx: &mut Ctx) -> Result<()> {
    let net = &ctx.session;
    let n = net.devices()?;
    ensure!(
        net.devices()? == n,
        "devices() gives {n} once and another number later"
    );
    ensure!(!ctx.plugin.name().is_empty(), "the network has no name");
    for dev in 0..n {
        let p = net.properties(dev)?;
        let say = |what: &str| format!("device {dev}: {what}: {p:?}");
        ensure!(!p.name.is_empty(), "{}", say("it has no name"));
        ensure!(
            p.ptr_support & NCCL_PTR_HOST != 0,
            "{}",
            say("it takes no host memory")
        );
        if ctx.gpu().is_some() {
            ensure!(
                p.ptr_support & NCCL_PTR_CUDA != 0,
                "{}",
                say("it takes no GPU memory")
            );
        }
        ensure!(p.speed > 0, "{}", say("its speed is not above 0"));
        ensure!(
            p.latency >= 0.0 && p.latency < 1e6,
            "{}",
            say("its latency makes no sense")
        );
        ensure!(p.max_comms > 0, "{}", say("it allows no comms"));
        ensure!(
            (1..=32).contains(&p.max_recvs),
            "{}",
            say("maxRecvs is not in 1..32")
        );
        if let Some(path) = &p.pci_path {
            let exists = std::path::Path::new(path).exists();
            ensure!(exists, "{}", say("its path does not exist"));
        }
        if let Some(t) = p.device_type {
            ensure!(t == NET_DEVICE_HOST, "{}", say("it claims device offload"));
        }
        for (name, bytes) in [
            ("maxP2pBytes", p.max_p2p_bytes),
            ("maxCollBytes", p.max_coll_bytes),
        ] {
            if let Some(b) = bytes {
                let fits = b > 0 && b <= 1 << 40;
                ensure!(fits, "{}", say(&format!("NCCL refuses {name}={b}")));
            }
        }
        if let Some((count, devs)) = &p.v_devices {
            let fits = *count >= 1 && *count as usize <= devs.len();
            ensure!(fits, "{}", say("vProps.ndevs does not fit its array"));
            for d in &devs[..*count as usize] {
                ensure!(
                    (0..n).contains(d),
                    "{}",
                    say("vProps names a device that does not exist")
                );
            }
        }
        if let Some(m) = p.max_multi_request {
            ensure!(m >= 1, "{}", say("maxMultiRequestSize is below 1"));
        }
    }
    for dev in [-1, n, n + 1000] {
        match net.properties(dev) {
            Ok(p) => fail!("device {dev} of {n} has properties: {p:?}"),
            Err(e) => ensure!(e.code().is_some(), "device {dev} of {n}: {e}"),
        }
        if let Ok((_, l)) = net.listen(dev) {
            net.close_listen(l)?;
            fail!("listen works on device {dev} of {n}");
        }
    }
    Ok(())
}

fn opened(ctx: &mut Ctx, peer: usize, comm: Comm) -> Link {
    Link {
        id: ctx.next_connection(),
        peer,
        comm,
    }
}

fn connect_before_accept(ctx: &mut Ctx) -> Result<()> {
    for listener_rank in [1, 0] {
        let peer = 1 - ctx.rank;
        let link = if ctx.rank == listener_rank {
            let (handle, l) = listen(ctx)?;
            ctx.oob.send(peer, handle.0)?;
            let word = ctx.oob.recv(peer)?;
            ensure!(word == b"connecting", "out of step");
            std::thread::sleep(Duration::from_millis(100));
            let c = accept(ctx, l)?;
            close_listen(ctx, l)?;
            opened(ctx, peer, Comm::Recv(c))
        } else {
            let mut handle = ctx.recv_handle(peer)?;
            let start = Instant::now();
            let mut comm = connect_within(ctx, &mut handle, Duration::ZERO)?;
            let took = start.elapsed();
            ensure!(
                took < close_limit(),
                "connect with nobody accepting blocked for {took:?}"
            );
            ctx.oob.send(peer, b"connecting".to_vec())?;
            if comm.is_none() {
                comm = Some(connect(ctx, &mut handle)?);
            }
            let Some(c) = comm else { fail!("no comm") };
            opened(ctx, peer, Comm::Send(c))
        };
        simple(ctx, &[link], 10, 5_000, 1)?;
        ctx.close(&[link])?;
    }
    Ok(())
}

fn accept_first(ctx: &mut Ctx) -> Result<()> {
    let link = if ctx.rank == 1 {
        let (handle, l) = listen(ctx)?;
        let start = Instant::now();
        for i in 0..1000 {
            let got = ctx
                .service(|net| net.accept(l))
                .context(|| format!("accept number {i}"))?;
            ensure!(
                got.is_none(),
                "accept gave a comm and nobody has the handle"
            );
        }
        let took = start.elapsed();
        ensure!(
            took < Duration::from_secs(5),
            "1000 accepts took {took:?}: they must not block"
        );
        ctx.oob.send(0, handle.0)?;
        let c = accept(ctx, l)?;
        close_listen(ctx, l)?;
        opened(ctx, 0, Comm::Recv(c))
    } else {
        let mut handle = ctx.recv_handle(1)?;
        let c = connect(ctx, &mut handle)?;
        opened(ctx, 1, Comm::Send(c))
    };
    simple(ctx, &[link], 10, 5_000, 2)?;
    ctx.close(&[link])
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, |d| d.count())
}

fn unused_listeners(ctx: &mut Ctx) -> Result<()> {
    // Whatever the plugin keeps for the process's life is there after the first one.
    let (_, l) = listen(ctx)?;
    close_listen(ctx, l)?;
    let before = open_files();
    for _ in 0..100 {
        let (_, l) = listen(ctx)?;
        close_listen(ctx, l)?;
    }
    let after = open_files();
    ensure!(
        after <= before,
        "100 closed listeners left {} descriptors open",
        after - before
    );
    let links = ctx.connect(&[(0, 1)])?;
    simple(ctx, &links, 1, 100, 0)?;
    ctx.close(&links)
}

const LISTENERS: usize = 64;

fn many_listeners(ctx: &mut Ctx) -> Result<()> {
    let mut links = Vec::new();
    if ctx.rank == 1 {
        let mut listeners = Vec::new();
        for _ in 0..LISTENERS {
            let (handle, l) = listen(ctx)?;
            ctx.oob.send(0, handle.0)?;
            listeners.push(l);
        }
        for l in &listeners {
            let c = accept(ctx, *l)?;
            links.push(opened(ctx, 0, Comm::Recv(c)));
        }
        for l in listeners {
            close_listen(ctx, l)?;
        }
    } else {
        let mut handles: Vec<(usize, Handle)> = (0..LISTENERS)
            .map(|i| Ok((i, ctx.recv_handle(1)?)))
            .collect::<Result<_>>()?;
        handles.reverse();
        let dev = ctx.dev;
        let end = Instant::now() + crate::rank::CONNECT_LIMIT;
        let mut comms = vec![None; LISTENERS];
        // All at once, the last listener first.
        while comms.iter().any(Option::is_none) {
            ensure!(Instant::now() < end, "not all of 64 connected");
            for (i, h) in &mut handles {
                if comms[*i].is_none() {
                    comms[*i] = ctx.service(|net| net.connect(dev, h))?;
                }
            }
        }
        for c in comms.into_iter().flatten() {
            links.push(opened(ctx, 1, Comm::Send(c)));
        }
    }
    ensure!(
        links.len() == LISTENERS,
        "{} of {LISTENERS} connections",
        links.len()
    );
    // The data's key has the connection's number: a mixed-up pair is a mismatch.
    simple(ctx, &links, 3, 1_000, 3)?;
    ctx.close(&links)
}

const EACH: usize = 3;

fn shared_handle(ctx: &mut Ctx) -> Result<()> {
    let mut links: Vec<Link> = Vec::new();
    if ctx.rank == 0 {
        let (handle, l) = listen(ctx)?;
        ctx.oob.send(1, handle.0)?;
        ctx.oob.send(2, handle.0)?;
        for _ in 0..2 * EACH {
            let c = accept(ctx, l)?;
            links.push(Link {
                id: usize::MAX,
                peer: usize::MAX,
                comm: Comm::Recv(c),
            });
        }
        close_listen(ctx, l)?;
        // Each connector says who it is. They connected at the same time, so that any may be first.
        let mut names = Vec::new();
        for link in &links {
            let (buffer, reg) = memory(ctx, link, 16)?;
            let r = recv(ctx, link, &reg, 0, 16, 0)?;
            names.push((buffer, reg, r));
        }
        // Small allocations share a block of the GPU, so none is freed while another is received into.
        let mut kept = Vec::new();
        for (link, (buffer, reg, r)) in links.iter_mut().zip(names) {
            let size = wait(ctx, "the connector's name", r)?;
            ensure!(size == 16, "the connector's name has {size} bytes");
            let mut name = [0u8; 16];
            buffer.read(0, &mut name)?;
            ensure!(
                name[0] == b'R' && name[1..3].iter().all(|b| *b < 4),
                "bad name {name:?}"
            );
            link.peer = name[1] as usize;
            link.id = (link.peer - 1) * EACH + name[2] as usize;
            ctx.deregister(vec![reg])?;
            kept.push(buffer);
        }
        drop(kept);
        links.sort_by_key(|l| l.id);
        let ids: Vec<usize> = links.iter().map(|l| l.id).collect();
        ensure!(
            ids == (0..2 * EACH).collect::<Vec<_>>(),
            "the connectors were {ids:?}"
        );
    } else {
        let original = ctx.recv_handle(0)?;
        let mut handles = [original; EACH];
        let mut comms = [None; EACH];
        let dev = ctx.dev;
        let end = Instant::now() + crate::rank::CONNECT_LIMIT;
        while comms.iter().any(Option::is_none) {
            ensure!(
                Instant::now() < end,
                "connectors with one handle did not all connect"
            );
            for (h, c) in handles.iter_mut().zip(&mut comms) {
                if c.is_none() {
                    *c = ctx.service(|net| net.connect(dev, h))?;
                }
            }
        }
        for (i, c) in comms.into_iter().flatten().enumerate() {
            let link = Link {
                id: (ctx.rank - 1) * EACH + i,
                peer: 0,
                comm: Comm::Send(c),
            };
            let (buffer, reg) = memory(ctx, &link, 16)?;
            let mut name = [0u8; 16];
            name[..3].copy_from_slice(&[b'R', ctx.rank as u8, i as u8]);
            buffer.write(0, &name)?;
            let r = send(ctx, &link, &reg, 0, 16, 0)?;
            wait(ctx, "the connector's name", r)?;
            ctx.deregister(vec![reg])?;
            links.push(link);
        }
    }
    let shape = |_: usize| Shape::plain(4096);
    let streams: Vec<Stream> = links.iter().map(|l| Stream::new(l, 64, &shape)).collect();
    exchange(ctx, &streams)?;
    ctx.close(&links)
}
