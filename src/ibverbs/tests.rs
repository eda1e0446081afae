use super::*;
use std::time::{Duration, Instant};

/// Set where there must be devices: in the guest.
fn devices_expected() -> bool {
    std::env::var_os("VCCL_TEST_RDMA").is_some_and(|v| v == "1")
}

#[test]
fn without_the_library_there_is_a_reason() {
    let error = Verbs::load(c"libvccl-nonexistent.so.1").unwrap_err();
    assert!(error.starts_with("no RDMA library (libvccl-nonexistent.so.1): "));
}

#[test]
fn another_library_is_refused() {
    let error = Verbs::load(c"libc.so.6").unwrap_err();
    assert!(error.starts_with("libc.so.6: the library has no ibv_fork_init"));
}

#[test]
fn the_library_is_there_or_says_why_not() {
    match verbs() {
        Err(reason) => {
            assert!(reason.contains("libibverbs.so.1"), "{reason}");
            assert!(!devices_expected(), "{reason}");
        }
        Ok(verbs) => {
            let devices = verbs.devices().unwrap();
            assert_eq!(devices.iter().count(), devices.len());
            assert!(!devices.is_empty() || !devices_expected());
            let found = devices::enumerate(verbs, &filter::Filter::default()).unwrap();
            assert!(!found.ports.is_empty() || !devices_expected());
            let error = verbs.open("nonexistent").unwrap_err();
            assert_eq!(error.text(), "there is no RDMA device nonexistent");
            assert_eq!(verbs.wc_status(sys::WC_SUCCESS), "success (0)");
            assert!(verbs.event_type(sys::EVENT_PORT_ERR).ends_with(" (10)"));
            assert!(verbs.wc_status(-1).ends_with("(-1)"));
        }
    }
}

#[test]
fn memory_that_cannot_be_locked_names_the_limit_and_the_cure() {
    let text = memlock_cure(Some(8_388_608));
    assert!(text.contains("8388608 bytes (RLIMIT_MEMLOCK)"), "{text}");
    assert!(text.contains("ulimit -l unlimited"), "{text}");
    assert!(memlock_cure(Some(libc::RLIM_INFINITY)).contains("not limited"));
    let error = failed(|| "cannot register 5 bytes".into(), Errno::ENOMEM);
    assert_eq!(error.code(), ResultCode::SYSTEM);
    assert!(error.text().starts_with("cannot register 5 bytes: "));
    assert!(error.text().contains("RLIMIT_MEMLOCK"));
    let other = failed(|| "cannot register 5 bytes".into(), Errno::EFAULT);
    assert!(!other.text().contains("RLIMIT_MEMLOCK"));
}

#[test]
fn codes_become_errors() {
    assert!(check(0, || unreachable!()).is_ok());
    let error = check(libc::EINVAL, || "it".into()).unwrap_err();
    assert!(error.text().contains("EINVAL"), "{error}");
    Errno::EBUSY.set();
    let error = check(-1, || "it".into()).unwrap_err();
    assert!(error.text().contains("EBUSY"), "{error}");
}

#[test]
fn types_of_gids_are_read() {
    assert_eq!(GidType::parse("RoCE v2\n"), Some(GidType::RoceV2));
    assert_eq!(
        GidType::parse("IB/RoCE v1\n"),
        Some(GidType::InfiniBandOrRoceV1)
    );
    assert_eq!(GidType::parse(""), None);
    let root = std::env::temp_dir().join(format!("vccl-gid-{}", std::process::id()));
    let folder = root.join("a/ports/1/gid_attrs/types");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("3"), "RoCE v2\n").unwrap();
    std::fs::create_dir(folder.join("4")).unwrap();
    let three = gid_type(&root, "a", 1, 3);
    let two = gid_type(&root, "a", 1, 2);
    let four = gid_type(&root, "a", 1, 4);
    std::fs::remove_dir_all(&root).unwrap();
    assert_eq!(three.unwrap(), Some(GidType::RoceV2));
    assert_eq!(two.unwrap(), None);
    assert!(four.unwrap_err().text().contains("EISDIR"));
}

/// The kernel's `CAP_IPC_LOCK`: who has it may lock what he likes.
const IPC_LOCK: u32 = 14;

/// Takes that capability from this thread. Others keep it.
fn give_up_ipc_lock() {
    // Source: capget(2), version 3: a version and a thread, then two halves of three sets each.
    let mut header = [0x2008_0522u32, 0];
    let mut sets = [[0u32; 3]; 2];
    let (h, s) = (header.as_mut_ptr(), sets.as_mut_ptr());
    // SAFETY: both are as long as the call takes them to be.
    let got = unsafe { libc::syscall(libc::SYS_capget, h, s) };
    assert_eq!(got, 0);
    sets[0][0] &= !(1 << IPC_LOCK);
    let (h, s) = (header.as_mut_ptr(), sets.as_mut_ptr());
    // SAFETY: as above.
    let set = unsafe { libc::syscall(libc::SYS_capset, h, s) };
    assert_eq!(set, 0);
}

#[test]
#[ignore = "needs an RDMA device"]
fn memory_beyond_the_limit_is_refused_with_the_cure() {
    use nix::sys::resource::{getrlimit, setrlimit, Resource::RLIMIT_MEMLOCK};
    let verbs = verbs().unwrap();
    let name = verbs.devices().unwrap().iter().next().expect("none").name();
    let pd = Arc::new(Arc::new(verbs.open(&name).unwrap()).alloc_pd().unwrap());
    let mut memory = vec![0u8; 1 << 20];
    let (soft, hard) = getrlimit(RLIMIT_MEMLOCK).unwrap();
    setrlimit(RLIMIT_MEMLOCK, 65536, hard).unwrap();
    let refused = std::thread::scope(|s| {
        let refused = s.spawn(|| {
            give_up_ipc_lock();
            // SAFETY: the vector outlives the region, and nobody learns its key.
            unsafe { pd.reg_mr(memory.as_mut_ptr(), memory.len(), sys::ACCESS_LOCAL_WRITE) }
                .map(|_| ())
        });
        refused.join().unwrap()
    });
    setrlimit(RLIMIT_MEMLOCK, soft, hard).unwrap();
    let refused = refused.unwrap_err();
    println!("{refused}");
    assert!(refused.text().contains("65536 bytes (RLIMIT_MEMLOCK)"));
}

const PORT: u8 = 1;

/// A RoCE v2 GID of the first port, an IPv4 one if there is one; else any that is set.
fn gid(context: &Context) -> (u8, sys::Gid) {
    let attr = context.query_port(PORT).unwrap();
    let mut gids = Vec::new();
    for index in 0..attr.gid_tbl_len {
        let Ok(gid) = context.query_gid(PORT, index) else {
            continue;
        };
        let kind = context.gid_type(PORT, index).unwrap();
        if gid != sys::Gid::default() && kind.is_some() {
            let v4 = gid.0[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
            println!("gid {index}: {gid:02x?} {kind:?}");
            gids.push((kind == Some(GidType::RoceV2), v4, index as u8, gid));
        }
    }
    let best = gids.iter().max_by_key(|g| (g.0, g.1)).expect("no GID");
    (best.2, best.3)
}

fn connect(qp: &Qp, peer: u32, lid: u16, (index, gid): (u8, sys::Gid)) {
    let mut attr = sys::QpAttr {
        qp_state: sys::QPS_INIT,
        port_num: PORT,
        qp_access_flags: sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE,
        ..Default::default()
    };
    let mask = sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS;
    qp.modify(&attr, mask).unwrap();
    attr.qp_state = sys::QPS_RTR;
    attr.path_mtu = sys::MTU_256 + 2;
    attr.dest_qp_num = peer;
    attr.rq_psn = 77;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = 12;
    attr.ah_attr = sys::AhAttr {
        grh: sys::GlobalRoute {
            dgid: gid,
            sgid_index: index,
            hop_limit: 64,
            ..Default::default()
        },
        dlid: lid,
        is_global: 1,
        port_num: PORT,
        ..Default::default()
    };
    let mask = sys::QP_STATE
        | sys::QP_AV
        | sys::QP_PATH_MTU
        | sys::QP_DEST_QPN
        | sys::QP_RQ_PSN
        | sys::QP_MAX_DEST_RD_ATOMIC
        | sys::QP_MIN_RNR_TIMER;
    qp.modify(&attr, mask).unwrap();
    attr.qp_state = sys::QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = 6;
    attr.rnr_retry = 7;
    attr.sq_psn = 77;
    attr.max_rd_atomic = 1;
    let mask = sys::QP_STATE
        | sys::QP_TIMEOUT
        | sys::QP_RETRY_CNT
        | sys::QP_RNR_RETRY
        | sys::QP_SQ_PSN
        | sys::QP_MAX_QP_RD_ATOMIC;
    qp.modify(&attr, mask).unwrap();
}

fn completion(cq: &Cq) -> sys::Wc {
    let end = Instant::now() + Duration::from_secs(20);
    let mut wc = [sys::Wc::default(); 4];
    while Instant::now() < end {
        match cq.poll(&mut wc).unwrap() {
            0 => std::thread::yield_now(),
            1 => return wc[0],
            n => panic!("{n} completions in place of one"),
        }
    }
    panic!("no completion");
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_write_with_immediate_arrives_in_loopback() {
    let verbs = verbs().unwrap();
    let found = devices::enumerate(verbs, &filter::Filter::default()).unwrap();
    println!("{found:#?}");
    let port = found.ports.iter().find(|p| p.port == PORT).expect("none");
    let context = Arc::new(verbs.open(&port.device).unwrap());
    assert_eq!(context.name(), port.device);
    let attr = context.query_device().unwrap();
    assert!(attr.phys_port_cnt >= 1 && attr.max_qp > 0 && attr.max_sge > 0);
    println!("{attr:?}");
    let port_attr = context.query_port(PORT).unwrap();
    println!("{port_attr:?}");
    assert_eq!(port_attr.state, sys::PORT_ACTIVE);
    assert!(context.query_port(attr.phys_port_cnt + 1).is_err());
    context.set_async_nonblocking().unwrap();
    assert!(context.async_fd().as_raw_fd() >= 0);
    while let Some(event) = context.async_event().unwrap() {
        println!("before: {event:?} {}", verbs.event_type(event.kind));
    }
    let gid = gid(&context);

    let pd = Arc::new(context.alloc_pd().unwrap());
    let cq = || Arc::new(context.create_cq(16).unwrap());
    let (cq_a, cq_b) = (cq(), cq());
    assert_ne!(cq_a.id(), cq_b.id());
    let cap = sys::QpCap {
        max_send_wr: 8,
        max_recv_wr: 8,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 16,
    };
    let qp = |cq: &Arc<Cq>| pd.create_qp(cq, cq, cap, false).unwrap();
    let (a, b) = (qp(&cq_a), qp(&cq_b));
    assert!(a.cap().max_send_wr >= 8 && a.cap().max_inline_data >= 16);
    connect(&a, b.number(), port_attr.lid, gid);
    connect(&b, a.number(), port_attr.lid, gid);

    const LENGTH: usize = 10_000;
    let source: Vec<u8> = (0..LENGTH).map(|i| (i * 7 + i / 251) as u8).collect();
    let mut from = source.clone();
    let mut to = vec![0xaau8; LENGTH + 2];
    let reach = sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE;
    // SAFETY: the vectors live until the regions are given back, and are looked at only when
    // nothing is under way.
    let from_mr = unsafe { pd.reg_mr(from.as_mut_ptr(), LENGTH, 0) }.unwrap();
    // SAFETY: as above.
    let to_mr = unsafe {
        pd.reg_mr(
            to.as_mut_ptr().wrapping_add(1),
            LENGTH,
            reach | sys::ACCESS_RELAXED_ORDERING,
        )
    }
    .unwrap();
    let to_at = to.as_ptr() as u64 + 1;

    let write = |wr_id, rkey, length: usize, flags| {
        let mut sge = sys::Sge {
            addr: from.as_ptr() as u64,
            length: length as u32,
            lkey: from_mr.lkey(),
        };
        let mut wr = sys::SendWr {
            wr_id,
            sg_list: &mut sge,
            num_sge: 1,
            opcode: sys::WR_RDMA_WRITE_WITH_IMM,
            send_flags: sys::SEND_SIGNALED | flags,
            imm_data: 0x0102_0304u32.to_be(),
            rdma: sys::Rdma::new(to_at, rkey),
            ..Default::default()
        };
        // SAFETY: one request of one piece, whose memory stays as it is until its completion.
        unsafe { a.post_send(&mut wr) }.unwrap();
    };
    let receive = |wr_id| {
        let mut wr = sys::RecvWr {
            wr_id,
            ..Default::default()
        };
        // SAFETY: one request without pieces.
        unsafe { b.post_recv(&mut wr) }.unwrap();
    };

    receive(21);
    write(11, to_mr.rkey(), LENGTH, 0);
    let got = completion(&cq_b);
    assert_eq!(
        got.status,
        sys::WC_SUCCESS,
        "{}",
        verbs.wc_status(got.status)
    );
    assert_eq!((got.wr_id, got.opcode), (21, sys::WC_RECV_RDMA_WITH_IMM));
    assert_ne!(got.wc_flags & sys::WC_WITH_IMM, 0);
    assert_eq!(u32::from_be(got.imm_data), 0x0102_0304);
    assert_eq!(got.byte_len as usize, LENGTH);
    assert_eq!(got.qp_num, b.number());
    let sent = completion(&cq_a);
    assert_eq!(
        sent.status,
        sys::WC_SUCCESS,
        "{}",
        verbs.wc_status(sent.status)
    );
    assert_eq!((sent.wr_id, sent.opcode), (11, sys::WC_RDMA_WRITE));
    assert_eq!(to[1..=LENGTH], source[..]);
    assert_eq!((to[0], to[LENGTH + 1]), (0xaa, 0xaa));

    receive(22);
    write(12, to_mr.rkey(), 16, sys::SEND_INLINE);
    assert_eq!((completion(&cq_b).wr_id, completion(&cq_a).wr_id), (22, 12));

    // A key that is none: both queue pairs fail, and there is an event for the one written to.
    receive(23);
    write(13, !to_mr.rkey(), LENGTH, 0);
    let failed = completion(&cq_a);
    println!("wrong key: {failed:?} {}", verbs.wc_status(failed.status));
    assert_eq!((failed.wr_id, failed.status), (13, sys::WC_REM_ACCESS_ERR));
    let mut events = Vec::new();
    let end = Instant::now() + Duration::from_secs(5);
    while events.is_empty() && Instant::now() < end {
        events.extend(context.async_event().unwrap());
    }
    println!("{events:?}");
    assert!(events.iter().all(|e| e.about == About::Qp(b.number())));

    // SAFETY: the kernel refuses memory that is not there.
    let refused = unsafe { pd.reg_mr(4096 as *mut u8, 4096, reach) }.unwrap_err();
    println!("{refused}");
    // SAFETY: as above; no file of a dma-buf.
    let refused = unsafe {
        pd.reg_dmabuf_mr(
            std::os::fd::AsFd::as_fd(&std::io::stdin()),
            0,
            4096,
            0,
            reach,
        )
    }
    .unwrap_err();
    println!("{refused}");
    let refused = context.create_cq(usize::MAX).unwrap_err();
    assert!(refused.text().contains("EINVAL"), "{refused}");

    a.destroy().unwrap();
    b.destroy().unwrap();
    from_mr.destroy().unwrap();
    to_mr.destroy().unwrap();
    Arc::into_inner(cq_a).unwrap().destroy().unwrap();
    Arc::into_inner(cq_b).unwrap().destroy().unwrap();
    Arc::into_inner(pd).unwrap().destroy().unwrap();
    Arc::into_inner(context).unwrap().destroy().unwrap();
}
