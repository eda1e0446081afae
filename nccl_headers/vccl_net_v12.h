/* Network plugin interface, version 12 (NCCL 2.30 and later).
 * Up to 8 devices behind a virtual one; rails and planes.
 * Written for vccl from the facts of the binary interface; names are our own. */
#ifndef VCCL_NET_V12_H
#define VCCL_NET_V12_H

#include "vccl_net_types.h"

enum { vccl_v12_MAX_DEVS_PER_NIC = 8 };

struct vccl_v12_VDeviceProps {
    int ndevs;
    int devs[vccl_v12_MAX_DEVS_PER_NIC];
};

struct vccl_v12_CommConfig {
    int traffic_class;
};

struct vccl_v12_Properties {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int reg_is_global;
    int force_flush;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int net_device_type;
    int net_device_version;
    struct vccl_v12_VDeviceProps v_props;
    size_t max_p2p_bytes;
    size_t max_coll_bytes;
    int max_multi_request_size;
    int16_t rail_id;
    int16_t plane_id;
};

struct vccl_v12_NetCommAttr {
    int32_t max_concurrent_peers;
    int32_t min_concurrent_peers;
    int32_t max_flows_per_peer;
    int32_t min_flows_per_peer;
};

struct vccl_v12_NetAttr {
    struct vccl_v12_NetCommAttr send_comm_attr;
    struct vccl_v12_NetCommAttr recv_comm_attr;
    uint32_t op;
    uint32_t algo;
    uint32_t proto;
};

struct vccl_v12_Net {
    const char *name;
    int (*init)(void **ctx, uint64_t comm_id, struct vccl_v12_CommConfig *config, vccl_types_LogFn log, vccl_types_ProfilerFn profiler);
    int (*devices)(int *ndev);
    int (*get_properties)(int dev, struct vccl_v12_Properties *props);
    int (*listen)(void *ctx, int dev, void *handle, void **listen_comm);
    int (*connect)(void *ctx, int dev, void *handle, void **send_comm, struct vccl_types_DeviceHandle **send_dev_comm);
    int (*accept)(void *listen_comm, void **recv_comm, struct vccl_types_DeviceHandle **recv_dev_comm);
    int (*reg_mr)(void *comm, void *data, size_t size, int kind, void **mhandle);
    int (*reg_mr_dma_buf)(void *comm, void *data, size_t size, int kind, uint64_t offset, int fd, void **mhandle);
    int (*dereg_mr)(void *comm, void *mhandle);
    int (*isend)(void *send_comm, void *data, size_t size, int tag, void *mhandle, void *phandle, void **request);
    int (*irecv)(void *recv_comm, int n, void **data, size_t *sizes, int *tags, void **mhandles, void **phandles, void **request);
    int (*iflush)(void *recv_comm, int n, void **data, int *sizes, void **mhandles, void **request);
    int (*test)(void *request, int *done, int *sizes);
    int (*close_send)(void *send_comm);
    int (*close_recv)(void *recv_comm);
    int (*close_listen)(void *listen_comm);
    int (*get_device_mr)(void *comm, void *mhandle, void **dptr_mhandle);
    int (*irecv_consumed)(void *recv_comm, int n, void *request);
    int (*make_v_device)(int *dev, struct vccl_v12_VDeviceProps *props);
    int (*finalize)(void *ctx);
    int (*set_net_attr)(void *ctx, struct vccl_v12_NetAttr *attr);
};

#endif
