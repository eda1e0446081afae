/* Compiled with every build of vccl, never run: it compiles exactly when the C declarations of the
 * plugin interfaces have the layouts and the argument types that layout.inc states. build.rs holds
 * the Rust declarations to the same table. */
#include "vccl_net_types.h"
#include "vccl_net_v6.h"
#include "vccl_net_v7.h"
#include "vccl_net_v8.h"
#include "vccl_net_v9.h"
#include "vccl_net_v10.h"
#include "vccl_net_v11.h"
#include "vccl_net_v12.h"

/* The argument types of layout.inc; `V` is the version of the line. */
#define VCCL_TYPE_PVOID(V) void *
#define VCCL_TYPE_PPVOID(V) void **
#define VCCL_TYPE_INT(V) int
#define VCCL_TYPE_PINT(V) int *
#define VCCL_TYPE_SIZE(V) size_t
#define VCCL_TYPE_PSIZE(V) size_t *
#define VCCL_TYPE_U64(V) uint64_t
#define VCCL_TYPE_I64(V) int64_t
#define VCCL_TYPE_ULONG(V) unsigned long
#define VCCL_TYPE_PCHAR(V) const char *
#define VCCL_TYPE_LOGFN(V) vccl_types_LogFn
#define VCCL_TYPE_PROFFN(V) vccl_types_ProfilerFn
#define VCCL_TYPE_PPROPS(V) struct vccl_##V##_Properties *
#define VCCL_TYPE_PPDEVH(V) struct vccl_types_DeviceHandle **
#define VCCL_TYPE_PCONFIG(V) struct vccl_##V##_CommConfig *
#define VCCL_TYPE_PVDEV(V) struct vccl_##V##_VDeviceProps *
#define VCCL_TYPE_PATTR(V) struct vccl_##V##_NetAttr *

/* VCCL_ARGS(V, (A, B)) is the list of the types that A and B name. */
#define VCCL_ARGS_1(V, A) VCCL_TYPE_##A(V)
#define VCCL_ARGS_2(V, A, ...) VCCL_TYPE_##A(V), VCCL_ARGS_1(V, __VA_ARGS__)
#define VCCL_ARGS_3(V, A, ...) VCCL_TYPE_##A(V), VCCL_ARGS_2(V, __VA_ARGS__)
#define VCCL_ARGS_4(V, A, ...) VCCL_TYPE_##A(V), VCCL_ARGS_3(V, __VA_ARGS__)
#define VCCL_ARGS_5(V, A, ...) VCCL_TYPE_##A(V), VCCL_ARGS_4(V, __VA_ARGS__)
#define VCCL_ARGS_6(V, A, ...) VCCL_TYPE_##A(V), VCCL_ARGS_5(V, __VA_ARGS__)
#define VCCL_ARGS_7(V, A, ...) VCCL_TYPE_##A(V), VCCL_ARGS_6(V, __VA_ARGS__)
#define VCCL_ARGS_8(V, A, ...) VCCL_TYPE_##A(V), VCCL_ARGS_7(V, __VA_ARGS__)
#define VCCL_NTH(_1, _2, _3, _4, _5, _6, _7, _8, NAME, ...) NAME
#define VCCL_LIST(V, ...)                                                                                    \
    VCCL_NTH(__VA_ARGS__, VCCL_ARGS_8, VCCL_ARGS_7, VCCL_ARGS_6, VCCL_ARGS_5, VCCL_ARGS_4, VCCL_ARGS_3,      \
             VCCL_ARGS_2, VCCL_ARGS_1, )(V, __VA_ARGS__)
#define VCCL_ARGS(V, PARENTHESISED) VCCL_APPLY(VCCL_LIST, V, VCCL_BARE PARENTHESISED)
#define VCCL_APPLY(MACRO, ...) MACRO(__VA_ARGS__)
#define VCCL_BARE(...) __VA_ARGS__

#define VCCL_STRUCT(V, S, SIZE, ALIGN)                                                                       \
    _Static_assert(sizeof(struct vccl_##V##_##S) == SIZE, #V " " #S ": size is not " #SIZE);                 \
    _Static_assert(_Alignof(struct vccl_##V##_##S) == ALIGN, #V " " #S ": alignment is not " #ALIGN);

#define VCCL_FIELD(V, S, F, OFFSET)                                                                          \
    _Static_assert(offsetof(struct vccl_##V##_##S, F) == OFFSET, #V " " #S "." #F " is not at " #OFFSET);

/* A function is where it should be and takes the argument types that it should. */
#define VCCL_CALL(V, S, F, OFFSET, ARGS)                                                                     \
    VCCL_FIELD(V, S, F, OFFSET)                                                                              \
    _Static_assert(__builtin_types_compatible_p(__typeof__(((struct vccl_##V##_##S *)0)->F),                 \
                                                int (*)(VCCL_ARGS(V, ARGS))),                                \
                   #V " " #S "." #F " does not take " #ARGS);

#define VCCL_CALLBACK(V, F, ARGS)                                                                            \
    _Static_assert(__builtin_types_compatible_p(vccl_##V##_##F, int (*)(VCCL_ARGS(V, ARGS))),                \
                   #V " " #F " does not take " #ARGS);

#define VCCL_LOGGER(V, F, ARGS)                                                                              \
    _Static_assert(__builtin_types_compatible_p(vccl_##V##_##F, void (*)(VCCL_ARGS(V, ARGS), ...)),          \
                   #V " " #F " does not take " #ARGS);

#define VCCL_CONST(V, C, VALUE) _Static_assert(vccl_##V##_##C == VALUE, #V " " #C " is not " #VALUE);

#include "layout.inc"
