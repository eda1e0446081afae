// Two processes, one GPU each, run any NCCL release through its operations with every value checked; then
// several communicators at once, communicators made and destroyed in a loop, and a peer killed in the
// middle of its traffic. Prints one line per check: PASS or FAIL. NCCL is opened by path.
#include <thread>

#include "gpu.hpp"

static const char *USAGE =
    "usage: nccl_smoke [--nccl FILE] [--reg 0|1] [--checks ops,comms,cycles,kill] [--cycles N] [--label TEXT]\n"
    "                  [--sizes 1,7,4099,1048581,64M] [--limit SECONDS]\n";

struct Options {
    std::string nccl = "libnccl.so.2", label = "smoke";
    std::vector<std::string> checks = {"ops", "comms", "cycles"};
    std::vector<size_t> sizes = {1, 7, 4099, (1 << 20) + 5, (8 << 20) + 1, 64 << 20};
    int reg = 0, cycles = 10;
    double limit = 90;
};
static Options opt;
static uint64_t seed_round = 0;

// One line per check, from rank 0, once all ranks have counted their wrong values.
static void report(const char *name, size_t wrong, int cases, double since) {
    double total = mean_over_ranks(static_cast<double>(wrong)) * world.nranks;
    if (total != 0) world.sh->done[world.rank].v = 1;
    if (world.rank) return;
    printf("%s %s/%s reg=%d: %d cases, %.0f wrong, %.1f s\n", total == 0 ? "PASS" : "FAIL", opt.label.c_str(), name, opt.reg,
           cases, total, now() - since);
    fflush(stdout);
}

struct Pair {
    Comm comm;
    Stream stream;
    Buffer in, out;
    void make(Comm c, size_t size) {
        comm = c;
        stream = new_stream(false);
        in.make(size, opt.reg ? c : nullptr);
        out.make(size, opt.reg ? c : nullptr);
    }
    void drop() {
        in.drop();
        out.drop();
    }
};

constexpr size_t GUARD = 256;

static void poison(const Buffer &x) { CU(cuMemsetD8(x.ptr, 0xA5, x.size)); }

// Bytes after `n` that no longer hold the poison.
static size_t overrun(const Buffer &x, size_t n) {
    char after[GUARD];
    size_t len = std::min(GUARD, x.size - n), bad = 0;
    CU(cuMemcpyDtoH(after, x.ptr + n, len));
    for (size_t i = 0; i < len; i++) bad += static_cast<unsigned char>(after[i]) != 0xA5;
    return bad;
}

static void wait_for(Pair &p) {
    CU(cuStreamSynchronize(p.stream));
    int async = 0;
    NC(ncclCommGetAsyncError(p.comm, &async));
    if (async) die("asynchronous error %d: %s", async, nccl.error_string(async));
}

template <class T>
static T element(uint64_t seed, size_t i) {
    return static_cast<T>(pattern_word(seed, i) % 1000);
}

// Both ranks' inputs are small integers, so sums are exact in every type.
template <class T>
static size_t reductions(Pair &p, size_t n, int dtype) {
    size_t wrong = 0;
    std::vector<T> h(n);
    for (int kind = 0; kind < 3; kind++) {  // allreduce sum, reducescatter sum, allreduce max
        size_t part = kind == 1 ? n / world.nranks : n, from = kind == 1 ? part * world.rank : 0;
        if (part == 0) continue;
        uint64_t seed = ++seed_round * 100;
        for (size_t i = 0; i < n; i++) h[i] = element<T>(seed + world.rank, i);
        CU(cuMemcpyHtoD(p.in.ptr, h.data(), n * sizeof(T)));
        poison(p.out);
        CU(cuCtxSynchronize());
        if (kind == 1) NC(ncclReduceScatter(p.in.at(), p.out.at(), part, dtype, SUM, p.comm, p.stream));
        else NC(ncclAllReduce(p.in.at(), p.out.at(), n, dtype, kind == 0 ? SUM : MAX, p.comm, p.stream));
        wait_for(p);
        CU(cuMemcpyDtoH(h.data(), p.out.ptr, part * sizeof(T)));
        for (size_t i = 0; i < part; i++) {
            T a = element<T>(seed, from + i), c = element<T>(seed + 1, from + i);
            wrong += h[i] != (kind == 2 ? std::max(a, c) : static_cast<T>(a + c));
        }
        wrong += overrun(p.out, part * sizeof(T));
        barrier();
    }
    return wrong;
}

// One operation that only moves bytes; `n` bytes to each peer.
static size_t movement(Pair &p, int op, size_t n) {
    int me = world.rank, peer = 1 - me;
    uint64_t seed = ++seed_round * 100;
    auto of = [&](int rank, int block) { return seed + rank * 10 + block; };
    poison(p.out);
    size_t wrong = 0;
    int both = world.nranks;
    switch (op) {
        case 0:  // both directions at once
        case 1:  // 0 to 1, then 1 to 0
        case 2:  // the same, the receiver late
            fill(p.in.ptr, n, of(me, 0));
            CU(cuCtxSynchronize());
            barrier();
            if (op == 0) {
                NC(ncclGroupStart());
                NC(ncclSend(p.in.at(), n, INT8, peer, p.comm, p.stream));
                NC(ncclRecv(p.out.at(), n, INT8, peer, p.comm, p.stream));
                NC(ncclGroupEnd());
            } else {
                for (int from = 0; from < 2; from++) {
                    if (op == 2 && me != from) usleep(30000);
                    if (me == from) NC(ncclSend(p.in.at(), n, INT8, peer, p.comm, p.stream));
                    else NC(ncclRecv(p.out.at(), n, INT8, peer, p.comm, p.stream));
                }
            }
            wait_for(p);
            wrong = wrong_bytes(p.out.ptr, n, of(peer, 0)) + overrun(p.out, n);
            break;
        case 3:  // alltoall
            for (int r = 0; r < both; r++) fill(p.in.ptr + r * n, n, of(me, r));
            CU(cuCtxSynchronize());
            NC(ncclGroupStart());
            for (int r = 0; r < both; r++) {
                NC(ncclSend(p.in.at(r * n), n, INT8, r, p.comm, p.stream));
                NC(ncclRecv(p.out.at(r * n), n, INT8, r, p.comm, p.stream));
            }
            NC(ncclGroupEnd());
            wait_for(p);
            for (int r = 0; r < both; r++) wrong += wrong_bytes(p.out.ptr + r * n, n, of(r, me));
            wrong += overrun(p.out, both * n);
            break;
        case 4:  // allgather
        case 5:  // allgather in place
            if (op == 5) fill(p.out.ptr + me * n, n, of(me, 0));
            else fill(p.in.ptr, n, of(me, 0));
            CU(cuCtxSynchronize());
            NC(ncclAllGather(op == 5 ? p.out.at(me * n) : p.in.at(), p.out.at(), n, INT8, p.comm, p.stream));
            wait_for(p);
            for (int r = 0; r < both; r++) wrong += wrong_bytes(p.out.ptr + r * n, n, of(r, 0));
            wrong += overrun(p.out, both * n);
            break;
        case 6:  // broadcast, root 0
        case 7:  // broadcast, root 1
            fill(p.in.ptr, n, of(me, 0));
            CU(cuCtxSynchronize());
            NC(ncclBroadcast(p.in.at(), p.out.at(), n, INT8, op - 6, p.comm, p.stream));
            wait_for(p);
            wrong = wrong_bytes(p.out.ptr, n, of(op - 6, 0)) + overrun(p.out, n);
            break;
    }
    barrier();
    return wrong;
}
static const char *MOVES[] = {"sendrecv", "one-way", "late-receiver", "alltoall", "allgather", "allgather-in-place",
                              "broadcast-0", "broadcast-1"};

static size_t largest() { return *std::max_element(opt.sizes.begin(), opt.sizes.end()); }

static void check_ops() {
    Pair p;
    // Room for two blocks, and for the reductions' widest elements.
    p.make(new_comm(), std::max(2 * largest(), 8 * std::min(largest(), size_t(4) << 20)) + GUARD);
    for (int op = 0; op < 8; op++) {
        double t = now();
        size_t wrong = 0;
        for (size_t n : opt.sizes) wrong += movement(p, op, n);
        report(MOVES[op], wrong, static_cast<int>(opt.sizes.size()), t);
    }
    double t = now();
    size_t wrong = 0;
    int cases = 0;
    for (size_t n : opt.sizes) {
        n = std::min(n, size_t(4) << 20);
        wrong += reductions<float>(p, n, FLOAT32) + reductions<int32_t>(p, n, INT32) + reductions<int64_t>(p, n, INT64);
        cases += 9;
    }
    report("reductions", wrong, cases, t);
    p.drop();
    NC(ncclCommDestroy(p.comm));
}

// Four communicators; their operations alternate and overlap, each on its own stream.
static void check_comms() {
    constexpr int N = 4;
    size_t n = (6 << 20) + 3, wrong = 0;
    double t = now();
    Pair p[N];
    for (auto &x : p) x.make(new_comm(), 2 * n + GUARD);
    for (int round = 0; round < 5; round++) {
        uint64_t seed = ++seed_round * 100;
        for (int i = 0; i < N; i++) {
            poison(p[i].out);
            fill(p[i].in.ptr, n, seed + 10 * i + world.rank);
        }
        CU(cuCtxSynchronize());
        barrier();
        for (int i = 0; i < N; i++) {
            if ((i + round) % 2) {
                NC(ncclAllGather(p[i].in.at(), p[i].out.at(), n, INT8, p[i].comm, p[i].stream));
            } else {
                NC(ncclGroupStart());
                NC(ncclSend(p[i].in.at(), n, INT8, 1 - world.rank, p[i].comm, p[i].stream));
                NC(ncclRecv(p[i].out.at(n), n, INT8, 1 - world.rank, p[i].comm, p[i].stream));
                NC(ncclGroupEnd());
            }
        }
        for (int i = 0; i < N; i++) {
            wait_for(p[i]);
            int peer = 1 - world.rank;
            size_t at = (i + round) % 2 ? peer * n : n;
            wrong += wrong_bytes(p[i].out.ptr + at, n, seed + 10 * i + peer) + overrun(p[i].out, 2 * n);
        }
        barrier();
    }
    report("communicators", wrong, 5 * N, t);
    for (auto &x : p) {
        x.drop();
        NC(ncclCommDestroy(x.comm));
    }
}

static void check_cycles() {
    double t = now();
    size_t wrong = 0;
    for (int i = 0; i < opt.cycles; i++) {
        Pair p;
        p.make(new_comm(), (2 << 20) + GUARD);
        wrong += movement(p, 0, (1 << 20) + i) + movement(p, 4, 1 << 16);
        p.drop();
        barrier();
        NC(ncclCommDestroy(p.comm));
    }
    report("init-and-destroy", wrong, opt.cycles, t);
}

// Rank 1 dies in the middle of its traffic. Rank 0 must learn of it within 5 s and get rid of the communicator.
static void check_kill() {
    size_t n = 256 << 20;
    Pair p;
    p.make(new_comm(), n);
    auto traffic = [&] {
        NC(ncclGroupStart());
        NC(ncclSend(p.in.at(), n, INT8, 1 - world.rank, p.comm, p.stream));
        NC(ncclRecv(p.out.at(), n, INT8, 1 - world.rank, p.comm, p.stream));
        NC(ncclGroupEnd());
    };
    for (int i = 0; i < 3; i++) traffic();
    wait_for(p);
    barrier();
    for (int i = 0; i < 60; i++) traffic();
    if (world.rank == 1) {
        usleep(10000);
        world.sh->slot[1][0] = now();
        kill(getpid(), SIGKILL);
    }
    int error = 0;
    double start = now();
    while (now() - start < 30) {
        if (nccl.ncclCommGetAsyncError(p.comm, &error) == 0 && error && error != NCCL_IN_PROGRESS) break;
        if (cu.cuStreamQuery(p.stream) == 0) break;
        usleep(1000);
    }
    double noticed = world.sh->slot[1][0] > 0 ? now() - world.sh->slot[1][0] : -1;
    double t = now();
    std::atomic<bool> gone{false};
    std::thread aborter([&] {
        nccl.ncclCommAbort(p.comm);
        gone = true;
    });
    while (!gone && now() - t < 20) usleep(1000);
    double aborting = now() - t;
    bool idle = false;
    while (gone && !(idle = cu.cuStreamQuery(p.stream) != CUDA_NOT_READY) && now() - t < 25) usleep(1000);
    bool ok = error == NCCL_REMOTE_ERROR && noticed >= 0 && noticed < 5 && gone && aborting < 10 && idle;
    printf("%s %s/peer-killed reg=%d: error %d (%s) after %.2f s, abort %s in %.2f s, stream %s\n", ok ? "PASS" : "FAIL",
           opt.label.c_str(), opt.reg, error, nccl.error_string(error), noticed, gone ? "done" : "NOT done", aborting,
           idle ? "idle" : "still busy");
    fflush(stdout);
    _exit(ok ? 0 : 1);
}

static int rank_main() {
    take_gpu();
    nccl.open(opt.nccl);
    if (world.rank == 0) printf("# nccl %s\n", nccl.version_text().c_str()), fflush(stdout);
    for (auto &c : opt.checks) {
        if (c == "ops") check_ops();
        else if (c == "comms") check_comms();
        else if (c == "cycles") check_cycles();
        else if (c == "kill") check_kill();
        else die("unknown check %s", c.c_str());
    }
    barrier();
    return world.sh->done[world.rank].v ? 1 : 0;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        std::string key = argv[i];
        if (key == "--help" || key == "-h") return fputs(USAGE, stdout), 0;
        if (i + 1 == argc) return fprintf(stderr, "%s needs a value\n%s", argv[i], USAGE), 2;
        std::string v = argv[++i];
        if (key == "--nccl") opt.nccl = v;
        else if (key == "--label") opt.label = v;
        else if (key == "--reg") opt.reg = atoi(v.c_str());
        else if (key == "--checks") opt.checks = split(v);
        else if (key == "--cycles") opt.cycles = std::min(40, atoi(v.c_str()));
        else if (key == "--limit") opt.limit = atof(v.c_str());
        else if (key == "--sizes") {
            opt.sizes.clear();
            for (auto &s : split(v)) opt.sizes.push_back(parse_size(s));
        } else return fprintf(stderr, "unknown option %s\n%s", argv[i - 1], USAGE), 2;
    }
    if (opt.sizes.empty()) return fputs(USAGE, stderr), 2;
    bool kill_check = std::find(opt.checks.begin(), opt.checks.end(), "kill") != opt.checks.end();
    return run_ranks(2, opt.limit, kill_check ? 1 : -1, rank_main);
}
