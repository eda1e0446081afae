//! The C types that a transport of reliable-connected queue pairs needs, for LP64 machines.
//!
//! Source: the ABI of libibverbs' version `IBVERBS_1.1` (rdma-core), as its man pages and sizeof and
//! offsetof of its types give it on x86_64; it holds no type whose size differs on aarch64. Enums
//! are integers here: a value that we do not know must not become an invalid Rust enum. Types that
//! the library hands out by pointer are declared as far as we read them and no further.

use std::ffi::{c_char, c_int, c_void};

/// `struct ibv_device`: read through the library's functions only.
#[repr(C)]
pub struct Device {
    _opaque: [u8; 0],
}

/// `struct ibv_comp_channel`: never looked into.
#[repr(C)]
pub struct CompChannel {
    _opaque: [u8; 0],
}

/// `struct ibv_srq`: never looked into.
#[repr(C)]
pub struct Srq {
    _opaque: [u8; 0],
}

/// An entry of the table of operations that we do not call.
pub type Unused = *mut c_void;

/// `struct ibv_context_ops`. Polling and posting have no symbol: C programs inline the call through
/// this table, and so do we.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ContextOps {
    _before_poll_cq: [Unused; 11],
    /// `poll_cq`: at most that many completions; the number, or negative.
    pub poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    /// `req_notify_cq`: an event at the next completion, or the next solicited one; 0 or an errno.
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _before_post_send: [Unused; 12],
    /// `post_send`: 0 or an errno, and then the request that could not be posted.
    pub post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    /// `post_recv`: as `post_send`.
    pub post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _after_post_recv: [Unused; 5],
}

/// The start of `struct ibv_context`: a mutex, whose size depends on the machine, and more follow.
#[repr(C)]
#[derive(Debug)]
pub struct Context {
    /// The device that was opened.
    pub device: *mut Device,
    /// The operations that have no symbol.
    pub ops: ContextOps,
    /// The file of commands.
    pub cmd_fd: c_int,
    /// The file that becomes readable when there is an asynchronous event.
    pub async_fd: c_int,
    /// How many interrupt vectors completions may be spread over.
    pub num_comp_vectors: c_int,
}

/// `struct ibv_device_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttr {
    /// The firmware's version, ended by a NUL.
    pub fw_ver: [c_char; 64],
    /// The device's GUID, big-endian.
    pub node_guid: u64,
    /// The GUID that the functions of one card share, big-endian.
    pub sys_image_guid: u64,
    /// The largest region that can be registered.
    pub max_mr_size: u64,
    /// Page sizes, as a mask.
    pub page_size_cap: u64,
    /// The vendor.
    pub vendor_id: u32,
    /// The vendor's part number.
    pub vendor_part_id: u32,
    /// The hardware's version.
    pub hw_ver: u32,
    /// Queue pairs at most.
    pub max_qp: c_int,
    /// Requests in one work queue at most.
    pub max_qp_wr: c_int,
    /// `IBV_DEVICE_*`
    pub device_cap_flags: u32,
    /// Pieces of one request at most.
    pub max_sge: c_int,
    /// Pieces of one RDMA read at most.
    pub max_sge_rd: c_int,
    /// Completion queues at most.
    pub max_cq: c_int,
    /// Entries of one completion queue at most.
    pub max_cqe: c_int,
    /// Memory regions at most.
    pub max_mr: c_int,
    /// Protection domains at most.
    pub max_pd: c_int,
    /// Reads and atomics that one queue pair takes at once.
    pub max_qp_rd_atom: c_int,
    /// As `max_qp_rd_atom`, for reliable datagrams.
    pub max_ee_rd_atom: c_int,
    /// Resources for reads and atomics of all queue pairs together.
    pub max_res_rd_atom: c_int,
    /// Reads and atomics that one queue pair has under way at once.
    pub max_qp_init_rd_atom: c_int,
    /// As `max_qp_init_rd_atom`, for reliable datagrams.
    pub max_ee_init_rd_atom: c_int,
    /// `IBV_ATOMIC_*`
    pub atomic_cap: c_int,
    /// Of reliable datagrams.
    pub max_ee: c_int,
    /// Of reliable datagrams.
    pub max_rdd: c_int,
    /// Memory windows at most.
    pub max_mw: c_int,
    /// Raw queue pairs at most.
    pub max_raw_ipv6_qp: c_int,
    /// Raw queue pairs at most.
    pub max_raw_ethy_qp: c_int,
    /// Multicast groups at most.
    pub max_mcast_grp: c_int,
    /// Queue pairs of one multicast group at most.
    pub max_mcast_qp_attach: c_int,
    /// Queue pairs of all multicast groups together.
    pub max_total_mcast_qp_attach: c_int,
    /// Address handles at most.
    pub max_ah: c_int,
    /// Fast memory regions at most.
    pub max_fmr: c_int,
    /// Mappings of one fast memory region at most.
    pub max_map_per_fmr: c_int,
    /// Shared receive queues at most.
    pub max_srq: c_int,
    /// Requests in one shared receive queue at most.
    pub max_srq_wr: c_int,
    /// Pieces of one request of a shared receive queue at most.
    pub max_srq_sge: c_int,
    /// Entries of the table of partition keys.
    pub max_pkeys: u16,
    /// How long the device may take to acknowledge, as an exponent.
    pub local_ca_ack_delay: u8,
    /// Ports, counted from 1.
    pub phys_port_cnt: u8,
}

/// `struct ibv_port_attr`.
///
/// The exported symbol `ibv_query_port` takes an older, shorter struct: it writes 48 bytes, through
/// `flags`, and nothing after them. C programs do not notice because their header's inline function
/// asks a newer entry point, which has no symbol. So `port_cap_flags2` and `active_speed_ex` stay 0
/// here, and speeds above NDR, which `active_speed` cannot hold, must be learned elsewhere (sysfs).
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct PortAttr {
    /// `IBV_PORT_*`
    pub state: c_int,
    /// `IBV_MTU_*`
    pub max_mtu: c_int,
    /// `IBV_MTU_*`
    pub active_mtu: c_int,
    /// Entries of the table of GIDs.
    pub gid_tbl_len: c_int,
    /// Capabilities.
    pub port_cap_flags: u32,
    /// The longest message.
    pub max_msg_sz: u32,
    /// Messages with a wrong partition key.
    pub bad_pkey_cntr: u32,
    /// Messages with a wrong queue key.
    pub qkey_viol_cntr: u32,
    /// Entries of the table of partition keys.
    pub pkey_tbl_len: u16,
    /// The port's local identifier; InfiniBand only.
    pub lid: u16,
    /// The subnet manager's local identifier.
    pub sm_lid: u16,
    /// How many low bits of the local identifier are free.
    pub lmc: u8,
    /// Virtual lanes.
    pub max_vl_num: u8,
    /// The service level to the subnet manager.
    pub sm_sl: u8,
    /// How long the subnet takes at most, as an exponent.
    pub subnet_timeout: u8,
    /// How the subnet manager initialised the port.
    pub init_type_reply: u8,
    /// Lanes, as a bit: see [`super::devices::lanes`].
    pub active_width: u8,
    /// Speed of a lane, as a bit: see [`super::devices::lane_mbps`].
    pub active_speed: u8,
    /// State of the physical link.
    pub phys_state: u8,
    /// `IBV_LINK_LAYER_*`
    pub link_layer: u8,
    /// `IBV_QPF_*`
    pub flags: u8,
    /// More capabilities; see above.
    pub port_cap_flags2: u16,
    /// Speed of a lane, as a bit, in a wider field; see above.
    pub active_speed_ex: u32,
    /// Room for what later versions may add.
    pub reserve: [u64; 8],
}

/// `union ibv_gid`, as bytes in the order of the network.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Gid(pub [u8; 16]);

/// `struct ibv_pd`
#[repr(C)]
#[derive(Debug)]
pub struct Pd {
    /// The device.
    pub context: *mut Context,
    /// The kernel's number.
    pub handle: u32,
}

/// `struct ibv_mr`
#[repr(C)]
#[derive(Debug)]
pub struct Mr {
    /// The device.
    pub context: *mut Context,
    /// The protection domain.
    pub pd: *mut Pd,
    /// Where the region starts.
    pub addr: *mut c_void,
    /// Its length.
    pub length: usize,
    /// The kernel's number.
    pub handle: u32,
    /// What our own requests name it by.
    pub lkey: u32,
    /// What the peer's requests name it by.
    pub rkey: u32,
}

/// The start of `struct ibv_cq`: a mutex and more follow.
#[repr(C)]
#[derive(Debug)]
pub struct Cq {
    /// The device.
    pub context: *mut Context,
    /// The channel that events go to.
    pub channel: *mut CompChannel,
    /// The program's own pointer.
    pub cq_context: *mut c_void,
    /// The kernel's number.
    pub handle: u32,
    /// Entries.
    pub cqe: c_int,
}

/// The start of `struct ibv_qp`: a mutex and more follow.
#[repr(C)]
#[derive(Debug)]
pub struct Qp {
    /// The device.
    pub context: *mut Context,
    /// The program's own pointer.
    pub qp_context: *mut c_void,
    /// The protection domain.
    pub pd: *mut Pd,
    /// Where sends complete.
    pub send_cq: *mut Cq,
    /// Where receives complete.
    pub recv_cq: *mut Cq,
    /// The shared receive queue.
    pub srq: *mut Srq,
    /// The kernel's number.
    pub handle: u32,
    /// The number that the peer names it by.
    pub qp_num: u32,
    /// `IBV_QPS_*`
    pub state: c_int,
    /// `IBV_QPT_*`
    pub qp_type: c_int,
}

/// `struct ibv_qp_cap`
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QpCap {
    /// Sends outstanding at most.
    pub max_send_wr: u32,
    /// Receives outstanding at most.
    pub max_recv_wr: u32,
    /// Pieces of a send at most.
    pub max_send_sge: u32,
    /// Pieces of a receive at most.
    pub max_recv_sge: u32,
    /// Bytes that a send may carry in the request itself.
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QpInitAttr {
    /// The program's own pointer.
    pub qp_context: *mut c_void,
    /// Where sends complete.
    pub send_cq: *mut Cq,
    /// Where receives complete.
    pub recv_cq: *mut Cq,
    /// The shared receive queue, or NULL.
    pub srq: *mut Srq,
    /// Sizes: asked for, and after the call, given.
    pub cap: QpCap,
    /// `IBV_QPT_*`
    pub qp_type: c_int,
    /// Whether every send completes visibly.
    pub sq_sig_all: c_int,
}

/// `struct ibv_global_route`
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct GlobalRoute {
    /// The peer's GID.
    pub dgid: Gid,
    /// The flow label.
    pub flow_label: u32,
    /// Which of the port's own GIDs.
    pub sgid_index: u8,
    /// The hop limit.
    pub hop_limit: u8,
    /// The traffic class.
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct AhAttr {
    /// The global route.
    pub grh: GlobalRoute,
    /// The peer's local identifier; InfiniBand only.
    pub dlid: u16,
    /// The service level.
    pub sl: u8,
    /// Low bits of our local identifier.
    pub src_path_bits: u8,
    /// A limit of the rate.
    pub static_rate: u8,
    /// Whether `grh` counts; always so for RoCE.
    pub is_global: u8,
    /// Our port.
    pub port_num: u8,
}

/// `struct ibv_qp_attr`
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct QpAttr {
    /// `IBV_QPS_*`
    pub qp_state: c_int,
    /// `IBV_QPS_*`, as the program believes it to be.
    pub cur_qp_state: c_int,
    /// `IBV_MTU_*`
    pub path_mtu: c_int,
    /// Path migration.
    pub path_mig_state: c_int,
    /// The queue key; datagrams only.
    pub qkey: u32,
    /// The first packet number that is received.
    pub rq_psn: u32,
    /// The first packet number that is sent.
    pub sq_psn: u32,
    /// The peer's queue pair.
    pub dest_qp_num: u32,
    /// `IBV_ACCESS_*`
    pub qp_access_flags: u32,
    /// Sizes.
    pub cap: QpCap,
    /// The way to the peer.
    pub ah_attr: AhAttr,
    /// Path migration.
    pub alt_ah_attr: AhAttr,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Path migration.
    pub alt_pkey_index: u16,
    /// Whether a drained send queue gives an event.
    pub en_sqd_async_notify: u8,
    /// Whether the send queue is draining.
    pub sq_draining: u8,
    /// Reads and atomics that we have under way at once.
    pub max_rd_atomic: u8,
    /// Reads and atomics that the peer has under way at once.
    pub max_dest_rd_atomic: u8,
    /// How long the peer waits before it tries again a send that found no receive.
    pub min_rnr_timer: u8,
    /// Our port.
    pub port_num: u8,
    /// How long an acknowledgement is waited for, as an exponent.
    pub timeout: u8,
    /// How often a send is tried again.
    pub retry_cnt: u8,
    /// How often a send that found no receive is tried again; 7 is for ever.
    pub rnr_retry: u8,
    /// Path migration.
    pub alt_port_num: u8,
    /// Path migration.
    pub alt_timeout: u8,
    /// A limit of the rate, in kbit/s; raw packets only.
    pub rate_limit: u32,
}

/// `struct ibv_sge`
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Sge {
    /// Where the piece starts.
    pub addr: u64,
    /// Its length.
    pub length: u32,
    /// The key of the region that it lies in.
    pub lkey: u32,
}

/// The `rdma` arm of the union in `struct ibv_send_wr`, with room for the widest arm.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Rdma {
    /// The peer's address.
    pub remote_addr: u64,
    /// The key of the peer's region.
    pub rkey: u32,
    _rest: [u32; 5],
}

impl Rdma {
    /// A place in the peer's memory.
    pub const fn new(remote_addr: u64, rkey: u32) -> Rdma {
        Rdma {
            remote_addr,
            rkey,
            _rest: [0; 5],
        }
    }
}

/// `struct ibv_send_wr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SendWr {
    /// Comes back with the completion.
    pub wr_id: u64,
    /// The next request of the list, or NULL.
    pub next: *mut SendWr,
    /// The pieces.
    pub sg_list: *mut Sge,
    /// How many.
    pub num_sge: c_int,
    /// `IBV_WR_*`
    pub opcode: c_int,
    /// `IBV_SEND_*`
    pub send_flags: u32,
    /// Immediate data, big-endian.
    pub imm_data: u32,
    /// The place in the peer's memory.
    pub rdma: Rdma,
    /// Of extended connections only.
    pub xrc: u64,
    /// Of memory windows and segmentation offload only.
    pub bind_or_tso: [u64; 6],
}

impl Default for SendWr {
    fn default() -> SendWr {
        SendWr {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode: 0,
            send_flags: 0,
            imm_data: 0,
            rdma: Rdma::default(),
            xrc: 0,
            bind_or_tso: [0; 6],
        }
    }
}

/// `struct ibv_recv_wr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RecvWr {
    /// Comes back with the completion.
    pub wr_id: u64,
    /// The next request of the list, or NULL.
    pub next: *mut RecvWr,
    /// The pieces.
    pub sg_list: *mut Sge,
    /// How many.
    pub num_sge: c_int,
}

impl Default for RecvWr {
    fn default() -> RecvWr {
        RecvWr {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
        }
    }
}

/// `struct ibv_wc`: one completion.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Wc {
    /// The request's.
    pub wr_id: u64,
    /// `IBV_WC_*_ERR`, or [`WC_SUCCESS`]. If it is not, only `wr_id`, `qp_num` and `vendor_err`
    /// mean something.
    pub status: c_int,
    /// `IBV_WC_*`, of what completed.
    pub opcode: c_int,
    /// The vendor's own code.
    pub vendor_err: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data, big-endian, if `wc_flags` says so.
    pub imm_data: u32,
    /// Our queue pair.
    pub qp_num: u32,
    /// The peer's; datagrams only.
    pub src_qp: u32,
    /// [`WC_WITH_IMM`]
    pub wc_flags: u32,
    /// Datagrams only.
    pub pkey_index: u16,
    /// Datagrams only.
    pub slid: u16,
    /// Datagrams only.
    pub sl: u8,
    /// Datagrams only.
    pub dlid_path_bits: u8,
}

/// What an asynchronous event is about: a union.
#[repr(C)]
#[derive(Clone, Copy)]
pub union EventElement {
    /// Of events of completion queues.
    pub cq: *mut Cq,
    /// Of events of queue pairs.
    pub qp: *mut Qp,
    /// Of events of shared receive queues.
    pub srq: *mut Srq,
    /// Of events of ports.
    pub port_num: c_int,
}

/// `struct ibv_async_event`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AsyncEvent {
    /// What it is about.
    pub element: EventElement,
    /// `IBV_EVENT_*`
    pub event_type: c_int,
}

/// `IBV_PORT_ACTIVE`
pub const PORT_ACTIVE: c_int = 4;
/// `IBV_LINK_LAYER_INFINIBAND`
pub const LINK_LAYER_INFINIBAND: u8 = 1;
/// `IBV_LINK_LAYER_ETHERNET`
pub const LINK_LAYER_ETHERNET: u8 = 2;
/// `IBV_QPT_RC`
pub const QPT_RC: c_int = 2;
/// `IBV_QPS_RESET`
pub const QPS_RESET: c_int = 0;
/// `IBV_QPS_INIT`
pub const QPS_INIT: c_int = 1;
/// `IBV_QPS_RTR`
pub const QPS_RTR: c_int = 2;
/// `IBV_QPS_RTS`
pub const QPS_RTS: c_int = 3;
/// `IBV_QPS_ERR`
pub const QPS_ERR: c_int = 6;
/// `IBV_QP_STATE`
pub const QP_STATE: c_int = 1 << 0;
/// `IBV_QP_CUR_STATE`
pub const QP_CUR_STATE: c_int = 1 << 1;
/// `IBV_QP_ACCESS_FLAGS`
pub const QP_ACCESS_FLAGS: c_int = 1 << 3;
/// `IBV_QP_PKEY_INDEX`
pub const QP_PKEY_INDEX: c_int = 1 << 4;
/// `IBV_QP_PORT`
pub const QP_PORT: c_int = 1 << 5;
/// `IBV_QP_AV`
pub const QP_AV: c_int = 1 << 7;
/// `IBV_QP_PATH_MTU`
pub const QP_PATH_MTU: c_int = 1 << 8;
/// `IBV_QP_TIMEOUT`
pub const QP_TIMEOUT: c_int = 1 << 9;
/// `IBV_QP_RETRY_CNT`
pub const QP_RETRY_CNT: c_int = 1 << 10;
/// `IBV_QP_RNR_RETRY`
pub const QP_RNR_RETRY: c_int = 1 << 11;
/// `IBV_QP_RQ_PSN`
pub const QP_RQ_PSN: c_int = 1 << 12;
/// `IBV_QP_MAX_QP_RD_ATOMIC`
pub const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
/// `IBV_QP_MIN_RNR_TIMER`
pub const QP_MIN_RNR_TIMER: c_int = 1 << 15;
/// `IBV_QP_SQ_PSN`
pub const QP_SQ_PSN: c_int = 1 << 16;
/// `IBV_QP_MAX_DEST_RD_ATOMIC`
pub const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
/// `IBV_QP_CAP`
pub const QP_CAP: c_int = 1 << 19;
/// `IBV_QP_DEST_QPN`
pub const QP_DEST_QPN: c_int = 1 << 20;
/// `IBV_ACCESS_LOCAL_WRITE`
pub const ACCESS_LOCAL_WRITE: u32 = 1 << 0;
/// `IBV_ACCESS_REMOTE_WRITE`
pub const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
/// `IBV_ACCESS_REMOTE_READ`
pub const ACCESS_REMOTE_READ: u32 = 1 << 2;
/// `IBV_ACCESS_REMOTE_ATOMIC`
pub const ACCESS_REMOTE_ATOMIC: u32 = 1 << 3;
/// `IBV_ACCESS_RELAXED_ORDERING`
pub const ACCESS_RELAXED_ORDERING: u32 = 1 << 20;
/// `IBV_WR_RDMA_WRITE`
pub const WR_RDMA_WRITE: c_int = 0;
/// `IBV_WR_RDMA_WRITE_WITH_IMM`
pub const WR_RDMA_WRITE_WITH_IMM: c_int = 1;
/// `IBV_WR_SEND`
pub const WR_SEND: c_int = 2;
/// `IBV_WR_SEND_WITH_IMM`
pub const WR_SEND_WITH_IMM: c_int = 3;
/// `IBV_WR_RDMA_READ`
pub const WR_RDMA_READ: c_int = 4;
/// `IBV_SEND_FENCE`
pub const SEND_FENCE: u32 = 1 << 0;
/// `IBV_SEND_SIGNALED`
pub const SEND_SIGNALED: u32 = 1 << 1;
/// `IBV_SEND_SOLICITED`
pub const SEND_SOLICITED: u32 = 1 << 2;
/// `IBV_SEND_INLINE`
pub const SEND_INLINE: u32 = 1 << 3;
/// `IBV_WC_SEND`
pub const WC_SEND: c_int = 0;
/// `IBV_WC_RDMA_WRITE`
pub const WC_RDMA_WRITE: c_int = 1;
/// `IBV_WC_RDMA_READ`
pub const WC_RDMA_READ: c_int = 2;
/// `IBV_WC_RECV`
pub const WC_RECV: c_int = 128;
/// `IBV_WC_RECV_RDMA_WITH_IMM`
pub const WC_RECV_RDMA_WITH_IMM: c_int = 129;
/// `IBV_WC_WITH_IMM`
pub const WC_WITH_IMM: u32 = 1 << 1;
/// `IBV_WC_SUCCESS`
pub const WC_SUCCESS: c_int = 0;
/// `IBV_WC_WR_FLUSH_ERR`
pub const WC_WR_FLUSH_ERR: c_int = 5;
/// `IBV_WC_RETRY_EXC_ERR`
pub const WC_RETRY_EXC_ERR: c_int = 12;
/// `IBV_WC_RNR_RETRY_EXC_ERR`
pub const WC_RNR_RETRY_EXC_ERR: c_int = 13;
/// `IBV_WC_REM_ACCESS_ERR`
pub const WC_REM_ACCESS_ERR: c_int = 10;
/// `IBV_WC_LOC_LEN_ERR`
pub const WC_LOC_LEN_ERR: c_int = 1;
/// `IBV_WC_LOC_QP_OP_ERR`
pub const WC_LOC_QP_OP_ERR: c_int = 2;
/// `IBV_WC_LOC_PROT_ERR`
pub const WC_LOC_PROT_ERR: c_int = 4;
/// `IBV_WC_REM_INV_REQ_ERR`
pub const WC_REM_INV_REQ_ERR: c_int = 9;
/// `IBV_WC_REM_OP_ERR`
pub const WC_REM_OP_ERR: c_int = 11;
/// `IBV_MTU_256`
pub const MTU_256: c_int = 1;
/// `IBV_MTU_4096`
pub const MTU_4096: c_int = 5;
/// `IBV_EVENT_CQ_ERR`
pub const EVENT_CQ_ERR: c_int = 0;
/// `IBV_EVENT_QP_FATAL`
pub const EVENT_QP_FATAL: c_int = 1;
/// `IBV_EVENT_QP_REQ_ERR`
pub const EVENT_QP_REQ_ERR: c_int = 2;
/// `IBV_EVENT_QP_ACCESS_ERR`
pub const EVENT_QP_ACCESS_ERR: c_int = 3;
/// `IBV_EVENT_COMM_EST`
pub const EVENT_COMM_EST: c_int = 4;
/// `IBV_EVENT_SQ_DRAINED`
pub const EVENT_SQ_DRAINED: c_int = 5;
/// `IBV_EVENT_PATH_MIG`
pub const EVENT_PATH_MIG: c_int = 6;
/// `IBV_EVENT_PATH_MIG_ERR`
pub const EVENT_PATH_MIG_ERR: c_int = 7;
/// `IBV_EVENT_DEVICE_FATAL`
pub const EVENT_DEVICE_FATAL: c_int = 8;
/// `IBV_EVENT_PORT_ACTIVE`
pub const EVENT_PORT_ACTIVE: c_int = 9;
/// `IBV_EVENT_PORT_ERR`
pub const EVENT_PORT_ERR: c_int = 10;
/// `IBV_EVENT_LID_CHANGE`
pub const EVENT_LID_CHANGE: c_int = 11;
/// `IBV_EVENT_PKEY_CHANGE`
pub const EVENT_PKEY_CHANGE: c_int = 12;
/// `IBV_EVENT_SM_CHANGE`
pub const EVENT_SM_CHANGE: c_int = 13;
/// `IBV_EVENT_SRQ_ERR`
pub const EVENT_SRQ_ERR: c_int = 14;
/// `IBV_EVENT_SRQ_LIMIT_REACHED`
pub const EVENT_SRQ_LIMIT_REACHED: c_int = 15;
/// `IBV_EVENT_QP_LAST_WQE_REACHED`
pub const EVENT_QP_LAST_WQE_REACHED: c_int = 16;
/// `IBV_EVENT_CLIENT_REREGISTER`
pub const EVENT_CLIENT_REREGISTER: c_int = 17;
/// `IBV_EVENT_GID_CHANGE`
pub const EVENT_GID_CHANGE: c_int = 18;

/// Sizes and offsets as a C compiler gives them for rdma-core 44's header.
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::{align_of, offset_of, size_of};
    assert!(size_of::<Gid>() == 16 && align_of::<Gid>() == 8);
    // Room enough for what the exported function writes and for the longest that a header has.
    assert!(size_of::<PortAttr>() >= 56);
    assert!(offset_of!(PortAttr, active_speed_ex) == 52);
    assert!(size_of::<ContextOps>() == 256);
    assert!(offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, req_notify_cq) == 96);
    assert!(offset_of!(ContextOps, post_send) == 200);
    assert!(offset_of!(ContextOps, post_recv) == 208);
    assert!(size_of::<DeviceAttr>() == 232);
    assert!(offset_of!(DeviceAttr, fw_ver) == 0);
    assert!(offset_of!(DeviceAttr, node_guid) == 64);
    assert!(offset_of!(DeviceAttr, sys_image_guid) == 72);
    assert!(offset_of!(DeviceAttr, max_mr_size) == 80);
    assert!(offset_of!(DeviceAttr, page_size_cap) == 88);
    assert!(offset_of!(DeviceAttr, vendor_id) == 96);
    assert!(offset_of!(DeviceAttr, max_qp) == 108);
    assert!(offset_of!(DeviceAttr, max_qp_wr) == 112);
    assert!(offset_of!(DeviceAttr, device_cap_flags) == 116);
    assert!(offset_of!(DeviceAttr, max_sge) == 120);
    assert!(offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(offset_of!(DeviceAttr, max_mr) == 136);
    assert!(offset_of!(DeviceAttr, max_qp_rd_atom) == 144);
    assert!(offset_of!(DeviceAttr, max_qp_init_rd_atom) == 156);
    assert!(offset_of!(DeviceAttr, atomic_cap) == 164);
    assert!(offset_of!(DeviceAttr, max_pkeys) == 224);
    assert!(offset_of!(DeviceAttr, local_ca_ack_delay) == 226);
    assert!(offset_of!(DeviceAttr, phys_port_cnt) == 227);
    assert!(size_of::<Pd>() == 16);
    assert!(offset_of!(Pd, context) == 0);
    assert!(offset_of!(Pd, handle) == 8);
    assert!(size_of::<Mr>() == 48);
    assert!(offset_of!(Mr, context) == 0);
    assert!(offset_of!(Mr, pd) == 8);
    assert!(offset_of!(Mr, addr) == 16);
    assert!(offset_of!(Mr, length) == 24);
    assert!(offset_of!(Mr, handle) == 32);
    assert!(offset_of!(Mr, lkey) == 36);
    assert!(offset_of!(Mr, rkey) == 40);
    assert!(size_of::<QpCap>() == 20);
    assert!(size_of::<QpInitAttr>() == 64);
    assert!(offset_of!(QpInitAttr, qp_context) == 0);
    assert!(offset_of!(QpInitAttr, send_cq) == 8);
    assert!(offset_of!(QpInitAttr, recv_cq) == 16);
    assert!(offset_of!(QpInitAttr, srq) == 24);
    assert!(offset_of!(QpInitAttr, cap) == 32);
    assert!(offset_of!(QpInitAttr, qp_type) == 52);
    assert!(offset_of!(QpInitAttr, sq_sig_all) == 56);
    assert!(size_of::<GlobalRoute>() == 24);
    assert!(offset_of!(GlobalRoute, dgid) == 0);
    assert!(offset_of!(GlobalRoute, flow_label) == 16);
    assert!(offset_of!(GlobalRoute, sgid_index) == 20);
    assert!(offset_of!(GlobalRoute, hop_limit) == 21);
    assert!(offset_of!(GlobalRoute, traffic_class) == 22);
    assert!(size_of::<AhAttr>() == 32);
    assert!(offset_of!(AhAttr, grh) == 0);
    assert!(offset_of!(AhAttr, dlid) == 24);
    assert!(offset_of!(AhAttr, sl) == 26);
    assert!(offset_of!(AhAttr, src_path_bits) == 27);
    assert!(offset_of!(AhAttr, static_rate) == 28);
    assert!(offset_of!(AhAttr, is_global) == 29);
    assert!(offset_of!(AhAttr, port_num) == 30);
    assert!(size_of::<QpAttr>() == 144);
    assert!(offset_of!(QpAttr, qp_state) == 0);
    assert!(offset_of!(QpAttr, cur_qp_state) == 4);
    assert!(offset_of!(QpAttr, path_mtu) == 8);
    assert!(offset_of!(QpAttr, path_mig_state) == 12);
    assert!(offset_of!(QpAttr, qkey) == 16);
    assert!(offset_of!(QpAttr, rq_psn) == 20);
    assert!(offset_of!(QpAttr, sq_psn) == 24);
    assert!(offset_of!(QpAttr, dest_qp_num) == 28);
    assert!(offset_of!(QpAttr, qp_access_flags) == 32);
    assert!(offset_of!(QpAttr, cap) == 36);
    assert!(offset_of!(QpAttr, ah_attr) == 56);
    assert!(offset_of!(QpAttr, alt_ah_attr) == 88);
    assert!(offset_of!(QpAttr, pkey_index) == 120);
    assert!(offset_of!(QpAttr, alt_pkey_index) == 122);
    assert!(offset_of!(QpAttr, en_sqd_async_notify) == 124);
    assert!(offset_of!(QpAttr, sq_draining) == 125);
    assert!(offset_of!(QpAttr, max_rd_atomic) == 126);
    assert!(offset_of!(QpAttr, max_dest_rd_atomic) == 127);
    assert!(offset_of!(QpAttr, min_rnr_timer) == 128);
    assert!(offset_of!(QpAttr, port_num) == 129);
    assert!(offset_of!(QpAttr, timeout) == 130);
    assert!(offset_of!(QpAttr, retry_cnt) == 131);
    assert!(offset_of!(QpAttr, rnr_retry) == 132);
    assert!(offset_of!(QpAttr, alt_port_num) == 133);
    assert!(offset_of!(QpAttr, alt_timeout) == 134);
    assert!(offset_of!(QpAttr, rate_limit) == 136);
    assert!(size_of::<Sge>() == 16);
    assert!(offset_of!(Sge, addr) == 0);
    assert!(offset_of!(Sge, length) == 8);
    assert!(offset_of!(Sge, lkey) == 12);
    assert!(size_of::<SendWr>() == 128);
    assert!(offset_of!(SendWr, wr_id) == 0);
    assert!(offset_of!(SendWr, next) == 8);
    assert!(offset_of!(SendWr, sg_list) == 16);
    assert!(offset_of!(SendWr, num_sge) == 24);
    assert!(offset_of!(SendWr, opcode) == 28);
    assert!(offset_of!(SendWr, send_flags) == 32);
    assert!(offset_of!(SendWr, imm_data) == 36);
    assert!(offset_of!(SendWr, rdma) == 40);
    assert!(offset_of!(SendWr, rdma.remote_addr) == 40);
    assert!(offset_of!(SendWr, rdma.rkey) == 48);
    assert!(offset_of!(SendWr, xrc) == 72);
    assert!(offset_of!(SendWr, bind_or_tso) == 80);
    assert!(size_of::<RecvWr>() == 32);
    assert!(offset_of!(RecvWr, wr_id) == 0);
    assert!(offset_of!(RecvWr, next) == 8);
    assert!(offset_of!(RecvWr, sg_list) == 16);
    assert!(offset_of!(RecvWr, num_sge) == 24);
    assert!(size_of::<Wc>() == 48);
    assert!(offset_of!(Wc, wr_id) == 0);
    assert!(offset_of!(Wc, status) == 8);
    assert!(offset_of!(Wc, opcode) == 12);
    assert!(offset_of!(Wc, vendor_err) == 16);
    assert!(offset_of!(Wc, byte_len) == 20);
    assert!(offset_of!(Wc, imm_data) == 24);
    assert!(offset_of!(Wc, qp_num) == 28);
    assert!(offset_of!(Wc, src_qp) == 32);
    assert!(offset_of!(Wc, wc_flags) == 36);
    assert!(offset_of!(Wc, pkey_index) == 40);
    assert!(offset_of!(Wc, slid) == 42);
    assert!(offset_of!(Wc, sl) == 44);
    assert!(offset_of!(Wc, dlid_path_bits) == 45);
    assert!(size_of::<AsyncEvent>() == 16);
    assert!(offset_of!(AsyncEvent, element) == 0);
    assert!(offset_of!(AsyncEvent, event_type) == 8);
    assert!(offset_of!(Context, device) == 0);
    assert!(offset_of!(Context, ops) == 8);
    assert!(offset_of!(Context, cmd_fd) == 264);
    assert!(offset_of!(Context, async_fd) == 268);
    assert!(offset_of!(Context, num_comp_vectors) == 272);
    assert!(offset_of!(PortAttr, state) == 0);
    assert!(offset_of!(PortAttr, max_mtu) == 4);
    assert!(offset_of!(PortAttr, active_mtu) == 8);
    assert!(offset_of!(PortAttr, gid_tbl_len) == 12);
    assert!(offset_of!(PortAttr, port_cap_flags) == 16);
    assert!(offset_of!(PortAttr, max_msg_sz) == 20);
    assert!(offset_of!(PortAttr, bad_pkey_cntr) == 24);
    assert!(offset_of!(PortAttr, qkey_viol_cntr) == 28);
    assert!(offset_of!(PortAttr, pkey_tbl_len) == 32);
    assert!(offset_of!(PortAttr, lid) == 34);
    assert!(offset_of!(PortAttr, sm_lid) == 36);
    assert!(offset_of!(PortAttr, lmc) == 38);
    assert!(offset_of!(PortAttr, max_vl_num) == 39);
    assert!(offset_of!(PortAttr, sm_sl) == 40);
    assert!(offset_of!(PortAttr, subnet_timeout) == 41);
    assert!(offset_of!(PortAttr, init_type_reply) == 42);
    assert!(offset_of!(PortAttr, active_width) == 43);
    assert!(offset_of!(PortAttr, active_speed) == 44);
    assert!(offset_of!(PortAttr, phys_state) == 45);
    assert!(offset_of!(PortAttr, link_layer) == 46);
    assert!(offset_of!(PortAttr, flags) == 47);
    assert!(offset_of!(PortAttr, port_cap_flags2) == 48);
    assert!(offset_of!(Cq, context) == 0);
    assert!(offset_of!(Cq, channel) == 8);
    assert!(offset_of!(Cq, cq_context) == 16);
    assert!(offset_of!(Cq, handle) == 24);
    assert!(offset_of!(Cq, cqe) == 28);
    assert!(offset_of!(Qp, context) == 0);
    assert!(offset_of!(Qp, qp_context) == 8);
    assert!(offset_of!(Qp, pd) == 16);
    assert!(offset_of!(Qp, send_cq) == 24);
    assert!(offset_of!(Qp, recv_cq) == 32);
    assert!(offset_of!(Qp, srq) == 40);
    assert!(offset_of!(Qp, handle) == 48);
    assert!(offset_of!(Qp, qp_num) == 52);
    assert!(offset_of!(Qp, state) == 56);
    assert!(offset_of!(Qp, qp_type) == 60);
};
