// Times NCCL operations between two processes with one GPU each, the way nccl-tests does: a warm-up, then
// iterations enqueued back to back and averaged, the median of several repeats. Values are checked before
// and after. Any NCCL release can be run: the library is opened by path and needs no header. The `push`
// operation needs no NCCL: it is the bare peer copy, both directions at the same time, to compare with.
//
// With --gemm N, every operation is run beside a loop of bf16 matrix products of N^3 instead, and both
// slow-downs are measured.
//
// Sizes mean what they mean in nccl-tests: the bytes sent for sendrecv and push, the whole buffer of a
// rank for alltoall and allgather (both in place).
#include "gpu.hpp"

static const char *USAGE =
    "usage: nccl_bench [--nccl FILE] [--ops sendrecv,alltoall,allgather,push] [--sizes 64K,4M,...]\n"
    "                  [--reg 0|1|0,1] [--repeat N] [--warmup N] [--iters N] [--budget MILLISECONDS]\n"
    "                  [--gemm N [--gemm-count N] [--cublas FILE]] [--label TEXT] [--limit SECONDS]\n"
    "rows: bench,label,op,size,reg,iters,time_us,min_us,max_us,sync_us,algbw,busbw,wrong\n"
    "      gemm,label,op,size,reg,gemm_alone_ms,gemm_beside_ms,slower_pct,round_alone_us,round_beside_us,busbw_beside\n";

struct Options {
    std::string nccl = "libnccl.so.2", cublas, label = "-";
    std::vector<std::string> ops = {"sendrecv"};
    std::vector<size_t> sizes = {64 << 10, 4 << 20, 32 << 20, 256 << 20};
    std::vector<int> regs = {0};
    int repeat = 5, warmup = 5, iters = 0, gemm = 0, gemm_count = 100;
    double budget = 0.06, limit = 120;
};
static Options opt;

struct Bench {
    Comm comm = nullptr;
    Stream stream = nullptr;
    Buffer send, recv;
    Dptr push_src = 0, push_local = 0, push_remote = 0;
};
static Bench b;

static double busbw_factor(const std::string &op) {
    return op == "alltoall" || op == "allgather" ? (world.nranks - 1.0) / world.nranks : 1.0;
}

static Dptr map_allocation(AllocHandle h, size_t size) {
    Dptr p;
    CU(cuMemAddressReserve(&p, size, 0, 0, 0));
    CU(cuMemMap(p, size, 0, h, 0));
    MemAccess access = {{1 /* device */, world.rank}, 3 /* read and write */};
    CU(cuMemSetAccess(p, size, &access, 1));
    return p;
}

// A destination in this GPU that the peer has mapped, and a mapping of the peer's.
static void make_push_buffers(size_t size) {
    size = (size + (2 << 20) - 1) & ~size_t((2 << 20) - 1);
    MemProp prop = {};
    prop.type = 1;          // pinned
    prop.handle_types = 1;  // POSIX file descriptor
    prop.location = {1, world.rank};
    AllocHandle mine, src, theirs;
    CU(cuMemCreate(&mine, size, &prop, 0));
    CU(cuMemCreate(&src, size, &prop, 0));
    b.push_local = map_allocation(mine, size);
    b.push_src = map_allocation(src, size);
    int fd = -1;
    CU(cuMemExportToShareableHandle(&fd, mine, 1, 0));
    send_fd(fd);
    int peer_fd = recv_fd();
    CU(cuMemImportFromShareableHandle(&theirs, reinterpret_cast<void *>(static_cast<intptr_t>(peer_fd)), 1));
    b.push_remote = map_allocation(theirs, size);
    close(fd);
    close(peer_fd);
}

static void enqueue(const std::string &op, size_t size) {
    int peer = 1 - world.rank;
    size_t part = size / world.nranks;
    if (op == "push") {
        CU(cuMemcpyDtoDAsync(b.push_remote, b.push_src, size, b.stream));
    } else if (op == "sendrecv") {
        NC(ncclGroupStart());
        NC(ncclSend(b.send.at(), size, INT8, peer, b.comm, b.stream));
        NC(ncclRecv(b.recv.at(), size, INT8, peer, b.comm, b.stream));
        NC(ncclGroupEnd());
    } else if (op == "alltoall" || op == "alltoall-out") {
        Buffer &from = op == "alltoall" ? b.recv : b.send;
        NC(ncclGroupStart());
        for (int r = 0; r < world.nranks; r++) {
            NC(ncclSend(from.at(r * part), part, INT8, r, b.comm, b.stream));
            NC(ncclRecv(b.recv.at(r * part), part, INT8, r, b.comm, b.stream));
        }
        NC(ncclGroupEnd());
    } else if (op == "allgather") {
        NC(ncclAllGather(b.recv.at(world.rank * part), b.recv.at(), part, INT8, b.comm, b.stream));
    } else {
        die("unknown operation %s", op.c_str());
    }
}

// Runs the operation `times` times on fresh values and returns how many bytes came out wrong. An
// alltoall in place overwrites what the peer still reads, so its values are checked out of place.
static size_t check(const std::string &op, size_t size, int times) {
    static uint64_t round = 0;
    uint64_t seed = ++round * 100 + 1;
    int peer = 1 - world.rank;
    size_t part = size / world.nranks;
    auto of = [&](int rank, int block) { return seed + rank * 10 + block; };
    Dptr out = op == "push" ? b.push_local : b.recv.ptr;
    CU(cuMemsetD8(out, 0xA5, size));
    if (op == "push") fill(b.push_src, size, of(world.rank, 0));
    if (op == "sendrecv") fill(b.send.ptr, size, of(world.rank, 0));
    if (op == "alltoall")
        for (int r = 0; r < world.nranks; r++) fill(b.send.ptr + r * part, part, of(world.rank, r));
    if (op == "allgather") fill(out + world.rank * part, part, of(world.rank, 0));
    CU(cuCtxSynchronize());
    barrier();
    for (int i = 0; i < times; i++) enqueue(op == "alltoall" ? "alltoall-out" : op, size);
    CU(cuStreamSynchronize(b.stream));
    barrier();
    size_t wrong = 0;
    if (op == "push" || op == "sendrecv") wrong = wrong_bytes(out, size, of(peer, 0));
    else
        for (int r = 0; r < world.nranks; r++)
            wrong += wrong_bytes(out + r * part, part, op == "alltoall" ? of(r, world.rank) : of(r, 0));
    return static_cast<size_t>(mean_over_ranks(static_cast<double>(wrong)) * world.nranks);
}

static double timed(const std::string &op, size_t size, int iters) {
    barrier();
    double t = now();
    for (int i = 0; i < iters; i++) enqueue(op, size);
    CU(cuStreamSynchronize(b.stream));
    return (now() - t) / iters;
}

static void bench(const std::string &op, size_t size, int reg) {
    size_t wrong = check(op, size, 1);
    double estimate = timed(op, size, opt.warmup);
    int iters = opt.iters ? opt.iters
                          : static_cast<int>(from_root(std::clamp(opt.budget / std::max(estimate, 1e-6), 8.0, 500.0)));
    std::vector<double> t;
    for (int i = 0; i < opt.repeat; i++) t.push_back(mean_over_ranks(timed(op, size, iters)));
    // One at a time, waited for on the host: what a caller that needs the result at once sees.
    std::vector<double> each;
    int singles = static_cast<int>(from_root(std::clamp(opt.budget / std::max(estimate, 1e-6), 10.0, 100.0)));
    for (int i = 0; i < singles; i++) each.push_back(timed(op, size, 1));
    double sync = mean_over_ranks(median(each));
    if (size < (512u << 20)) wrong += check(op, size, 2);
    if (world.rank) return;
    double mid = median(t);
    printf("bench,%s,%s,%zu,%d,%d,%.2f,%.2f,%.2f,%.2f,%.2f,%.2f,%zu\n", opt.label.c_str(), op.c_str(), size, reg, iters,
           mid * 1e6, *std::min_element(t.begin(), t.end()) * 1e6, *std::max_element(t.begin(), t.end()) * 1e6,
           sync * 1e6, size / mid / 1e9, size / mid / 1e9 * busbw_factor(op), wrong);
    fflush(stdout);
}

// ---------------------------------------------------------------- matrix products beside it

struct Gemm {
    int (*create)(void **);
    int (*set_stream)(void *, Stream);
    int (*gemm_ex)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int, int,
                   const void *, void *, int, int, int, int);
    void *handle = nullptr;
    Stream stream = nullptr;
    Dptr a = 0, b = 0, c = 0;
    Event begin = nullptr, end = nullptr;
    int n = 0;

    void make(int size) {
        n = size;
        std::vector<std::string> names = {opt.cublas, "libcublas.so.13", "libcublas.so.12", "libcublas.so"};
        if (size_t slash = opt.cublas.rfind('/'); slash != std::string::npos) {
            std::string lt = opt.cublas;
            lt.replace(slash, 10, "/libcublasLt");
            dlopen(lt.c_str(), RTLD_NOW | RTLD_GLOBAL);
        }
        void *lib = open_library(names);
        create = reinterpret_cast<decltype(create)>(symbol(lib, "cublasCreate_v2"));
        set_stream = reinterpret_cast<decltype(set_stream)>(symbol(lib, "cublasSetStream_v2"));
        gemm_ex = reinterpret_cast<decltype(gemm_ex)>(symbol(lib, "cublasGemmEx"));
        if (create(&handle)) die("cublasCreate failed");
        stream = new_stream(false);
        if (set_stream(handle, stream)) die("cublasSetStream failed");
        CU(cuEventCreate(&begin, 0));
        CU(cuEventCreate(&end, 0));
        size_t bytes = size_t(n) * n * 2;
        std::vector<uint16_t> h(size_t(n) * n);
        uint64_t x = 88172645463325252ull;
        for (auto &v : h) {  // bf16 of magnitude 0.5 to 2, either sign
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            v = 0x3f00 | (x & 0x80ff);
        }
        for (Dptr *p : {&a, &b, &c}) {
            CU(cuMemAlloc(p, bytes));
            CU(cuMemcpyHtoD(*p, h.data(), bytes));
        }
        run(20);
        CU(cuStreamSynchronize(stream));
    }

    void run(int count) {
        float one = 1, zero = 0;
        for (int i = 0; i < count; i++) {
            // 0, 1: as is, transposed; 14: bf16; 68: sums in fp32; -1: cuBLAS chooses
            int rc = gemm_ex(handle, 0, 1, n, n, n, &one, reinterpret_cast<void *>(a), 14, n, reinterpret_cast<void *>(b),
                             14, n, &zero, reinterpret_cast<void *>(c), 14, n, 68, -1);
            if (rc) die("cublasGemmEx -> %d", rc);
        }
    }

    void enqueue(int count) {
        CU(cuEventRecord(begin, stream));
        run(count);
        CU(cuEventRecord(end, stream));
    }

    double seconds_each(int count) {
        float ms = 0;
        CU(cuEventSynchronize(end));
        CU(cuEventElapsedTime(&ms, begin, end));
        return ms * 1e-3 / count;
    }
};
static Gemm gemm;

static void beside_gemm(const std::string &op, size_t size, int reg) {
    std::vector<double> alone, beside, slower, rounds_alone, rounds_beside;
    Shared *sh = world.sh;
    for (int i = 0; i < opt.warmup; i++) timed(op, size, 1);
    for (int rep = 0; rep < std::max(1, opt.repeat); rep++) {
        std::vector<double> each;
        for (int i = 0; i < 20; i++) each.push_back(timed(op, size, 1));
        rounds_alone.push_back(mean_over_ranks(median(each)));

        barrier();
        gemm.enqueue(opt.gemm_count);
        double g0 = mean_over_ranks(gemm.seconds_each(opt.gemm_count));

        if (world.rank == 0) {
            sh->go.v = 0;
            for (auto &d : sh->done) d.v = 0;
        }
        barrier();
        gemm.enqueue(opt.gemm_count);
        double t0 = now(), mine = 0;
        long rounds = 0, mine_rounds = 0;
        // Rank 0 lets each round begin, until the products of all ranks are finished.
        for (;; rounds++) {
            bool stop = false;
            if (world.rank == 0) {
                stop = sh->done[0].v && sh->done[1].v;
                sh->go.v = stop ? -1 - rounds : rounds + 1;
            } else {
                for (long go = 0; go <= rounds && go >= 0;) {
                    go = sh->go.v.load(std::memory_order_acquire);
                    stop = go == -1 - rounds;
                    if (sh->failed.v) _exit(1);
                }
            }
            if (stop) break;
            enqueue(op, size);
            CU(cuStreamSynchronize(b.stream));
            if (!mine_rounds) {
                int q = cu.cuEventQuery(gemm.end);
                if (q == CUDA_NOT_READY) continue;
                if (q) cu_check(q, "cuEventQuery", __LINE__);
                mine_rounds = rounds + 1;
                mine = now() - t0;
                sh->done[world.rank].v = 1;
            }
        }
        double g1 = mean_over_ranks(gemm.seconds_each(opt.gemm_count));
        alone.push_back(g0);
        beside.push_back(g1);
        slower.push_back(g1 / g0 - 1);
        rounds_beside.push_back(mean_over_ranks(mine / mine_rounds));
        barrier();
    }
    if (world.rank) return;
    double r = median(rounds_beside);
    printf("gemm,%s,%s,%zu,%d,%.4f,%.4f,%.2f,%.2f,%.2f,%.2f\n", opt.label.c_str(), op.c_str(), size, reg, median(alone) * 1e3,
           median(beside) * 1e3, median(slower) * 100, median(rounds_alone) * 1e6, r * 1e6,
           size / r / 1e9 * busbw_factor(op));
    fflush(stdout);
}

// ---------------------------------------------------------------- main

static int rank_main() {
    bool needs_nccl = false, needs_push = false;
    for (auto &op : opt.ops) (op == "push" ? needs_push : needs_nccl) = true;
    take_gpu();
    b.stream = new_stream(true);
    size_t largest = *std::max_element(opt.sizes.begin(), opt.sizes.end());
    if (needs_nccl) {
        nccl.open(opt.nccl);
        b.comm = new_comm();
    }
    if (needs_push) make_push_buffers(largest);
    if (opt.gemm) gemm.make(opt.gemm);
    if (world.rank == 0) {
        int driver = 0;
        char name[128] = "?";
        CU(cuDriverGetVersion(&driver));
        CU(cuDeviceGetName(name, sizeof name, 0));
        printf("# gpu %s; cuda driver %d; nccl %s\n", name, driver, needs_nccl ? nccl.version_text().c_str() : "-");
    }
    auto each = [&](const std::string &op, int reg) {
        for (size_t size : opt.sizes) {
            if (op != "sendrecv" && op != "push" && size % world.nranks) continue;
            opt.gemm ? beside_gemm(op, size, reg) : bench(op, size, reg);
        }
    };
    if (needs_push) each("push", 0);
    for (int reg : opt.regs) {
        if (!needs_nccl) break;
        b.send.make(largest, reg ? b.comm : nullptr);
        b.recv.make(largest, reg ? b.comm : nullptr);
        for (auto &op : opt.ops)
            if (op != "push") each(op, reg);
        barrier();
        b.send.drop();
        b.recv.drop();
    }
    barrier();
    if (needs_nccl) NC(ncclCommDestroy(b.comm));
    return 0;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        std::string key = argv[i];
        if (key == "--help" || key == "-h") return fputs(USAGE, stdout), 0;
        if (i + 1 == argc) return fprintf(stderr, "%s needs a value\n%s", argv[i], USAGE), 2;
        std::string v = argv[++i];
        if (key == "--nccl") opt.nccl = v;
        else if (key == "--cublas") opt.cublas = v;
        else if (key == "--label") opt.label = v;
        else if (key == "--ops") opt.ops = split(v);
        else if (key == "--sizes") {
            opt.sizes.clear();
            for (auto &s : split(v)) opt.sizes.push_back(parse_size(s));
        } else if (key == "--reg") {
            opt.regs.clear();
            for (auto &s : split(v)) opt.regs.push_back(atoi(s.c_str()));
        } else if (key == "--repeat") opt.repeat = atoi(v.c_str());
        else if (key == "--warmup") opt.warmup = std::max(1, atoi(v.c_str()));
        else if (key == "--iters") opt.iters = atoi(v.c_str());
        else if (key == "--budget") opt.budget = atof(v.c_str()) * 1e-3;
        else if (key == "--gemm") opt.gemm = atoi(v.c_str());
        else if (key == "--gemm-count") opt.gemm_count = atoi(v.c_str());
        else if (key == "--limit") opt.limit = atof(v.c_str());
        else return fprintf(stderr, "unknown option %s\n%s", argv[i - 1], USAGE), 2;
    }
    if (opt.ops.empty() || opt.sizes.empty()) return fputs(USAGE, stderr), 2;
    return run_ranks(2, opt.limit, -1, rank_main);
}
