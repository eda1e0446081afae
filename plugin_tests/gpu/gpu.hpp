// What the GPU programs share: the CUDA driver, cuBLAS and NCCL opened at run time (so that a plain C++
// compiler builds them and any NCCL release can be run), ranks as forked processes, and test patterns.
// The declarations are our own and name only what is used.
#pragma once
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

inline double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// ---------------------------------------------------------------- ranks

constexpr int MAX_RANKS = 2;
constexpr int SLOTS = 32;

struct alignas(64) Line {
    std::atomic<long> v;
};

// Memory that all ranks share from before the fork.
struct Shared {
    Line arrived[MAX_RANKS];
    Line failed;
    Line go;
    Line done[MAX_RANKS];
    double slot[MAX_RANKS][SLOTS];
    char id[64][128];
};

struct World {
    Shared *sh = nullptr;
    int rank = 0;
    int nranks = 0;
    int sock = -1;  // to the peer; carries file descriptors
    long barriers = 0;
};
inline World world;

[[noreturn]] inline void die(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    char text[1024];
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (world.sh) world.sh->failed.v = 1;
    printf("FAIL rank %d: %s\n", world.rank, text);
    fflush(stdout);
    _exit(1);
}

inline void barrier() {
    long turn = ++world.barriers;
    world.sh->arrived[world.rank].v = turn;
    for (int r = 0; r < world.nranks; r++)
        for (long spins = 0; world.sh->arrived[r].v.load(std::memory_order_acquire) < turn; spins++) {
            if (world.sh->failed.v) _exit(1);
            if (spins > 10000) usleep(20);
        }
}

// Rank 0's value, in every rank.
inline double from_root(double v) {
    if (world.rank == 0) world.sh->slot[0][SLOTS - 1] = v;
    barrier();
    v = world.sh->slot[0][SLOTS - 1];
    barrier();
    return v;
}

inline double mean_over_ranks(double v) {
    world.sh->slot[world.rank][SLOTS - 1] = v;
    barrier();
    double sum = 0;
    for (int r = 0; r < world.nranks; r++) sum += world.sh->slot[r][SLOTS - 1];
    barrier();
    return sum / world.nranks;
}

// Forks `nranks` processes that run `body`, and kills what is left when `limit` seconds have passed or
// a rank has failed. Rank `victim` may die of SIGKILL. Returns 0, 1 (a rank failed) or 124 (too late).
inline int run_ranks(int nranks, double limit, int victim, int (*body)()) {
    void *p = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return perror("mmap"), 1;
    world.sh = new (p) Shared();
    world.nranks = nranks;
    int pair[2] = {-1, -1};
    if (nranks == 2 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return perror("socketpair"), 1;
    fflush(stdout);
    std::vector<pid_t> pids;
    for (int r = 0; r < nranks; r++) {
        pid_t pid = fork();
        if (pid < 0) return perror("fork"), 1;
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            world.rank = r;
            if (nranks == 2) world.sock = pair[r], close(pair[1 - r]);
            int rc = body();
            fflush(stdout);
            if (rc) world.sh->failed.v = 1;
            _exit(rc);
        }
        pids.push_back(pid);
    }
    int worst = 0;
    double deadline = now() + limit;
    int left = nranks;
    while (left) {
        for (int r = 0; r < nranks; r++) {
            int st;
            if (!pids[r] || waitpid(pids[r], &st, WNOHANG) <= 0) continue;
            pids[r] = 0;
            left--;
            bool ok = (WIFEXITED(st) && !WEXITSTATUS(st)) ||
                      (r == victim && WIFSIGNALED(st) && WTERMSIG(st) == SIGKILL);
            if (ok) continue;
            if (WIFSIGNALED(st)) printf("FAIL rank %d died of signal %d\n", r, WTERMSIG(st));
            worst = std::max(worst, 1);
            world.sh->failed.v = 1;
            deadline = std::min(deadline, now() + 5);
        }
        if (left && now() > deadline) {
            if (!worst) printf("FAIL not finished after %.0f s\n", limit), worst = 124;
            for (pid_t pid : pids)
                if (pid) kill(pid, SIGKILL);
            deadline = now() + 1e6;
        }
        usleep(2000);
    }
    fflush(stdout);
    return worst;
}

inline void send_fd(int fd) {
    char byte = 1, room[CMSG_SPACE(sizeof(int))] = {};
    iovec io = {&byte, 1};
    msghdr m = {};
    m.msg_iov = &io, m.msg_iovlen = 1, m.msg_control = room, m.msg_controllen = sizeof room;
    cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET, h->cmsg_type = SCM_RIGHTS, h->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
    if (sendmsg(world.sock, &m, 0) != 1) die("sendmsg failed");
}

inline int recv_fd() {
    char byte, room[CMSG_SPACE(sizeof(int))] = {};
    iovec io = {&byte, 1};
    msghdr m = {};
    m.msg_iov = &io, m.msg_iovlen = 1, m.msg_control = room, m.msg_controllen = sizeof room;
    if (recvmsg(world.sock, &m, 0) != 1 || !CMSG_FIRSTHDR(&m)) die("recvmsg failed");
    int fd;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}

// ---------------------------------------------------------------- libraries

inline void *open_library(std::vector<std::string> names) {
    std::string why;
    for (auto &n : names) {
        if (n.empty()) continue;
        if (void *h = dlopen(n.c_str(), RTLD_NOW | RTLD_LOCAL)) return h;
        why += std::string("\n  ") + dlerror();
    }
    die("no library:%s", why.c_str());
}

inline void *symbol(void *lib, const char *name) {
    void *f = dlsym(lib, name);
    if (!f) die("%s is missing: %s", name, dlerror());
    return f;
}

// The CUDA driver's interface.
using Dptr = unsigned long long;
using Ctx = void *;
using Stream = void *;
using Event = void *;
using AllocHandle = unsigned long long;

struct MemLocation {
    int type, id;
};
struct MemProp {
    int type, handle_types;
    MemLocation location;
    void *win32;
    unsigned char compression, gdr;
    unsigned short usage;
    unsigned char reserved[4];
};
static_assert(sizeof(MemProp) == 32, "CUmemAllocationProp");
struct MemAccess {
    MemLocation location;
    int flags;
};
static_assert(sizeof(MemAccess) == 12, "CUmemAccessDesc");

#define DRIVER_CALLS(X)                                                                     \
    X(cuInit, "cuInit", unsigned)                                                           \
    X(cuDriverGetVersion, "cuDriverGetVersion", int *)                                      \
    X(cuGetErrorName, "cuGetErrorName", int, const char **)                                 \
    X(cuDeviceGet, "cuDeviceGet", int *, int)                                               \
    X(cuDeviceGetCount, "cuDeviceGetCount", int *)                                          \
    X(cuDeviceGetName, "cuDeviceGetName", char *, int, int)                                 \
    X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", int *, int, int)                      \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", Ctx *, int)                     \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", Ctx)                                              \
    X(cuCtxSynchronize, "cuCtxSynchronize")                                                 \
    X(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", int *, int *)             \
    X(cuMemAlloc, "cuMemAlloc_v2", Dptr *, size_t)                                          \
    X(cuMemFree, "cuMemFree_v2", Dptr)                                                      \
    X(cuMemHostAlloc, "cuMemHostAlloc", void **, size_t, unsigned)                          \
    X(cuMemsetD8, "cuMemsetD8_v2", Dptr, unsigned char, size_t)                             \
    X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", Dptr, const void *, size_t)                          \
    X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", void *, Dptr, size_t)                                \
    X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", Dptr, Dptr, size_t, Stream)                \
    X(cuStreamCreateWithPriority, "cuStreamCreateWithPriority", Stream *, unsigned, int)    \
    X(cuStreamSynchronize, "cuStreamSynchronize", Stream)                                   \
    X(cuStreamQuery, "cuStreamQuery", Stream)                                               \
    X(cuEventCreate, "cuEventCreate", Event *, unsigned)                                    \
    X(cuEventRecord, "cuEventRecord", Event, Stream)                                        \
    X(cuEventQuery, "cuEventQuery", Event)                                                  \
    X(cuEventSynchronize, "cuEventSynchronize", Event)                                      \
    X(cuEventElapsedTime, "cuEventElapsedTime", float *, Event, Event)                      \
    X(cuMemCreate, "cuMemCreate", AllocHandle *, size_t, const MemProp *, unsigned long long) \
    X(cuMemAddressReserve, "cuMemAddressReserve", Dptr *, size_t, size_t, Dptr, unsigned long long) \
    X(cuMemMap, "cuMemMap", Dptr, size_t, size_t, AllocHandle, unsigned long long)          \
    X(cuMemSetAccess, "cuMemSetAccess", Dptr, size_t, const MemAccess *, size_t)            \
    X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", void *, AllocHandle, int, unsigned long long) \
    X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", AllocHandle *, void *, int)

struct Driver {
#define X(name, sym, ...) int (*name)(__VA_ARGS__);
    DRIVER_CALLS(X)
#undef X
    void open() {
        void *lib = open_library({"libcuda.so.1"});
#define X(name, sym, ...) name = reinterpret_cast<decltype(name)>(symbol(lib, sym));
        DRIVER_CALLS(X)
#undef X
    }
};
inline Driver cu;

inline void cu_check(int rc, const char *what, int line) {
    if (rc == 0) return;
    const char *name = nullptr;
    cu.cuGetErrorName(rc, &name);
    die("line %d: %s -> %s (%d)", line, what, name ? name : "?", rc);
}
#define CU(call) cu_check(cu.call, #call, __LINE__)
constexpr int CUDA_NOT_READY = 600;

// NCCL's interface.
using Comm = void *;
struct UniqueId {
    char bytes[128];
};
enum Dtype { INT8 = 0, UINT8 = 1, INT32 = 2, INT64 = 4, FLOAT32 = 7 };
enum Red { SUM = 0, MAX = 2 };
constexpr int NCCL_REMOTE_ERROR = 6, NCCL_IN_PROGRESS = 7;

#define NCCL_CALLS(X)                                                               \
    X(ncclGetVersion, int *)                                                        \
    X(ncclGetUniqueId, UniqueId *)                                                  \
    X(ncclCommInitRank, Comm *, int, UniqueId, int)                                 \
    X(ncclCommDestroy, Comm)                                                        \
    X(ncclCommAbort, Comm)                                                          \
    X(ncclCommGetAsyncError, Comm, int *)                                           \
    X(ncclGroupStart)                                                               \
    X(ncclGroupEnd)                                                                 \
    X(ncclSend, const void *, size_t, int, int, Comm, Stream)                       \
    X(ncclRecv, void *, size_t, int, int, Comm, Stream)                             \
    X(ncclAllGather, const void *, void *, size_t, int, Comm, Stream)               \
    X(ncclReduceScatter, const void *, void *, size_t, int, int, Comm, Stream)      \
    X(ncclAllReduce, const void *, void *, size_t, int, int, Comm, Stream)          \
    X(ncclReduce, const void *, void *, size_t, int, int, int, Comm, Stream)        \
    X(ncclBroadcast, const void *, void *, size_t, int, int, Comm, Stream)          \
    X(ncclMemAlloc, void **, size_t)                                                \
    X(ncclMemFree, void *)                                                          \
    X(ncclCommRegister, Comm, void *, size_t, void **)                              \
    X(ncclCommDeregister, Comm, void *)

struct Nccl {
#define X(name, ...) int (*name)(__VA_ARGS__);
    NCCL_CALLS(X)
#undef X
    const char *(*error_string)(int);
    const char *(*last_error)(Comm);
    int version = 0;
    void open(const std::string &path) {
        void *lib = open_library({path});
#define X(name, ...) name = reinterpret_cast<decltype(name)>(symbol(lib, #name));
        NCCL_CALLS(X)
#undef X
        error_string = reinterpret_cast<decltype(error_string)>(symbol(lib, "ncclGetErrorString"));
        last_error = reinterpret_cast<decltype(last_error)>(symbol(lib, "ncclGetLastError"));
        ncclGetVersion(&version);
    }
    // 22809 -> "2.28.9"
    std::string version_text() const {
        char t[32];
        snprintf(t, sizeof t, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
        return t;
    }
};
inline Nccl nccl;

inline void nccl_check(int rc, const char *what, int line) {
    if (rc == 0) return;
    die("line %d: %s -> %s (%d): %s", line, what, nccl.error_string(rc), rc, nccl.last_error(nullptr));
}
#define NC(call) nccl_check(nccl.call, #call, __LINE__)

// One communicator over all ranks; `n` names the slot that carries its id and is used once.
inline Comm new_comm() {
    static int n = 0;
    char *where = world.sh->id[n++ % 64];
    UniqueId id;
    if (world.rank == 0) {
        NC(ncclGetUniqueId(&id));
        memcpy(where, id.bytes, sizeof id.bytes);
    }
    barrier();
    memcpy(id.bytes, where, sizeof id.bytes);
    Comm c;
    NC(ncclCommInitRank(&c, world.nranks, id, world.rank));
    return c;
}

// Takes GPU `rank` for this process.
inline void take_gpu() {
    cu.open();
    CU(cuInit(0));
    int count = 0, dev;
    CU(cuDeviceGetCount(&count));
    if (count < world.nranks) die("%d GPUs are needed, %d are visible", world.nranks, count);
    CU(cuDeviceGet(&dev, world.rank));
    Ctx ctx;
    CU(cuDevicePrimaryCtxRetain(&ctx, dev));
    CU(cuCtxSetCurrent(ctx));
}

// A non-blocking stream; `high`: of the greatest priority.
inline Stream new_stream(bool high) {
    int least, greatest;
    CU(cuCtxGetStreamPriorityRange(&least, &greatest));
    Stream s;
    CU(cuStreamCreateWithPriority(&s, 1, high ? greatest : least));
    return s;
}

// ---------------------------------------------------------------- buffers and patterns

// Device memory for NCCL: registered with `comm` (ncclMemAlloc) or plain (cuMemAlloc).
struct Buffer {
    Dptr ptr = 0;
    size_t size = 0;
    Comm comm = nullptr;
    void *reg = nullptr;
    void *at(size_t off = 0) const { return reinterpret_cast<void *>(ptr + off); }
    void make(size_t n, Comm registered_with) {
        size = n;
        comm = registered_with;
        if (!comm) return void(CU(cuMemAlloc(&ptr, n)));
        void *p;
        NC(ncclMemAlloc(&p, n));
        ptr = reinterpret_cast<Dptr>(p);
        NC(ncclCommRegister(comm, p, n, &reg));
    }
    void drop() {
        if (!ptr) return;
        if (!comm) {
            CU(cuMemFree(ptr));
        } else {
            NC(ncclCommDeregister(comm, reg));
            NC(ncclMemFree(at()));
        }
        ptr = 0;
    }
};

inline uint64_t pattern_word(uint64_t seed, uint64_t i) {
    uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull ^ seed * 0xBF58476D1CE4E5B9ull;
    x ^= x >> 29;
    x *= 0x94D049BB133111EBull;
    return x ^ (x >> 32);
}

// Page-locked memory through which patterns go to and from the GPU in pieces.
struct Window {
    static constexpr size_t SIZE = 32 << 20;
    char *want = nullptr, *got = nullptr;
    void make() {
        if (want) return;
        CU(cuMemHostAlloc(reinterpret_cast<void **>(&want), SIZE, 0));
        CU(cuMemHostAlloc(reinterpret_cast<void **>(&got), SIZE, 0));
    }
    void write_words(uint64_t seed, size_t off, size_t n) {
        uint64_t *w = reinterpret_cast<uint64_t *>(want);
        for (size_t i = 0; i < (n + 7) / 8; i++) w[i] = pattern_word(seed, off / 8 + i);
    }
};
inline Window window;

// Device bytes [p, p+n) become the pattern of `seed`.
inline void fill(Dptr p, size_t n, uint64_t seed) {
    window.make();
    for (size_t off = 0; off < n; off += Window::SIZE) {
        size_t piece = std::min(n - off, Window::SIZE);
        window.write_words(seed, off, piece);
        CU(cuMemcpyHtoD(p + off, window.want, piece));
    }
}

// How many of the device bytes [p, p+n) differ from the pattern of `seed`.
inline size_t wrong_bytes(Dptr p, size_t n, uint64_t seed) {
    window.make();
    size_t wrong = 0;
    for (size_t off = 0; off < n; off += Window::SIZE) {
        size_t piece = std::min(n - off, Window::SIZE);
        window.write_words(seed, off, piece);
        CU(cuMemcpyDtoH(window.got, p + off, piece));
        if (memcmp(window.want, window.got, piece) == 0) continue;
        for (size_t i = 0; i < piece; i++) wrong += window.want[i] != window.got[i];
    }
    return wrong;
}

// ---------------------------------------------------------------- small tools

// "64K", "4M", "1G" or bytes.
inline size_t parse_size(const std::string &s) {
    char *end;
    double v = strtod(s.c_str(), &end);
    switch (*end) {
        case 'k': case 'K': v *= 1 << 10; break;
        case 'm': case 'M': v *= 1 << 20; break;
        case 'g': case 'G': v *= 1 << 30; break;
        case 0: break;
        default: fprintf(stderr, "not a size: %s\n", s.c_str()); exit(2);
    }
    return static_cast<size_t>(v);
}

inline std::vector<std::string> split(const std::string &s, char by = ',') {
    std::vector<std::string> out;
    size_t from = 0;
    while (from <= s.size()) {
        size_t to = std::min(s.find(by, from), s.size());
        if (to > from) out.push_back(s.substr(from, to - from));
        from = to + 1;
    }
    return out;
}

inline double median(std::vector<double> v) {
    if (v.empty()) return 0;
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}
