/* Network plugin interface, version 8 (NCCL 2.20 and later).
 * reg_mr takes a size_t; registrations may be global. Every NCCL release since takes this version.
 * Written for vccl from the facts of the binary interface; names are our own. */
#ifndef VCCL_NET_V8_H
#define VCCL_NET_V8_H

#include "vccl_net_types.h"

struct vccl_v8_Properties {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int reg_is_global;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int net_device_type;
    int net_device_version;
};

struct vccl_v8_Net {
    const char *name;
    int (*init)(vccl_types_LogFn log);
    int (*devices)(int *ndev);
    int (*get_properties)(int dev, struct vccl_v8_Properties *props);
    int (*listen)(int dev, void *handle, void **listen_comm);
    int (*connect)(int dev, void *handle, void **send_comm, struct vccl_types_DeviceHandle **send_dev_comm);
    int (*accept)(void *listen_comm, void **recv_comm, struct vccl_types_DeviceHandle **recv_dev_comm);
    int (*reg_mr)(void *comm, void *data, size_t size, int kind, void **mhandle);
    int (*reg_mr_dma_buf)(void *comm, void *data, size_t size, int kind, uint64_t offset, int fd, void **mhandle);
    int (*dereg_mr)(void *comm, void *mhandle);
    int (*isend)(void *send_comm, void *data, int size, int tag, void *mhandle, void **request);
    int (*irecv)(void *recv_comm, int n, void **data, int *sizes, int *tags, void **mhandles, void **request);
    int (*iflush)(void *recv_comm, int n, void **data, int *sizes, void **mhandles, void **request);
    int (*test)(void *request, int *done, int *sizes);
    int (*close_send)(void *send_comm);
    int (*close_recv)(void *recv_comm);
    int (*close_listen)(void *listen_comm);
    int (*get_device_mr)(void *comm, void *mhandle, void **dptr_mhandle);
    int (*irecv_consumed)(void *recv_comm, int n, void *request);
};

#endif
