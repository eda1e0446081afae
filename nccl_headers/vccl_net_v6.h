/* Network plugin interface, version 6 (NCCL 2.13 and later).
 * The first version here: sizes are int, and every function is required.
 * Written for vccl from the facts of the binary interface; names are our own. */
#ifndef VCCL_NET_V6_H
#define VCCL_NET_V6_H

#include "vccl_net_types.h"

struct vccl_v6_Properties {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
};

struct vccl_v6_Net {
    const char *name;
    int (*init)(vccl_types_LogFn log);
    int (*devices)(int *ndev);
    int (*get_properties)(int dev, struct vccl_v6_Properties *props);
    int (*listen)(int dev, void *handle, void **listen_comm);
    int (*connect)(int dev, void *handle, void **send_comm);
    int (*accept)(void *listen_comm, void **recv_comm);
    int (*reg_mr)(void *comm, void *data, int size, int kind, void **mhandle);
    int (*reg_mr_dma_buf)(void *comm, void *data, size_t size, int kind, uint64_t offset, int fd, void **mhandle);
    int (*dereg_mr)(void *comm, void *mhandle);
    int (*isend)(void *send_comm, void *data, int size, int tag, void *mhandle, void **request);
    int (*irecv)(void *recv_comm, int n, void **data, int *sizes, int *tags, void **mhandles, void **request);
    int (*iflush)(void *recv_comm, int n, void **data, int *sizes, void **mhandles, void **request);
    int (*test)(void *request, int *done, int *sizes);
    int (*close_send)(void *send_comm);
    int (*close_recv)(void *recv_comm);
    int (*close_listen)(void *listen_comm);
};

#endif
