/* What all versions of the network plugin interface share.
 * Written for vccl from the facts of the binary interface; names are our own. */
#ifndef VCCL_NET_TYPES_H
#define VCCL_NET_TYPES_H

#include <stddef.h>
#include <stdint.h>

enum {
    vccl_types_HANDLE_LEN = 128,
    vccl_types_NCCL_PTR_HOST = 1,
    vccl_types_NCCL_PTR_CUDA = 2,
    vccl_types_NCCL_PTR_DMABUF = 4,
    vccl_types_NET_DEVICE_HOST = 0,
    vccl_types_NET_DEVICE_INVALID_VERSION = 0,
    vccl_types_TRAFFIC_CLASS_UNDEF = -1,
    vccl_types_ID_UNDEF = -1,
    vccl_types_OPTIONAL_RECV_COMPLETION = 1,
    vccl_types_NCCL_LOG_WARN = 2,
    vccl_types_NCCL_LOG_INFO = 3,
    vccl_types_NCCL_LOG_TRACE = 5,
    vccl_types_NCCL_INIT = 1,
    vccl_types_NCCL_NET = 16,
};

/* level, subsystems, file, line, printf format */
typedef void (*vccl_types_LogFn)(int level, unsigned long flags, const char *file, int line, const char *fmt, ...);

/* event, kind, parent, plugin id, data */
typedef int (*vccl_types_ProfilerFn)(void **event, int kind, void *parent, int64_t plugin_id, void *ext_data);

struct vccl_types_DeviceHandle {
    int net_device_type;
    int net_device_version;
    void *handle;
    size_t size;
    int needs_proxy_progress;
};

#endif
