//! vccl declares the types of ibverbs itself, because it opens the library at run time. The tests here
//! compare each declaration with that of the rdma-sys crate, which bindgen makes from the installed
//! headers (but for the types with unions: those are written by hand there too).
#![cfg(test)]

use std::mem::{align_of, offset_of, size_of};

use rdma_sys::*;
use vccl::ibverbs::sys;

/// Every field that both have: where it is, and how long. A field of ours may have another name.
macro_rules! start {
    ($ours:ident = $theirs:ident { $($field:ident $(= $name:ident)?),* $(,)? }) => {
        assert!(align_of::<sys::$ours>() >= align_of::<$theirs>(), stringify!($theirs));
        $(start!(@field $ours $theirs $field $($name)?);)*
    };
    (@field $ours:ident $theirs:ident $field:ident) => {
        start!(@field $ours $theirs $field $field)
    };
    (@field $ours:ident $theirs:ident $field:ident $name:ident) => {
        assert_eq!(
            (offset_of!(sys::$ours, $field), length(|x: &sys::$ours| &raw const x.$field)),
            (offset_of!($theirs, $name), length(|x: &$theirs| &raw const x.$name)),
            concat!(stringify!($theirs), ".", stringify!($name))
        );
    };
}

/// As `start`, and both are equally long.
macro_rules! whole {
    ($ours:ident = $theirs:ident $fields:tt) => {
        assert_eq!(size_of::<sys::$ours>(), size_of::<$theirs>(), stringify!($theirs));
        start!($ours = $theirs $fields);
    };
}

/// The size of what a field's accessor points to.
fn length<T, F>(_: impl Fn(&T) -> *const F) -> usize {
    size_of::<F>()
}

#[test]
fn types_are_laid_out_alike() {
    whole!(
        ContextOps = ibv_context_ops {
            poll_cq,
            req_notify_cq,
            post_send,
            post_recv
        }
    );
    start!(
        Context = ibv_context {
            device,
            ops,
            cmd_fd,
            async_fd,
            num_comp_vectors
        }
    );
    whole!(
        DeviceAttr = ibv_device_attr {
            fw_ver,
            node_guid,
            sys_image_guid,
            max_mr_size,
            page_size_cap,
            vendor_id,
            vendor_part_id,
            hw_ver,
            max_qp,
            max_qp_wr,
            device_cap_flags,
            max_sge,
            max_sge_rd,
            max_cq,
            max_cqe,
            max_mr,
            max_pd,
            max_qp_rd_atom,
            max_ee_rd_atom,
            max_res_rd_atom,
            max_qp_init_rd_atom,
            max_ee_init_rd_atom,
            atomic_cap,
            max_ee,
            max_rdd,
            max_mw,
            max_raw_ipv6_qp,
            max_raw_ethy_qp,
            max_mcast_grp,
            max_mcast_qp_attach,
            max_total_mcast_qp_attach,
            max_ah,
            max_fmr,
            max_map_per_fmr,
            max_srq,
            max_srq_wr,
            max_srq_sge,
            max_pkeys,
            local_ca_ack_delay,
            phys_port_cnt
        }
    );
    start!(
        PortAttr = ibv_port_attr {
            state,
            max_mtu,
            active_mtu,
            gid_tbl_len,
            port_cap_flags,
            max_msg_sz,
            bad_pkey_cntr,
            qkey_viol_cntr,
            pkey_tbl_len,
            lid,
            sm_lid,
            lmc,
            max_vl_num,
            sm_sl,
            subnet_timeout,
            init_type_reply,
            active_width,
            active_speed,
            phys_state,
            link_layer,
            flags,
            port_cap_flags2
        }
    );
    whole!(Pd = ibv_pd { context, handle });
    whole!(
        Mr = ibv_mr {
            context,
            pd,
            addr,
            length,
            handle,
            lkey,
            rkey
        }
    );
    start!(
        Cq = ibv_cq {
            context,
            channel,
            cq_context,
            handle,
            cqe
        }
    );
    start!(
        Qp = ibv_qp {
            context,
            qp_context,
            pd,
            send_cq,
            recv_cq,
            srq,
            handle,
            qp_num,
            state,
            qp_type
        }
    );
    whole!(
        QpCap = ibv_qp_cap {
            max_send_wr,
            max_recv_wr,
            max_send_sge,
            max_recv_sge,
            max_inline_data
        }
    );
    whole!(
        QpInitAttr = ibv_qp_init_attr {
            qp_context,
            send_cq,
            recv_cq,
            srq,
            cap,
            qp_type,
            sq_sig_all
        }
    );
    whole!(
        GlobalRoute = ibv_global_route {
            dgid,
            flow_label,
            sgid_index,
            hop_limit,
            traffic_class
        }
    );
    whole!(
        AhAttr = ibv_ah_attr {
            grh,
            dlid,
            sl,
            src_path_bits,
            static_rate,
            is_global,
            port_num
        }
    );
    whole!(
        QpAttr = ibv_qp_attr {
            qp_state,
            cur_qp_state,
            path_mtu,
            path_mig_state,
            qkey,
            rq_psn,
            sq_psn,
            dest_qp_num,
            qp_access_flags,
            cap,
            ah_attr,
            alt_ah_attr,
            pkey_index,
            alt_pkey_index,
            en_sqd_async_notify,
            sq_draining,
            max_rd_atomic,
            max_dest_rd_atomic,
            min_rnr_timer,
            port_num,
            timeout,
            retry_cnt,
            rnr_retry,
            alt_port_num,
            alt_timeout,
            rate_limit
        }
    );
    whole!(Sge = ibv_sge { addr, length, lkey });
    whole!(SendWr = ibv_send_wr {
        wr_id, next, sg_list, num_sge, opcode, send_flags,
        imm_data = imm_data_invalidated_rkey_union, rdma = wr,
        bind_or_tso = bind_mw_tso_union,
    });
    whole!(
        RecvWr = ibv_recv_wr {
            wr_id,
            next,
            sg_list,
            num_sge
        }
    );
    whole!(Wc = ibv_wc { wr_id, status, opcode, vendor_err, byte_len, imm_data = imm_data_invalidated_rkey_union, qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits });
    whole!(
        AsyncEvent = ibv_async_event {
            element,
            event_type
        }
    );
    assert_eq!(size_of::<sys::Gid>(), size_of::<ibv_gid>());
    assert_eq!(align_of::<sys::Gid>(), align_of::<ibv_gid>());
    assert_eq!(
        size_of::<sys::EventElement>(),
        size_of::<ibv_async_event_element_t>()
    );
    assert_eq!(offset_of!(sys::Rdma, rkey), offset_of!(rdma_t, rkey));
    // Ours takes in the padding behind it.
    assert_eq!(
        offset_of!(sys::SendWr, xrc),
        offset_of!(ibv_send_wr, qp_type)
    );
    // Room for what the headers' version may add.
    assert!(size_of::<sys::PortAttr>() >= size_of::<ibv_port_attr>());
}

macro_rules! same {
    ($($ours:ident = $theirs:expr),* $(,)?) => {$(
        assert_eq!(sys::$ours as u32, $theirs as u32, stringify!($ours));
    )*};
}

#[test]
fn constants_have_the_same_values() {
    same! {
        PORT_ACTIVE = ibv_port_state::IBV_PORT_ACTIVE,
        QPT_RC = ibv_qp_type::IBV_QPT_RC,
        QPS_RESET = ibv_qp_state::IBV_QPS_RESET,
        QPS_INIT = ibv_qp_state::IBV_QPS_INIT,
        QPS_RTR = ibv_qp_state::IBV_QPS_RTR,
        QPS_RTS = ibv_qp_state::IBV_QPS_RTS,
        QPS_ERR = ibv_qp_state::IBV_QPS_ERR,
        QP_STATE = ibv_qp_attr_mask::IBV_QP_STATE.0,
        QP_CUR_STATE = ibv_qp_attr_mask::IBV_QP_CUR_STATE.0,
        QP_ACCESS_FLAGS = ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS.0,
        QP_PKEY_INDEX = ibv_qp_attr_mask::IBV_QP_PKEY_INDEX.0,
        QP_PORT = ibv_qp_attr_mask::IBV_QP_PORT.0,
        QP_AV = ibv_qp_attr_mask::IBV_QP_AV.0,
        QP_PATH_MTU = ibv_qp_attr_mask::IBV_QP_PATH_MTU.0,
        QP_TIMEOUT = ibv_qp_attr_mask::IBV_QP_TIMEOUT.0,
        QP_RETRY_CNT = ibv_qp_attr_mask::IBV_QP_RETRY_CNT.0,
        QP_RNR_RETRY = ibv_qp_attr_mask::IBV_QP_RNR_RETRY.0,
        QP_RQ_PSN = ibv_qp_attr_mask::IBV_QP_RQ_PSN.0,
        QP_MAX_QP_RD_ATOMIC = ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC.0,
        QP_MIN_RNR_TIMER = ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER.0,
        QP_SQ_PSN = ibv_qp_attr_mask::IBV_QP_SQ_PSN.0,
        QP_MAX_DEST_RD_ATOMIC = ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC.0,
        QP_CAP = ibv_qp_attr_mask::IBV_QP_CAP.0,
        QP_DEST_QPN = ibv_qp_attr_mask::IBV_QP_DEST_QPN.0,
        ACCESS_LOCAL_WRITE = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0,
        ACCESS_REMOTE_WRITE = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0,
        ACCESS_REMOTE_READ = ibv_access_flags::IBV_ACCESS_REMOTE_READ.0,
        ACCESS_REMOTE_ATOMIC = ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0,
        ACCESS_RELAXED_ORDERING = ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0,
        WR_RDMA_WRITE = ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        WR_RDMA_WRITE_WITH_IMM = ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
        WR_SEND = ibv_wr_opcode::IBV_WR_SEND,
        WR_SEND_WITH_IMM = ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
        WR_RDMA_READ = ibv_wr_opcode::IBV_WR_RDMA_READ,
        SEND_FENCE = ibv_send_flags::IBV_SEND_FENCE.0,
        SEND_SIGNALED = ibv_send_flags::IBV_SEND_SIGNALED.0,
        SEND_SOLICITED = ibv_send_flags::IBV_SEND_SOLICITED.0,
        SEND_INLINE = ibv_send_flags::IBV_SEND_INLINE.0,
        WC_SEND = ibv_wc_opcode::IBV_WC_SEND,
        WC_RDMA_WRITE = ibv_wc_opcode::IBV_WC_RDMA_WRITE,
        WC_RDMA_READ = ibv_wc_opcode::IBV_WC_RDMA_READ,
        WC_RECV = ibv_wc_opcode::IBV_WC_RECV,
        WC_RECV_RDMA_WITH_IMM = ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM,
        WC_WITH_IMM = ibv_wc_flags::IBV_WC_WITH_IMM.0,
        WC_SUCCESS = ibv_wc_status::IBV_WC_SUCCESS,
        WC_WR_FLUSH_ERR = ibv_wc_status::IBV_WC_WR_FLUSH_ERR,
        WC_RETRY_EXC_ERR = ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
        WC_RNR_RETRY_EXC_ERR = ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR,
        WC_REM_ACCESS_ERR = ibv_wc_status::IBV_WC_REM_ACCESS_ERR,
        WC_LOC_LEN_ERR = ibv_wc_status::IBV_WC_LOC_LEN_ERR,
        WC_LOC_QP_OP_ERR = ibv_wc_status::IBV_WC_LOC_QP_OP_ERR,
        WC_LOC_PROT_ERR = ibv_wc_status::IBV_WC_LOC_PROT_ERR,
        WC_REM_INV_REQ_ERR = ibv_wc_status::IBV_WC_REM_INV_REQ_ERR,
        WC_REM_OP_ERR = ibv_wc_status::IBV_WC_REM_OP_ERR,
        MTU_256 = ibv_mtu::IBV_MTU_256,
        MTU_4096 = ibv_mtu::IBV_MTU_4096,
        EVENT_CQ_ERR = ibv_event_type::IBV_EVENT_CQ_ERR,
        EVENT_QP_FATAL = ibv_event_type::IBV_EVENT_QP_FATAL,
        EVENT_QP_REQ_ERR = ibv_event_type::IBV_EVENT_QP_REQ_ERR,
        EVENT_QP_ACCESS_ERR = ibv_event_type::IBV_EVENT_QP_ACCESS_ERR,
        EVENT_COMM_EST = ibv_event_type::IBV_EVENT_COMM_EST,
        EVENT_SQ_DRAINED = ibv_event_type::IBV_EVENT_SQ_DRAINED,
        EVENT_PATH_MIG = ibv_event_type::IBV_EVENT_PATH_MIG,
        EVENT_PATH_MIG_ERR = ibv_event_type::IBV_EVENT_PATH_MIG_ERR,
        EVENT_DEVICE_FATAL = ibv_event_type::IBV_EVENT_DEVICE_FATAL,
        EVENT_PORT_ACTIVE = ibv_event_type::IBV_EVENT_PORT_ACTIVE,
        EVENT_PORT_ERR = ibv_event_type::IBV_EVENT_PORT_ERR,
        EVENT_LID_CHANGE = ibv_event_type::IBV_EVENT_LID_CHANGE,
        EVENT_PKEY_CHANGE = ibv_event_type::IBV_EVENT_PKEY_CHANGE,
        EVENT_SM_CHANGE = ibv_event_type::IBV_EVENT_SM_CHANGE,
        EVENT_SRQ_ERR = ibv_event_type::IBV_EVENT_SRQ_ERR,
        EVENT_SRQ_LIMIT_REACHED = ibv_event_type::IBV_EVENT_SRQ_LIMIT_REACHED,
        EVENT_QP_LAST_WQE_REACHED = ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED,
        EVENT_CLIENT_REREGISTER = ibv_event_type::IBV_EVENT_CLIENT_REREGISTER,
        EVENT_GID_CHANGE = ibv_event_type::IBV_EVENT_GID_CHANGE,
    }
}
