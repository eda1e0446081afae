//! The queue pairs of one end of a connection, over all its ports, with the block of memory that the other end
//! writes to.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use super::adapter::{Adapter, Health};
use super::gid::{self, Indexed};
use super::wire::{
    offset, Block, GidEntry, GidPair, Offer, PortOffer, QpOffer, MAX_GIDS, MAX_PORTS, MAX_QPS, RING,
};
use crate::config::Ib;
use crate::cuda::driver;
use crate::error::{Error, Result, ResultCode};
use crate::ibverbs::devices::{LinkLayer, Port};
use crate::ibverbs::{sys, Cq, Mr, Qp};
use crate::transport::random;
use crate::transport::staging::CHUNKS;

/// Writes that one queue pair may have outstanding, at the end that sends.
pub const SEND_DEPTH: u32 = 128;
/// The same for an end's control writes: descriptors and counts of chunks.
pub const CONTROL_DEPTH: u32 = 128;
/// Announcements that can be outstanding on one queue pair: one for each posted receive, one for each chunk.
pub const RECV_DEPTH: u32 = (RING + CHUNKS) as u32;
/// Bytes that a write may carry in itself, where the device can: a descriptor.
const INLINE: u32 = 64;

/// What came of a write or an announcement: the part of a completion's number that says so.
pub mod id {
    /// Kinds.
    pub const MESSAGE: u64 = 1;
    /// A write out of a chunk.
    pub const CHUNK: u64 = 2;
    /// A descriptor, a count or a total.
    pub const CONTROL: u64 = 3;
    /// An announcement received.
    pub const RECV: u64 = 4;
    /// The proof.
    pub const PROOF: u64 = 5;

    /// Puts a number together; `posted`: the queue pair's writes so far, this one included.
    #[inline]
    pub fn of(kind: u64, lane: usize, index: usize, posted: u32) -> u64 {
        kind << 56 | (lane as u64) << 48 | (index as u64) << 32 | u64::from(posted)
    }

    /// Takes it apart: kind, lane, index, posted.
    #[inline]
    pub fn parts(id: u64) -> (u64, usize, usize, u32) {
        (
            id >> 56,
            (id >> 48 & 0xff) as usize,
            (id >> 32 & 0xffff) as usize,
            id as u32,
        )
    }
}

/// One port as this end uses it.
#[derive(Debug)]
struct Rail {
    cq: Arc<Cq>,
    port: u8,
    info: Port,
    attr: sys::PortAttr,
    gids: Vec<Indexed>,
    block: Mr,
    adapter: Arc<Adapter>,
}

/// One queue pair.
#[derive(Debug)]
pub struct Lane {
    qp: Qp,
    psn: u32,
    /// Which of this end's ports.
    pub port: usize,
    /// Which of the peer's.
    pub peer_port: usize,
    /// Bytes of one write at most.
    pub max_write: u64,
    inline: u32,
}

/// The queue pairs of one end.
#[derive(Debug)]
pub struct Rails {
    // In the order in which they must go.
    lanes: Vec<Lane>,
    rails: Vec<Rail>,
    block: Box<Block>,
    /// The peer's block, and its keys there.
    peer_block: u64,
    peer_keys: [u32; MAX_PORTS],
    infiniband: bool,
    sends: bool,
    traffic_class: u8,
    /// Memory of this end's GPU goes through chunks, and that of the peer's.
    stages: bool,
    peer_stages: bool,
    /// Hears of what ends the connection from outside.
    pub health: Arc<Health>,
}

/// The ports of both ends that queue pair `i` has.
pub fn pairing(i: usize, connector: usize, listener: usize) -> (usize, usize) {
    (i % connector, i % listener)
}

/// Queue pairs of a connection between so many ports.
pub fn lanes_of(connector: usize, listener: usize, per_pair: usize) -> usize {
    (connector.max(listener) * per_pair).min(MAX_QPS)
}

impl Rails {
    /// Makes queue pairs over `ports` to a peer with so many ports. `sends`: this end sends, and so is the
    /// connector.
    pub fn new(
        ports: &[Port],
        peer_ports: usize,
        n_lanes: usize,
        sends: bool,
        traffic_class: u8,
        ib: &Ib,
    ) -> Result<Rails> {
        let layout = std::alloc::Layout::new::<Block>();
        // SAFETY: a block has bytes, and all zeros are one: it is all atomic integers. NULL is looked for.
        let block = unsafe {
            let at = std::alloc::alloc_zeroed(layout).cast::<Block>();
            if at.is_null() {
                std::alloc::handle_alloc_error(layout);
            }
            Box::from_raw(at)
        };
        let at = &raw const *block as u64;
        let (send_wr, recv_wr) = match sends {
            true => (SEND_DEPTH, 1),
            false => (CONTROL_DEPTH, RECV_DEPTH),
        };
        let infiniband = ports.iter().any(|p| p.link_layer == LinkLayer::InfiniBand);
        let mut rails = Vec::new();
        for p in ports {
            let adapter = Adapter::get(&p.device)?;
            let attr = adapter.context().query_port(p.port)?;
            if attr.state != sys::PORT_ACTIVE {
                return Err(Error::new(
                    crate::error::ResultCode::SYSTEM,
                    format!("{}:{} is not active", p.device, p.port),
                ));
            }
            let here = n_lanes.div_ceil(ports.len()) as u32;
            let entries = here * (send_wr + recv_wr);
            let most = adapter.attr.max_cqe.max(1) as u32;
            let cq = adapter.context().create_cq(entries.min(most) as usize)?;
            let access = sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE;
            // SAFETY: all of the block is atomic integers, which are read as what the peer may have written.
            let mr = unsafe {
                adapter
                    .pd()
                    .reg_mr(at as *mut u8, size_of::<Block>(), access)
            }?;
            rails.push(Rail {
                cq: Arc::new(cq),
                port: p.port,
                info: p.clone(),
                attr,
                gids: gid::candidates(adapter.context(), p.port, attr.gid_tbl_len, infiniband, ib)?,
                block: mr,
                adapter,
            });
        }
        let mut lanes = Vec::new();
        for i in 0..n_lanes {
            let (port, peer_port) = match sends {
                true => pairing(i, ports.len(), peer_ports),
                false => {
                    let (peer, own) = pairing(i, peer_ports, ports.len());
                    (own, peer)
                }
            };
            lanes.push(Lane::new(
                &rails[port],
                port,
                peer_port,
                send_wr,
                recv_wr,
                ib,
            )?);
        }
        let health = Arc::new(Health::default());
        for (i, r) in rails.iter().enumerate() {
            let own = lanes.iter().filter(|l| l.port == i);
            let qps = own.map(|l| l.qp.number()).collect();
            r.adapter.watch(&health, r.port, r.cq.id(), qps);
        }
        Ok(Rails {
            lanes,
            rails,
            block,
            peer_block: 0,
            peer_keys: [0; MAX_PORTS],
            infiniband,
            sends,
            traffic_class,
            stages: false,
            peer_stages: false,
            health,
        })
    }

    /// Finds out whether memory of the GPU that is current in this thread goes through chunks. What the devices
    /// do not reach at the first look, they never do.
    pub fn look_at_gpu(&mut self, ib: &Ib) {
        self.stages = !ib.gpu_direct;
        let current = driver().ok().and_then(|d| d.current_context().ok()?);
        let Some((_, ordinal)) = current else {
            return;
        };
        let reached = |(a, port): (&Arc<Adapter>, &Port)| a.reach(port, ordinal, ib).is_ok();
        self.stages = self.stages || !self.adapters().all(reached);
    }

    /// Whether memory of this end's GPU goes through chunks, as the peer was told.
    pub fn stages(&self) -> bool {
        self.stages
    }

    /// Whether memory of the peer's GPU goes through chunks.
    pub fn peer_stages(&self) -> bool {
        self.peer_stages
    }

    /// What this end brings.
    pub fn offer(&self) -> Offer {
        let ports = self.rails.iter().map(|r| {
            let mut gids = [GidEntry::default(); MAX_GIDS];
            for (to, (_, g)) in gids.iter_mut().zip(&r.gids) {
                *to = *g;
            }
            let mut name = [0; 16];
            for (to, b) in name.iter_mut().zip(r.adapter.context().name().bytes()) {
                *to = b;
            }
            PortOffer {
                lid: r.attr.lid,
                mtu: r.attr.active_mtu as u8,
                rkey: r.block.rkey(),
                n_gids: r.gids.len() as u8,
                gids,
                name,
                number: r.port,
            }
        });
        let qps = self.lanes.iter().map(|l| QpOffer {
            number: l.qp.number(),
            psn: l.psn,
        });
        Offer {
            block: &raw const *self.block as u64,
            ports: ports.collect(),
            qps: qps.collect(),
            infiniband: self.infiniband,
            traffic_class: self.traffic_class,
            stages: self.stages,
        }
    }

    /// Which addresses each queue pair is to use, chosen by the listener, who knows both offers.
    pub fn choose(&self, connector: &Offer, ib: &Ib) -> Result<Vec<GidPair>> {
        let own = self.offer();
        let one = |l: &Lane| {
            let (theirs, ours) = (&connector.ports[l.peer_port], &own.ports[l.port]);
            match gid::choose(theirs, ours, ib.ipv6) {
                Some((connector, listener)) => Ok(GidPair {
                    connector,
                    listener,
                }),
                None => Err(Error::remote(format!(
                    "no address of {} fits one of {}: they differ in family, RoCE version or scope \
                     (VCCL_IB_ADDR_FAMILY, VCCL_IB_ROCE_VERSION_NUM, VCCL_IB_GID_INDEX)",
                    theirs.name(),
                    ours.name()
                ))),
            }
        };
        self.lanes.iter().map(one).collect()
    }

    /// Whether this end sends, and so is the connector.
    pub fn sends(&self) -> bool {
        self.sends
    }

    /// Whether its ports speak InfiniBand and not RoCE.
    pub fn infiniband(&self) -> bool {
        self.infiniband
    }

    /// Which of a pair is this end's, and which the peer's.
    fn own_and_other(&self, pair: &GidPair) -> (usize, usize) {
        let (own, other) = match self.sends {
            true => (pair.connector, pair.listener),
            false => (pair.listener, pair.connector),
        };
        (own.into(), other.into())
    }

    /// Brings the queue pairs to where both sides can write.
    pub fn connect(&mut self, peer: &Offer, gids: &[GidPair], ib: &Ib) -> Result<()> {
        if peer.qps.len() != self.lanes.len()
            || gids.len() != self.lanes.len()
            || self.lanes.iter().any(|l| l.peer_port >= peer.ports.len())
        {
            return Err(Error::remote(format!(
                "the peer has {} queue pairs on {} ports where {} were agreed: use the same library on all ranks",
                peer.qps.len(),
                peer.ports.len(),
                self.lanes.len()
            )));
        }
        if peer.infiniband != self.infiniband {
            return Err(Error::remote(
                "one end has InfiniBand and the other RoCE: no way leads from one to the other",
            ));
        }
        self.peer_stages = peer.stages;
        self.peer_block = peer.block;
        for (to, p) in self.peer_keys.iter_mut().zip(&peer.ports) {
            *to = p.rkey;
        }
        for ((lane, pair), theirs) in self.lanes.iter().zip(gids).zip(&peer.qps) {
            let rail = &self.rails[lane.port];
            let port = &peer.ports[lane.peer_port];
            let (own, other) = self.own_and_other(pair);
            let unknown = || Error::remote("the peer names an address that is not in the offers");
            let &(index, local) = rail.gids.get(own).ok_or_else(unknown)?;
            let offered = &port.gids[..port.n_gids as usize];
            let remote = *offered.get(other).ok_or_else(unknown)?;
            // The table may have changed since it was read.
            let now = rail.adapter.context().query_gid(rail.port, index.into())?;
            if now != local.gid {
                return Err(Error::remote(format!(
                    "GID {index} of {}:{} was {} and is {}: the address changed while the connection was made",
                    rail.adapter.context().name(),
                    rail.port,
                    gid::address(&local.gid),
                    gid::address(&now)
                )));
            }
            let mtu = rail.attr.active_mtu.min(port.mtu.into());
            let way = Way {
                index,
                local,
                remote,
                lid: port.lid,
                mtu,
                traffic_class: self.traffic_class,
                infiniband: self.infiniband,
            };
            lane.connect(rail, &way, *theirs, ib).map_err(|e| {
                e.context(format!(
                    "{}:{} ({}) to {} ({})",
                    rail.adapter.context().name(),
                    rail.port,
                    gid::address(&local.gid),
                    port.name(),
                    gid::address(&remote.gid)
                ))
            })?;
        }
        Ok(())
    }

    /// How the ways look to people: each pair of ports with its addresses once.
    pub fn describe(&self, peer: &Offer, gids: &[GidPair]) -> String {
        let mut ways: Vec<String> = Vec::new();
        for (lane, pair) in self.lanes.iter().zip(gids) {
            let rail = &self.rails[lane.port];
            let port = &peer.ports[lane.peer_port];
            let (own, other) = self.own_and_other(pair);
            let own = rail.gids.get(own).map(|g| gid::address(&g.1.gid));
            let other = port.gids.get(other).map(|g| gid::address(&g.gid));
            let (Some(own), Some(other)) = (own, other) else {
                continue;
            };
            let (name, theirs) = (rail.adapter.context().name(), port.name());
            let at = rail.port;
            let arrow = if self.sends { "->" } else { "<-" };
            let way = match self.infiniband {
                true => format!(
                    "{name}:{at} lid {} {own} {arrow} {theirs} lid {} {other}",
                    rail.attr.lid, port.lid
                ),
                false => format!("{name}:{at} {own} {arrow} {theirs} {other}"),
            };
            if !ways.contains(&way) {
                ways.push(way);
            }
        }
        ways.join(", ")
    }

    /// Queue pairs.
    #[inline]
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// The devices, by port.
    pub fn adapters(&self) -> impl Iterator<Item = (&Arc<Adapter>, &Port)> {
        self.rails.iter().map(|r| (&r.adapter, &r.info))
    }

    /// This end's block.
    #[inline]
    pub fn block(&self) -> &Block {
        &self.block
    }

    /// Takes completions of one port.
    #[inline]
    pub fn poll(&self, port: usize, into: &mut [sys::Wc]) -> Result<usize> {
        self.rails[port].cq.poll(into)
    }

    /// Ports.
    #[inline]
    pub fn ports(&self) -> usize {
        self.rails.len()
    }

    /// How a completion that is no success is told.
    #[cold]
    pub fn failed(&self, wc: &sys::Wc) -> Error {
        let (kind, lane, ..) = id::parts(wc.wr_id);
        let Some(rail) = self.lanes.get(lane).map(|l| &self.rails[l.port]) else {
            return Error::internal(format!(
                "a completion of the unknown number {:#x}",
                wc.wr_id
            ));
        };
        let context = rail.adapter.context();
        let what = match kind {
            id::RECV => "receiving",
            id::CONTROL => "posting receives",
            _ => "writing",
        };
        let cure = match wc.status {
            sys::WC_RETRY_EXC_ERR => {
                "; the peer's device does not answer: is the peer alive, its link up, and is there a way between \
                 the two addresses (VCCL_IB_TIMEOUT, VCCL_IB_RETRY_CNT, VCCL_IB_GID_INDEX, VCCL_IB_TC)?"
            }
            sys::WC_REM_ACCESS_ERR => {
                "; the peer's device refused the address: its memory was deregistered, or freed"
            }
            sys::WC_LOC_PROT_ERR => "; memory was deregistered, or freed, while it was in use",
            // What this end does wrong has a completion of its own before those that are flushed.
            sys::WC_WR_FLUSH_ERR => {
                "; the queue pair failed over what the peer sent: the peer's log says of what"
            }
            _ => "",
        };
        let code = match wc.status {
            sys::WC_LOC_LEN_ERR | sys::WC_LOC_QP_OP_ERR => ResultCode::INTERNAL,
            sys::WC_LOC_PROT_ERR => ResultCode::SYSTEM,
            _ => ResultCode::REMOTE,
        };
        let text = format!(
            "{what} over {}:{}: {}, vendor code {:#x}{cure}",
            context.name(),
            rail.port,
            context.verbs().wc_status(wc.status),
            wc.vendor_err
        );
        Error::new(code, text)
    }

    /// Ends all that is under way: no memory is read or written any more.
    pub fn stop(&self) {
        for l in &self.lanes {
            let attr = sys::QpAttr {
                qp_state: sys::QPS_ERR,
                ..Default::default()
            };
            if let Err(e) = l.qp.modify(&attr, sys::QP_STATE) {
                log::warn!("{e}");
            }
        }
    }

    /// Fills the receive queues: each announcement takes one.
    pub fn post_receives(&self) -> Result<()> {
        for i in 0..self.lanes.len() {
            for _ in 0..RECV_DEPTH {
                self.post_receive(i)?;
            }
        }
        Ok(())
    }

    /// One more receive on that lane.
    #[inline]
    pub fn post_receive(&self, lane: usize) -> Result<()> {
        let mut wr = sys::RecvWr {
            wr_id: id::of(id::RECV, lane, 0, 0),
            ..Default::default()
        };
        // SAFETY: one request without pieces.
        unsafe { self.lanes[lane].qp.post_recv(&mut wr) }
    }

    /// Writes `words` of this end's block at `source` to the peer's block at `to`.
    #[inline]
    pub fn write_block(
        &self,
        lane: usize,
        wr_id: u64,
        source: u64,
        len: u32,
        to: u64,
        signal: bool,
    ) -> Result<()> {
        let l = &self.lanes[lane];
        let write = Write {
            wr_id,
            addr: source,
            len,
            lkey: self.rails[l.port].block.lkey(),
            to: self.peer_block.wrapping_add(to),
            rkey: self.peer_keys[l.peer_port],
            imm: None,
            signal,
            host: true,
        };
        // SAFETY: the source lies in our block, which lives as long as the queue pair.
        unsafe { self.write(lane, &write) }
    }

    /// Posts a write.
    ///
    /// # Safety
    /// `[addr, addr + len)` is registered by `lkey` and stays so until the write completes, or [`Rails::stop`].
    #[inline]
    pub unsafe fn write(&self, lane: usize, w: &Write) -> Result<()> {
        let l = &self.lanes[lane];
        let mut sge = sys::Sge {
            addr: w.addr,
            length: w.len,
            lkey: w.lkey,
        };
        let inline = w.host && w.len <= l.inline;
        let mut flags = 0;
        if w.signal {
            flags |= sys::SEND_SIGNALED;
        }
        if inline {
            flags |= sys::SEND_INLINE;
        }
        let mut wr = sys::SendWr {
            wr_id: w.wr_id,
            sg_list: &mut sge,
            num_sge: (w.len > 0) as i32,
            opcode: match w.imm {
                Some(_) => sys::WR_RDMA_WRITE_WITH_IMM,
                None => sys::WR_RDMA_WRITE,
            },
            send_flags: flags,
            imm_data: w.imm.unwrap_or(0).to_be(),
            rdma: sys::Rdma::new(w.to, w.rkey),
            ..Default::default()
        };
        // SAFETY: one request of at most one piece; the rest is the caller's promise.
        unsafe { l.qp.post_send(&mut wr) }
    }

    /// Writes the word that proves the way, on every lane.
    pub fn post_proof(&self) -> Result<()> {
        self.block.source_word.store(u64::MAX, Ordering::Release);
        for i in 0..self.lanes.len() {
            let source = &raw const self.block.source_word as u64;
            self.write_block(
                i,
                id::of(id::PROOF, i, 0, 0),
                source,
                8,
                offset::PROOF,
                true,
            )?;
        }
        Ok(())
    }
}

/// One write.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// Comes back with the completion.
    pub wr_id: u64,
    /// Where the bytes are.
    pub addr: u64,
    /// How many.
    pub len: u32,
    /// Their region.
    pub lkey: u32,
    /// Where they go.
    pub to: u64,
    /// The region there.
    pub rkey: u32,
    /// What announces them.
    pub imm: Option<u32>,
    /// Whether its completion is told.
    pub signal: bool,
    /// The CPU can read the bytes.
    pub host: bool,
}

/// How one queue pair finds the other.
struct Way {
    /// This end's entry of its table of GIDs.
    index: u8,
    local: GidEntry,
    remote: GidEntry,
    /// The peer's.
    lid: u16,
    mtu: i32,
    traffic_class: u8,
    infiniband: bool,
}

impl Lane {
    fn new(
        rail: &Rail,
        port: usize,
        peer_port: usize,
        send_wr: u32,
        recv_wr: u32,
        ib: &Ib,
    ) -> Result<Lane> {
        let mut cap = sys::QpCap {
            max_send_wr: send_wr,
            max_recv_wr: recv_wr,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: INLINE,
        };
        let make = |cap| rail.adapter.pd().create_qp(&rail.cq, &rail.cq, cap, false);
        let qp = make(cap).or_else(|_| {
            // Some devices have no room for bytes in a request.
            cap.max_inline_data = 0;
            make(cap)
        })?;
        let attr = sys::QpAttr {
            qp_state: sys::QPS_INIT,
            port_num: rail.port,
            pkey_index: ib.pkey_index,
            qp_access_flags: sys::ACCESS_LOCAL_WRITE
                | sys::ACCESS_REMOTE_WRITE
                | sys::ACCESS_REMOTE_READ,
            ..Default::default()
        };
        qp.modify(
            &attr,
            sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS,
        )?;
        let psn = u32::from_le_bytes(random()[..4].try_into().expect("4 bytes")) & 0xff_ffff;
        Ok(Lane {
            inline: qp.cap().max_inline_data,
            qp,
            psn,
            port,
            peer_port,
            // A device that names no limit has that of the wire.
            max_write: match rail.attr.max_msg_sz {
                0 => 1 << 31,
                n => u64::from(n).min(1 << 31),
            },
        })
    }

    fn connect(&self, rail: &Rail, way: &Way, theirs: QpOffer, ib: &Ib) -> Result<()> {
        let (local, remote) = (way.local.gid, way.remote.gid);
        // InfiniBand needs the global route only from one subnet into another.
        let global = !way.infiniband || local.0[..8] != remote.0[..8] || way.lid == 0;
        let mut attr = sys::QpAttr {
            qp_state: sys::QPS_RTR,
            path_mtu: way.mtu,
            dest_qp_num: theirs.number,
            rq_psn: theirs.psn,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            ah_attr: sys::AhAttr {
                grh: match global {
                    true => sys::GlobalRoute {
                        dgid: remote,
                        flow_label: 0,
                        sgid_index: way.index,
                        hop_limit: 255,
                        traffic_class: way.traffic_class,
                    },
                    false => sys::GlobalRoute::default(),
                },
                dlid: way.lid,
                sl: ib.service_level,
                is_global: global.into(),
                port_num: rail.port,
                ..Default::default()
            },
            ..Default::default()
        };
        self.qp.modify(
            &attr,
            sys::QP_STATE
                | sys::QP_AV
                | sys::QP_PATH_MTU
                | sys::QP_DEST_QPN
                | sys::QP_RQ_PSN
                | sys::QP_MAX_DEST_RD_ATOMIC
                | sys::QP_MIN_RNR_TIMER,
        )?;
        attr.qp_state = sys::QPS_RTS;
        attr.timeout = ib.timeout;
        attr.retry_cnt = ib.retries;
        attr.rnr_retry = 7;
        attr.sq_psn = self.psn;
        attr.max_rd_atomic = 1;
        self.qp.modify(
            &attr,
            sys::QP_STATE
                | sys::QP_TIMEOUT
                | sys::QP_RETRY_CNT
                | sys::QP_RNR_RETRY
                | sys::QP_SQ_PSN
                | sys::QP_MAX_QP_RD_ATOMIC,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_port_has_a_queue_pair() {
        for c in 1..=MAX_PORTS {
            for l in 1..=MAX_PORTS {
                for per in 1..=16 {
                    let n = lanes_of(c, l, per);
                    assert!(n <= MAX_QPS);
                    let pairs: Vec<_> = (0..n).map(|i| pairing(i, c, l)).collect();
                    assert!((0..c).all(|i| pairs.iter().any(|p| p.0 == i)));
                    assert!((0..l).all(|i| pairs.iter().any(|p| p.1 == i)));
                }
            }
        }
    }

    #[test]
    fn numbers_of_writes_come_apart() {
        let n = id::of(id::CHUNK, 63, 65_535, u32::MAX);
        assert_eq!(id::parts(n), (id::CHUNK, 63, 65_535, u32::MAX));
    }
}
