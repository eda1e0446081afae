#!/usr/bin/env python3
"""Stock NCCL through PyTorch in two processes, one GPU each, every value checked on the GPU.

usage: torch_suite.py [--scenarios a,b] [--core] [--net NAME] [--out DIR] [--preload LIBNCCL] [--limit SECONDS]
       torch_suite.py --device cpu            (gloo: runs the checks themselves, with no GPU and no NCCL)

The environment decides what NCCL loads (recipe.env); the suite adds NCCL's log and reads in it which path
the traffic took. It prints one line per group of checks: PASS, FAIL or SKIP. Exits 1 if one failed.

scenarios: plain        every operation, size and type; buffers from cudaMalloc
           expandable   the same from expandable segments
           hook         the same, registered (TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1)
           mempool      registered memory of ncclMemAlloc (MemPool and register_mem_pool)
           comms        several process groups, their operations interleaved and overlapping
           graphs       collectives and send/recv captured in CUDA graphs, replayed on fresh values
           cycles       init and destroy 20 times; nothing may be left behind
           abort        the peer is killed in mid-traffic; PyTorch's watchdog must end the survivor
           abort-api    the same, and the survivor aborts by itself and lives on
           abort-alone  abort with an operation pending that the peer never joins
"""
import argparse
import ctypes
import datetime
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
WORLD = 2
MIB = 1 << 20

# name -> (seconds, environment, log must prove registration, runs on the CPU too)
SCENARIOS = {
    "plain": (110, {}, False, True),
    "expandable": (110, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False, False),
    "hook": (110, {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}, True, False),
    "mempool": (90, {}, True, False),
    "comms": (60, {}, False, True),
    "graphs": (80, {}, False, False),
    "cycles": (90, {}, False, True),
    # The watchdog shall end the process at once, not after it has written flight records for a minute.
    "abort": (60, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ENABLE_MONITORING": "0",
                  "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}, False, False),
    "abort-api": (70, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, False, False),
    "held": (60, {}, False, False),
    "abort-alone": (60, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, False, False),
}
CORE = ["plain", "hook"]

# One thread of each block counts the block in and polls the flag; the others wait for it.
HOLD = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry hold(.param .u64 flag, .param .u64 count)
{
    .reg .u64 %rd<3>;
    .reg .u32 %r<4>;
    .reg .pred %p<3>;
    ld.param.u64 %rd1, [flag];
    ld.param.u64 %rd2, [count];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    atom.global.add.u32 %r2, [%rd2], 1;
AGAIN:
    nanosleep.u32 200;
    ld.volatile.global.u32 %r3, [%rd1];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra AGAIN;
DONE:
    bar.sync 0;
    ret;
}
\0"""


# ---------------------------------------------------------------- one rank

class Rank:
    """One worker process: its device, its groups, and where its results go."""

    def __init__(self, args):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.args = torch, dist, args
        self.rank, self.peer = args.rank, 1 - args.rank
        self.cuda = args.device == "cuda"
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.results = open(args.results, "a", buffering=1)
        self.seed = 0
        self.salt = args.salt
        self.arena = None
        self.inits = 0

    def say(self, **what):
        self.results.write(json.dumps(what) + "\n")

    def init(self, bind=True):
        self.inits += 1
        kw = {"device_id": self.device} if self.cuda and bind else {}
        self.dist.init_process_group(
            "nccl" if self.cuda else "gloo", init_method=f"file://{self.args.rdzv}.{self.inits}", rank=self.rank,
            world_size=WORLD, timeout=datetime.timedelta(seconds=45), **kw)

    def close(self):
        self.arena = None
        self.dist.destroy_process_group()

    def sync(self):
        if self.cuda:
            self.torch.cuda.synchronize()

    def group(self, name, cases):
        """Runs `cases` (an iterator of (what, ok)) as one group of checks."""
        self.say(begin=name)
        t = time.time()
        n, bad = 0, []
        for what, ok in cases:
            n += 1
            if not ok and len(bad) < 5:
                bad.append(what)
        self.say(group=name, ok=not bad, cases=n, bad=bad, seconds=round(time.time() - t, 1))

    # Memory. In the mempool scenario everything comes out of one registered arena.

    def empty(self, nbytes):
        t = self.torch
        if self.arena is None:
            return t.empty(nbytes, dtype=t.uint8, device=self.device)
        at = (self.arena_used + 511) & ~511
        if at + nbytes > self.arena.numel():
            at = 0
        self.arena_used = at + nbytes
        return self.arena[at:at + nbytes]

    def payload(self, nbytes, salt):
        """Position-dependent bytes, the same on whoever asks with the same salt."""
        t = self.torch
        x = t.arange((nbytes + 7) // 8, dtype=t.int64, device=self.device)
        x += (salt * 2654435761 + self.salt * 40503 + 12345) % (1 << 48)
        x *= -7046029254386353131
        x ^= x >> 31
        x *= -4658895280553007687
        x ^= x >> 29
        return x.view(t.uint8)[:nbytes]

    def placed(self, nbytes, dtype, shift=0):
        """Uninitialised memory with poisoned guards around it: (the bytes, the tensor, a test of the guards)."""
        t = self.torch
        guard = 512
        whole = self.empty(guard + shift + nbytes + guard)
        whole.fill_(0xA5)
        lo = guard + shift
        body = whole[lo:lo + nbytes]

        def intact():
            return bool((whole[:lo] == 0xA5).all()) and bool((whole[lo + nbytes:] == 0xA5).all())

        return body, (body if dtype == t.uint8 else body.view(dtype)), intact

    def source(self, nbytes, dtype, salt, shift=0):
        body, x, _ = self.placed(nbytes, dtype, shift)
        body.copy_(self.payload(nbytes, salt))
        return x

    def small(self, n, dtype, salt):
        """Small integers in any type: their sum over two ranks is exact."""
        t = self.torch
        m = {t.bfloat16: 100, t.uint8: 100, t.float32: 1 << 20, t.int64: 1 << 40}[dtype]
        x = self.payload(n * 8, salt).view(t.int64)
        return ((x & ((1 << 62) - 1)) % m).to(dtype)

    def fresh(self):
        self.seed += 10
        return self.seed

    def same(self, got, want):
        return bool(self.torch.equal(got, want))

    # The operations. Each yields (what, ok).

    def sizes(self, dtype, core):
        t = self.torch
        item = t.empty(0, dtype=dtype).element_size()
        yield from [1, 7, 4099] if core else [1, 2, 7, 1000, 4099, 65537, MIB + 5]
        yield (4 * MIB) // item
        if not core:
            yield (32 * MIB) // item + 3
        if dtype in (t.float32, t.bfloat16):
            yield ((64 if core or not self.cuda else 256) * MIB) // item

    def dtypes(self, core):
        t = self.torch
        return [t.float32, t.uint8] if core else [t.float32, t.bfloat16, t.int64, t.uint8]

    def each(self, core):
        for dtype in self.dtypes(core):
            item = self.torch.empty(0, dtype=dtype).element_size()
            for n in self.sizes(dtype, core):
                yield dtype, item, n, f"{str(dtype)[6:]} x {n}"

    def send_recv(self, core):
        d = self.dist
        for dtype, item, n, what in self.each(core):
            for shift in (0, item):
                s = self.fresh()
                body, out, intact = self.placed(n * item, dtype, shift)
                src = self.source(n * item, dtype, s + self.rank, shift)
                for turn in range(WORLD):
                    late = n == 4099
                    if turn == self.rank:
                        if late and turn:
                            time.sleep(0.03)
                        d.send(src, self.peer)
                    else:
                        if late and turn == 0:
                            time.sleep(0.03)
                        d.recv(out, self.peer)
                yield f"{what} at +{shift}", self.same(body, self.payload(n * item, s + self.peer)) and intact()

    def batch(self, core):
        d = self.dist
        for dtype, item, n, what in self.each(core):
            counts = [n, max(1, n // 3), 1]
            s = self.fresh()
            placed = [self.placed(k * item, dtype) for k in counts]
            ops = []
            for i, k in enumerate(counts):
                ops.append(d.P2POp(d.irecv, placed[i][1], self.peer))
                ops.append(d.P2POp(d.isend, self.source(k * item, dtype, s + 2 * i + self.rank), self.peer))
            for work in d.batch_isend_irecv(ops):
                work.wait()
            self.sync()
            yield what, all(self.same(placed[i][0], self.payload(k * item, s + 2 * i + self.peer)) and placed[i][2]()
                            for i, k in enumerate(counts))

    def all_to_all(self, core):
        t, d = self.torch, self.dist
        for dtype, item, n, what in self.each(core):
            per = max(1, n // WORLD)
            # equal parts, unequal parts, nothing one way
            for parts in ([[per, per], [per, per]], [[1, per + 2], [per // 2 + 1, 3]], [[0, per], [0, 0]]):
                s = self.fresh()
                mine, theirs = parts[self.rank], [parts[r][self.rank] for r in range(WORLD)]
                src = t.cat([self.payload(mine[r] * item, s + 2 * self.rank + r) for r in range(WORLD)])
                inp, x, _ = self.placed(src.numel(), dtype)
                inp.copy_(src)
                body, out, intact = self.placed(sum(theirs) * item, dtype)
                d.all_to_all_single(out, x, output_split_sizes=theirs, input_split_sizes=mine)
                want = t.cat([self.payload(theirs[r] * item, s + 2 * r + self.rank) for r in range(WORLD)])
                yield f"{what} parts {parts}", self.same(body, want) and intact()

    def all_gather(self, core):
        t, d = self.torch, self.dist
        for dtype, item, n, what in self.each(core):
            per = max(1, n // WORLD)
            for in_place in (False, True):
                s = self.fresh()
                body, out, intact = self.placed(WORLD * per * item, dtype)
                if in_place:
                    src = out[self.rank * per:(self.rank + 1) * per]
                    body[self.rank * per * item:(self.rank + 1) * per * item].copy_(self.payload(per * item, s + self.rank))
                else:
                    src = self.source(per * item, dtype, s + self.rank)
                d.all_gather_into_tensor(out, src)
                want = t.cat([self.payload(per * item, s + r) for r in range(WORLD)])
                yield f"{what} in place: {in_place}", self.same(body, want) and intact()

    def reduce_scatter(self, core):
        d = self.dist
        for dtype, item, n, what in self.each(core):
            per = max(1, n // WORLD)
            s = self.fresh()
            _, src, _ = self.placed(WORLD * per * item, dtype)
            src.copy_(self.small(WORLD * per, dtype, s + self.rank))
            _, out, intact = self.placed(per * item, dtype)
            d.reduce_scatter_tensor(out, src)
            want = sum(self.small(WORLD * per, dtype, s + r) for r in range(WORLD))[self.rank * per:(self.rank + 1) * per]
            yield what, self.same(out, want) and intact()

    def all_reduce(self, core):
        t, d = self.torch, self.dist
        for dtype, item, n, what in self.each(core):
            for op in (d.ReduceOp.SUM, d.ReduceOp.MAX):
                s = self.fresh()
                _, x, intact = self.placed(n * item, dtype)
                x.copy_(self.small(n, dtype, s + self.rank))
                d.all_reduce(x, op)
                a, b = (self.small(n, dtype, s + r) for r in range(WORLD))
                yield f"{what} {op}", self.same(x, a + b if op == d.ReduceOp.SUM else t.maximum(a, b)) and intact()

    def broadcast(self, core):
        d = self.dist
        for dtype, item, n, what in self.each(core):
            for root in range(WORLD):
                s = self.fresh()
                body, x, intact = self.placed(n * item, dtype)
                if root == self.rank:
                    body.copy_(self.payload(n * item, s))
                d.broadcast(x, root)
                yield f"{what} from {root}", self.same(body, self.payload(n * item, s)) and intact()

    def every_operation(self, core):
        for name, op in [("send/recv", self.send_recv), ("batch_isend_irecv", self.batch), ("all_to_all_single", self.all_to_all),
                         ("all_gather_into_tensor", self.all_gather), ("reduce_scatter_tensor", self.reduce_scatter),
                         ("all_reduce", self.all_reduce), ("broadcast", self.broadcast)]:
            self.group(name, op(core))

    # The scenarios.

    def plain(self):
        self.init()
        self.every_operation(self.args.core)
        self.close()

    expandable = hook = plain

    def mempool(self):
        t = self.torch
        self.init()
        backend = self.dist.distributed_c10d._get_default_group()._get_backend(self.device)
        if not hasattr(backend, "register_mem_pool"):
            self.say(skip="register_mem_pool", why=f"PyTorch {t.__version__} lacks it")
            return self.close()
        try:
            pool = t.cuda.MemPool(backend.mem_allocator)
        except (NotImplementedError, RuntimeError) as e:
            self.say(skip="mem_allocator", why=str(e).splitlines()[0])
            return self.close()
        with t.cuda.use_mem_pool(pool):
            self.arena = t.empty(1536 * MIB, dtype=t.uint8, device=self.device)
        self.arena_used = 0
        backend.register_mem_pool(pool)
        for name, op in [("send/recv", self.send_recv), ("batch_isend_irecv", self.batch), ("all_to_all_single", self.all_to_all),
                         ("all_gather_into_tensor", self.all_gather), ("all_reduce", self.all_reduce)]:
            self.group(name, op(True))
        self.sync()
        backend.deregister_mem_pool(pool)
        self.close()

    def comms(self):
        self.init()
        self.say(begin="new_group")
        groups = [None] + [self.dist.new_group(list(range(WORLD))) for _ in range(4)]
        self.group("interleaved", self.interleaved(groups))
        self.group("new-and-destroyed", self.renewed())
        self.close()

    def interleaved(self, groups):
        t, d = self.torch, self.dist
        for rnd in range(8):
            n = [4099, 65536, MIB + 5, 6 * MIB][rnd % 4]
            s = self.fresh() * 10
            works, checks = [], []
            for i, g in enumerate(groups):
                salt = s + 10 * i
                kind = (i + rnd) % 3
                if kind == 0:
                    body, out, intact = self.placed(WORLD * n, t.uint8)
                    works.append(d.all_gather_into_tensor(out, self.source(n, t.uint8, salt + self.rank), group=g, async_op=True))
                    checks.append((body, lambda salt=salt: t.cat([self.payload(n, salt + r) for r in range(WORLD)]), intact))
                elif kind == 1:
                    body, out, intact = self.placed(n, t.uint8)
                    src = self.source(n, t.uint8, salt + self.rank)
                    works += d.batch_isend_irecv([d.P2POp(d.irecv, out, self.peer, g), d.P2POp(d.isend, src, self.peer, g)])
                    checks.append((body, lambda salt=salt: self.payload(n, salt + self.peer), intact))
                else:
                    _, x, intact = self.placed(4 * n, t.float32)
                    x.copy_(self.small(n, t.float32, salt + self.rank))
                    works.append(d.all_reduce(x, group=g, async_op=True))
                    checks.append((x, lambda salt=salt: sum(self.small(n, t.float32, salt + r) for r in range(WORLD)), intact))
            for w in works:
                w.wait()
            self.sync()
            yield f"round {rnd}", all(self.same(got, want()) and intact() for got, want, intact in checks)

    def renewed(self):
        t, d = self.torch, self.dist
        for i in range(5):
            g = d.new_group(list(range(WORLD)))
            x = self.small(MIB, t.float32, self.fresh() + self.rank)
            d.all_reduce(x, group=g)
            want = sum(self.small(MIB, t.float32, self.seed + r) for r in range(WORLD))
            yield f"group {i}", self.same(x, want)
            self.sync()
            d.destroy_process_group(g)

    def graphs(self):
        self.init()
        for mode in ("thread_local", "global"):
            self.group(f"capture {mode}", self.captured(mode))
        self.close()

    def captured(self, mode):
        t, d = self.torch, self.dist
        for n in (1000, 4 * MIB + 1):
            x = t.empty(n, dtype=t.float32, device=self.device)
            part = t.empty(n, dtype=t.uint8, device=self.device)
            whole = t.empty(WORLD * n, dtype=t.uint8, device=self.device)
            got = t.empty(n, dtype=t.uint8, device=self.device)

            def ops():
                d.all_reduce(x)
                d.all_gather_into_tensor(whole, part)
                for w in d.batch_isend_irecv([d.P2POp(d.irecv, got, self.peer), d.P2POp(d.isend, part, self.peer)]):
                    w.wait()

            ops()
            self.sync()
            d.barrier()
            self.sync()
            graph = t.cuda.CUDAGraph()
            with t.cuda.graph(graph, capture_error_mode=mode):
                ops()
            for i in range(10):
                s = self.fresh()
                x.copy_(self.small(n, t.float32, s + self.rank))
                part.copy_(self.payload(n, s + self.rank))
                whole.fill_(0xA5)
                got.fill_(0xA5)
                graph.replay()
                ok = self.same(x, sum(self.small(n, t.float32, s + r) for r in range(WORLD)))
                ok = ok and self.same(whole, t.cat([self.payload(n, s + r) for r in range(WORLD)]))
                yield f"{n} replay {i}", ok and self.same(got, self.payload(n, s + self.peer))
            for _ in range(20):
                graph.replay()
            self.sync()
            yield f"{n} replays back to back", self.same(got, self.payload(n, s + self.peer))
            del graph
            self.sync()

    def cycles(self):
        self.group("init and destroy", self.cycled())

    def cycled(self):
        t, d = self.torch, self.dist
        kept = None
        for i in range(20):
            self.init(bind=i % 2 == 0)
            x = self.small(MIB, t.float32, self.fresh() + self.rank).to(self.device)
            d.all_reduce(x)
            ok = self.same(x, sum(self.small(MIB, t.float32, self.seed + r) for r in range(WORLD)))
            body, out, intact = self.placed(100001, t.uint8)
            for w in d.batch_isend_irecv([d.P2POp(d.irecv, out, self.peer),
                                          d.P2POp(d.isend, self.source(100001, t.uint8, self.seed + self.rank), self.peer)]):
                w.wait()
            ok = ok and self.same(body, self.payload(100001, self.seed + self.peer)) and intact()
            self.sync()
            d.destroy_process_group()
            yield f"cycle {i}", ok
            if i == 3:
                kept = held()
        after = held()
        ours = after["vccl"] - kept["vccl"]
        fds, threads = after["fds"] - kept["fds"], after["threads"] - kept["threads"]
        yield f"left after 16 cycles: {fds} fds, {threads} threads, {ours} of vccl's ({after['names']})", \
            ours <= 0 and fds < 16 and threads < 16

    # The peer goes away. `mark` files carry times between the two processes and to the parent.

    def traffic(self, n=64 * MIB):
        d = self.dist
        out, src = self.empty(n), self.payload(n, 1)
        return lambda: d.batch_isend_irecv([d.P2POp(d.irecv, out, self.peer), d.P2POp(d.isend, src, self.peer)])

    def mark(self, name):
        with open(f"{self.args.results}.{name}", "w") as f:
            f.write(repr(time.time()))

    def start_dying(self, seconds):
        def die():
            time.sleep(seconds)
            self.mark("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=die, daemon=True).start()

    def abort(self):
        self.init()
        step = self.traffic()
        for w in step():
            w.wait()
        self.sync()
        self.say(begin="peer killed")
        if self.rank == 1:
            self.start_dying(0.5)
        while True:
            for w in step():
                w.wait()
            self.sync()

    def abort_api(self):
        self.init()
        step = self.traffic()
        for w in step():
            w.wait()
        self.sync()
        self.say(begin="peer killed")
        if self.rank == 1:
            self.start_dying(0.5)
            while True:
                for w in step():
                    w.wait()
                self.sync()
        backend = self.dist.distributed_c10d._get_default_group()._get_backend(self.device)
        t0 = time.time()
        event = self.torch.cuda.Event()

        def trouble():
            return hasattr(backend, "get_error") and "SUCCESS" not in str(backend.get_error())

        stuck = False
        while not stuck and not trouble() and time.time() - t0 < 12:
            for w in step():
                w.wait()
            event.record()
            while not (stuck := trouble() or time.time() - t0 > 12) and not event.query():
                time.sleep(0.01)
        error = str(backend.get_error()) if hasattr(backend, "get_error") else "unknown"
        self.abort_now(f"PyTorch saw {error} {time.time() - t0:.1f} s after the first message")

    def abort_now(self, note):
        t0 = time.time()
        done = threading.Event()

        def run():
            self.dist.distributed_c10d._abort_process_group()
            done.set()
        threading.Thread(target=run, daemon=True).start()
        finished = done.wait(20)
        took = time.time() - t0
        idle = threading.Event()

        def drain():
            self.torch.cuda.synchronize()
            idle.set()
        threading.Thread(target=drain, daemon=True).start()
        ok = finished and idle.wait(10)
        # The GPU must still work for this process.
        if ok:
            x = self.torch.ones(1000, device=self.device)
            ok = float(x.sum()) == 1000.0
        self.say(group="abort", ok=bool(ok), cases=1, seconds=round(took, 1), bad=[] if ok else
                 [f"abort returned: {finished}, GPU idle: {idle.is_set()}"], note=note)
        os._exit(0 if ok else 1)

    def held(self):
        """Sends and receives while a kernel of our own has every SM that NCCL's left."""
        import ctypes
        t, d = self.torch, self.dist
        self.init()
        cuda = ctypes.CDLL("libcuda.so.1")

        def call(name, *a):
            code = getattr(cuda, name)(*a)
            if code:
                raise RuntimeError(f"{name}: {code}")

        t.zeros(1, device=self.device)
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(HOLD))
        call("cuModuleGetFunction", ctypes.byref(kernel), module, b"hold")
        words = t.zeros(2, dtype=t.int32, device=self.device)
        seen = t.zeros(2, dtype=t.int32).pin_memory()
        one = t.ones(1, dtype=t.int32).pin_memory()
        spin, look, other = (t.cuda.Stream(self.device) for _ in range(3))
        sms = t.cuda.get_device_properties(self.device).multi_processor_count
        threads, blocks = 128, sms * 16     # all that fit at once: 2,048 threads on each SM

        def hold():
            args = (ctypes.c_void_p * 2)()
            values = [ctypes.c_uint64(words.data_ptr()), ctypes.c_uint64(words.data_ptr() + 4)]
            for i, v in enumerate(values):
                args[i] = ctypes.cast(ctypes.pointer(v), ctypes.c_void_p)
            call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, ctypes.c_void_p(spin.cuda_stream), args, None)

        def resident():
            with t.cuda.stream(look):
                seen.copy_(words, non_blocking=True)
            look.synchronize()
            return int(seen[1])

        def exchange(out, into):
            ops = [d.P2POp(d.isend, out, self.peer), d.P2POp(d.irecv, into, self.peer)]
            return d.batch_isend_irecv(ops)

        def cases():
            for n in (64 * MIB, 512 * MIB, 1024 * MIB - 5):
                s = self.fresh()
                out = self.payload(n, s + self.rank)
                want = self.payload(n, s + self.peer)
                into = t.zeros(n, dtype=t.uint8, device=self.device)
                tiny = t.zeros(1, device=self.device)
                # Connections, registrations and the first launch of every kernel come before.
                for w in exchange(out, into):
                    w.wait()
                tiny.add_(1)
                into.zero_()
                words.zero_()
                self.sync()
                d.barrier()
                self.sync()
                works = exchange(out, into)
                hold()
                began, last = time.time(), -1
                while time.time() - began < 5:
                    now = resident()
                    # NCCL's kernel has a part of some SMs.
                    if now >= blocks - 16 * 33 and now == last:
                        break
                    last = now
                early = all(w.is_completed() for w in works)
                with t.cuda.stream(other):
                    tiny.add_(1)
                    ran = t.cuda.Event()
                    ran.record()
                began = time.time()
                while not all(w.is_completed() for w in works) and time.time() - began < 30:
                    time.sleep(0.0005)
                moved = all(w.is_completed() for w in works)
                took = time.time() - began
                free = ran.query()
                with t.cuda.stream(look):
                    words[:1].copy_(one, non_blocking=True)
                self.sync()
                good = self.same(into, want)
                self.say(note=f"{n} bytes: {last} of {blocks} blocks held the SMs, {took:.3f} s")
                yield f"{n} bytes: the SMs were held by {last} of {blocks} blocks only", last >= blocks - 16 * 33
                yield f"{n} bytes: over before the SMs were held", not early
                yield f"{n} bytes: did not end while the SMs were held", moved
                yield f"{n} bytes: another kernel ran, so the SMs were not held", not free
                yield f"{n} bytes: wrong bytes", good

        self.group("all SMs held", cases())
        self.close()

    def abort_alone(self):
        self.init()
        step = self.traffic(MIB)
        for w in step():
            w.wait()
        self.sync()
        self.dist.barrier()
        self.sync()
        self.say(begin="abort with an operation pending")
        if self.rank == 1:
            # Does not join, but stays until rank 0 has gone.
            for _ in range(300):
                if os.path.exists(self.args.rdzv + ".aborted"):
                    break
                time.sleep(0.1)
            os._exit(0)
        step()
        time.sleep(1)
        open(self.args.rdzv + ".aborted", "w").close()
        self.abort_now("one send and one receive were pending")


def held():
    """What this process holds open: descriptors and threads, and those that carry vccl's name."""
    fds, names, ours = 0, {}, 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        fds += 1
        kind = link.split(":")[0] if ":" in link else os.path.basename(link)
        names[kind] = names.get(kind, 0) + 1
        ours += "vccl" in link
    threads = os.listdir("/proc/self/task")
    for t in threads:
        try:
            with open(f"/proc/self/task/{t}/comm") as f:
                ours += "vccl" in f.read()
        except OSError:
            pass
    top = sorted(names.items(), key=lambda kv: -kv[1])[:4]
    return {"fds": fds, "threads": len(threads), "vccl": ours, "names": ", ".join(f"{k} {v}" for k, v in top)}


def worker(args):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(5, args.limit - 8), exit=False)
    rank = None
    try:
        rank = Rank(args)
        rank.say(ready=rank.torch.__version__)
        getattr(rank, args.worker.replace("-", "_"))()
        rank.say(finished=True)
    except BaseException as e:
        traceback.print_exc()
        if rank:
            rank.say(error=f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"[:300])
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


# ---------------------------------------------------------------- the parent

class Tally:
    def __init__(self):
        self.passed = self.failed = 0

    def line(self, ok, text):
        print(f"{'PASS' if ok else 'FAIL'} {text}", flush=True)
        if ok:
            self.passed += 1
        else:
            self.failed += 1


def read_results(path):
    if not os.path.exists(path):
        return []
    with open(path) as f:
        return [json.loads(line) for line in f if line.strip().endswith("}")]


def tail(path, n=6):
    if not os.path.exists(path):
        return []
    with open(path, errors="replace") as f:
        lines = [x.rstrip() for x in f if x.strip()]
    return lines[-n:]


def errors_of(path):
    """The lines of a worker's output that say most: errors, where it hung, its end."""
    if not os.path.exists(path):
        return []
    with open(path, errors="replace") as f:
        lines = [x.rstrip()[:220] for x in f]
    out = [x for x in lines if "Error" in x or "error" in x][:3]
    stacks = [i for i, x in enumerate(lines) if "most recent call first" in x]
    if stacks:
        out += ["it hung in:"] + lines[stacks[-1] + 1:stacks[-1] + 5]
    else:
        out += [x for x in tail(path, 2) if x[:220] not in out]
    return [x[:220] for x in out]


def warnings_of(folder):
    import nccl_log
    seen = [w for f in nccl_log.files_of([folder]) for w in nccl_log.read(f)["warnings"]]
    return [w[:260] for w in seen[:4]]


def leftovers():
    """What a process that died may have left behind by name."""
    found = []
    try:
        found += [f"/dev/shm/{x}" for x in os.listdir("/dev/shm") if "vccl" in x]
    except OSError:
        pass
    try:
        with open("/proc/net/unix") as f:
            # an abstract name (@...) belongs to a process that lives
            names = [line.split()[-1] for line in f if "vccl" in line]
            found += [n for n in names if n.startswith("/")]
    except OSError:
        pass
    return found


def run_scenario(name, args, tally):
    limit, extra, registered, _ = SCENARIOS[name]
    limit = min(limit, args.limit)
    label = f"{args.label}/{name}"
    failed_before = tally.failed
    out = os.path.join(args.out, f"{args.label}.{name}".replace("/", "_"))
    logs = os.path.join(out, "nccl")
    os.makedirs(logs, exist_ok=True)
    env = dict(os.environ)
    env.update(extra)
    env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    env.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,GRAPH,REG", NCCL_DEBUG_FILE=os.path.join(logs, "%h.%p.log"))
    if args.preload:
        env["LD_PRELOAD"] = args.preload
    salt = int.from_bytes(os.urandom(3), "little")
    rdzv = os.path.join(out, "rendezvous")
    procs, outputs, results = [], [], []
    began = time.time()
    for r in range(WORLD):
        outputs.append(os.path.join(out, f"rank{r}.out"))
        results.append(os.path.join(out, f"rank{r}.results"))
        cmd = [sys.executable, os.path.abspath(__file__), "--worker", name, "--rank", str(r), "--rdzv", rdzv, "--results", results[r],
               "--salt", str(salt), "--device", args.device, "--limit", str(limit)] + (["--core"] if args.core else [])
        with open(outputs[r], "w") as f:
            procs.append(subprocess.Popen(cmd, env=env, stdout=f, stderr=subprocess.STDOUT, start_new_session=True))
    ended = [None] * WORLD
    expect_death = name in ("abort", "abort-api")
    grace = None
    while any(e is None for e in ended):
        for r, p in enumerate(procs):
            if ended[r] is None and p.poll() is not None:
                ended[r] = time.time()
                if p.returncode != 0 and not expect_death and grace is None:
                    grace = time.time() + 12
        late = time.time() - began > limit or (grace and time.time() > grace)
        if late:
            for r, p in enumerate(procs):
                if ended[r] is None:
                    try:
                        os.killpg(p.pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                    p.wait()
                    ended[r] = time.time()
                    p.late = True
        time.sleep(0.05)
    took = time.time() - began

    found = [read_results(x) for x in results]
    if args.preload and not any("ready" in x for rows in found for x in rows):
        print(f"SKIP {label}: PyTorch does not load with {args.preload}: {(tail(outputs[0], 1) or ['?'])[0][:160]}", flush=True)
        return
    for rows in found[:1]:
        for x in rows:
            if "skip" in x:
                print(f"SKIP {label}/{x['skip']}: {x['why']}", flush=True)
    groups = {}
    for r, rows in enumerate(found):
        for x in rows:
            if "group" in x:
                groups.setdefault(x["group"], {})[r] = x
    for g, by_rank in groups.items():
        ok = all(x["ok"] for x in by_rank.values()) and (len(by_rank) == WORLD or name.startswith("abort"))
        x = next(iter(by_rank.values()))
        text = f"{label}/{g}: {sum(y['cases'] for y in by_rank.values())} cases, {x['seconds']} s"
        for r, y in sorted(by_rank.items()):
            if y.get("bad"):
                text += f"; rank {r} wrong: {y['bad']}"
            if y.get("note"):
                text += f"; {y['note']}"
        if not ok and len(by_rank) < WORLD:
            text += f"; only rank {list(by_rank)} got here"
        tally.line(ok, text)

    if name == "abort":
        killed = None
        try:
            with open(results[1] + ".killed") as f:
                killed = float(f.read())
        except (OSError, ValueError):
            pass
        hung = getattr(procs[0], "late", False)
        after = ended[0] - killed if killed else -1
        with open(outputs[0], errors="replace") as f:
            text = f.read()
        named = [k for k in ("ncclRemoteError", "remote process exited", "ncclSystemError", "ncclInternalError", "unhandled system error",
                             "Watchdog caught collective operation timeout") if k in text]
        ok = bool(killed) and not hung and 0 <= after < 30 and "Watchdog caught collective operation timeout" not in named
        lines = [] if ok else errors_of(outputs[0])
        tally.line(ok, f"{label}/watchdog: survivor {'HUNG' if hung else f'ended {after:.1f} s after the kill, code {procs[0].returncode}'}"
                       f"; it named {named or 'no NCCL error'}")
        for line in lines:
            print(f"     | {line}", flush=True)
    else:
        for r, rows in enumerate(found):
            died_as_planned = name == "abort-api" and r == 1 and procs[r].returncode == -signal.SIGKILL
            if procs[r].returncode == 0 or died_as_planned:
                continue
            open_group = None
            for x in rows:
                open_group = x.get("begin", open_group)
                if "group" in x and x["group"] == open_group:
                    open_group = None
            why = next((x["error"] for x in rows if "error" in x), None)
            late = "killed, too late; " if getattr(procs[r], "late", False) else ""
            tally.line(False, f"{label}: rank {r} {late}code {procs[r].returncode} in {open_group or 'start or end'}: {why or ''}")
            for line in errors_of(outputs[r]):
                print(f"     | {line}", flush=True)
    if name == "abort-api" and "abort" not in groups and procs[0].returncode == 0:
        tally.line(False, f"{label}: the survivor did not report")
    if tally.failed > failed_before:
        for line in warnings_of(logs):
            print(f"     | {line}", flush=True)
    if args.device == "cuda":
        import nccl_log
        ok, text = nccl_log.prove([logs], registered, args.net, WORLD)
        tally.line(ok, f"{label}/path: {text}")
        if args.net == "vccl":
            left = leftovers()
            if left:
                tally.line(False, f"{label}/left behind: {left[:4]}")
    print(f"     {label}: {took:.0f} s", flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--scenarios", help="comma-separated; all by default")
    ap.add_argument("--core", action="store_true", help="fewer sizes and types; plain and hook unless --scenarios says else")
    ap.add_argument("--net", default="vccl", help="the network name that NCCL's log must show")
    ap.add_argument("--out", help="folder for logs")
    ap.add_argument("--label", default="torch")
    ap.add_argument("--preload", help="a libnccl.so.2 to put in front of PyTorch's own")
    ap.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    ap.add_argument("--limit", type=float, default=150, help="seconds for one scenario at most")
    ap.add_argument("--total", type=float, default=1e9, help="seconds for all; what does not begin in time is skipped")
    for internal in ("--worker", "--rdzv", "--results"):
        ap.add_argument(internal, help=argparse.SUPPRESS)
    ap.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    ap.add_argument("--salt", type=int, default=0, help=argparse.SUPPRESS)
    args = ap.parse_args()
    if args.worker:
        worker(args)
    names = args.scenarios.split(",") if args.scenarios else CORE if args.core else list(SCENARIOS)
    if args.device == "cpu":
        names = [n for n in names if SCENARIOS[n][3]]
    args.out = args.out or tempfile.mkdtemp(prefix="torch_suite.")
    tally = Tally()
    began = time.time()
    for name in names:
        if name not in SCENARIOS:
            sys.exit(f"unknown scenario {name}; there are {', '.join(SCENARIOS)}")
        if time.time() - began > args.total:
            tally.line(False, f"{args.label}/{name}: not begun, the time for all was over")
            continue
        run_scenario(name, args, tally)
    print(f"{tally.passed} passed, {tally.failed} failed (logs in {args.out})", flush=True)
    sys.exit(1 if tally.failed else 0)


if __name__ == "__main__":
    main()
