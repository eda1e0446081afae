#!/usr/bin/env python3
"""Measures vccl against stock NCCL and against bare copies, in one run, and writes the report.

usage: perf.py --bench nccl_bench --lib DIR_OF_libnccl-net-vccl.so [--nccl FILE] [--out DIR] [--quick]
               [--parts registered,unregistered,gemm,breakdown] [--rounds N] [--limit SECONDS]
       perf.py --render perf.json [--into docs/performance.md]

Every configuration runs in processes of its own (NCCL reads its environment once); the rounds alternate
between them, and the median of the rounds is reported. --out gets perf.json and perf.md. --render makes
the report from a perf.json again and puts it between the markers in a page.

VCCL_* variables reach every run; PERF_NCCL_X=... sets NCCL_X in vccl's runs, over the recipe.
"""
import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
BEGIN, END = "<!-- perf.py: begin -->", "<!-- perf.py: end -->"
K, M, G = 1 << 10, 1 << 20, 1 << 30

# What is aimed at, as ratios of bandwidth against stock NCCL's better of plain and registered.
TARGETS = {
    ("sendrecv", G): (1.03, "1.03 x stock, 0.93 x a bare copy"),
    ("sendrecv", 256 * M): (1.03, "1.03 x stock, 0.93 x a bare copy"),
    ("sendrecv", 32 * M): (1.0, "1.0 x stock"),
    ("sendrecv", 4 * M): (0.8, "0.8 x stock"),
    ("sendrecv", 64 * K): (1 / 1.5, "within 1.5 x stock's time"),
    ("alltoall", 256 * M): (1.1, "1.1 x stock"),
    ("allgather", 256 * M): (1.2, "1.2 x stock"),
}
BARE_TARGET = 0.93
UNREGISTERED_TARGET = 0.5
GEMM_TARGET = 5.0

# Settings tried for buffers that are not registered: name -> what changes against the recipe's common part.
CANDIDATES = {
    "NCCL's defaults": {},
    "1M x 8": dict(chunk=1 * M, channels=8),
    "2M x 8": dict(chunk=2 * M, channels=8),
    "4M x 4": dict(chunk=4 * M, channels=4),
    "4M x 8": dict(chunk=4 * M, channels=8),
    "4M x 16": dict(chunk=4 * M, channels=16),
    "8M x 4": dict(chunk=8 * M, channels=4),
    "8M x 8": dict(chunk=8 * M, channels=8),
    "2M x 16": dict(chunk=2 * M, channels=16),
}
QUICK_CANDIDATES = ["NCCL's defaults", "2M x 8", "4M x 8"]


def size_text(n):
    for unit, name in ((G, "GiB"), (M, "MiB"), (K, "KiB")):
        if n >= unit and n % unit == 0:
            return f"{n // unit} {name}"
    return f"{n} B"


def size_arg(sizes):
    return ",".join(str(s) for s in sizes)


def candidate_env(chunk=None, channels=None):
    """A chunk is at most an eighth of the buffer; 16 chunks a channel are allocated."""
    if chunk is None:
        return {}
    return {"NCCL_BUFFSIZE": str(8 * chunk), "NCCL_P2P_NET_CHUNKSIZE": str(chunk), "NCCL_MIN_P2P_NCHANNELS": str(channels),
            "NCCL_MAX_P2P_NCHANNELS": str(channels), "NCCL_NCHANNELS_PER_NET_PEER": str(channels)}


def recipe(kind):
    """The variables that recipe.env sets for `kind`."""
    script = "set -a; . ./recipe.env; env -0"
    out = subprocess.run(["bash", "-c", script], cwd=HERE, env={"PATH": os.environ["PATH"], "VCCL_RECIPE": kind},
                         capture_output=True, check=True).stdout.decode()
    return {k: v for k, v in (x.split("=", 1) for x in out.split("\0") if "=" in x) if k.startswith("NCCL_")}


class Runner:
    def __init__(self, args):
        self.args = args
        self.deadline = time.time() + args.limit
        self.notes = []
        self.header = {}
        self.runs = 0

    def left(self):
        return self.deadline - time.time()

    def env(self, kind, more=None):
        """kind: stock, common (the recipe without its last part), registered or unregistered."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
        env["NCCL_NVLS_ENABLE"] = os.environ.get("NCCL_NVLS_ENABLE", "0")
        env["NCCL_DEBUG"] = "WARN"
        if kind != "stock":
            env["LD_LIBRARY_PATH"] = self.args.lib + os.pathsep + os.environ.get("LD_LIBRARY_PATH", "")
            env.update(recipe(kind))
        for k in os.environ:
            if k.startswith("PERF_NCCL_") and kind != "stock":
                env[k[5:]] = os.environ[k]
        env.update(more or {})
        return env

    def bench(self, label, env, options, limit=70):
        """The rows of one nccl_bench run."""
        limit = min(limit, self.left())
        if limit < 8:
            self.notes.append(f"{label}: not run, no time was left")
            return []
        cmd = [self.args.bench, "--label", label, "--limit", str(int(limit - 2))] + options
        if self.args.nccl:
            cmd += ["--nccl", self.args.nccl]
        self.runs += 1
        t = time.time()
        try:
            p = subprocess.run(cmd, env=env, capture_output=True, text=True, errors="replace", timeout=limit + 5)
            out, rc = p.stdout + p.stderr, p.returncode
        except subprocess.TimeoutExpired as e:
            out, rc = (e.stdout or b"").decode(errors="replace") if isinstance(e.stdout, bytes) else (e.stdout or ""), 124
        with open(os.path.join(self.args.work, f"{self.runs:03d}.{re.sub(r'[^A-Za-z0-9]+', '_', label)}.txt"), "w") as f:
            f.write(" ".join(cmd) + "\n" + out)
        rows = []
        for line in out.splitlines():
            if line.startswith("# gpu") and not self.header.get("nccl"):
                m = re.match(r"# gpu (.*); cuda driver (\d+); nccl (\S+)", line)
                if m:
                    self.header["gpu"] = m.group(1)
                    self.header["cuda"] = f"{int(m.group(2)) // 1000}.{int(m.group(2)) % 1000 // 10}"
                    if m.group(3) != "-":
                        self.header["nccl"] = m.group(3)
            x = line.split(",")
            if x[0] == "bench" and len(x) == 13:
                rows.append(dict(label=x[1], op=x[2], size=int(x[3]), reg=int(x[4]), time_us=float(x[6]), sync_us=float(x[9]),
                                 busbw=float(x[11]), wrong=int(x[12])))
            elif x[0] == "gemm" and len(x) == 11:
                rows.append(dict(label=x[1], op=x[2], size=int(x[3]), reg=int(x[4]), alone_ms=float(x[5]), beside_ms=float(x[6]),
                                 slower_pct=float(x[7]), round_alone_us=float(x[8]), round_us=float(x[9]), busbw=float(x[10])))
        if rc or not rows:
            why = [x for x in out.splitlines() if "FAIL" in x or "WARN" in x or "rror" in x]
            self.notes.append(f"{label}: exit code {rc}, {len(rows)} rows; {'; '.join(why[:2])[:240]}")
        wrong = sum(r.get("wrong", 0) for r in rows)
        if wrong:
            self.notes.append(f"{label}: {wrong} wrong bytes")
        print(f"     {label}: {len(rows)} rows, {time.time() - t:.0f} s{'' if rc == 0 else f', exit code {rc}'}", flush=True)
        return rows


def middle(rows):
    """The median over rounds, by (label, op, size, reg)."""
    by = {}
    for r in rows:
        by.setdefault((r["label"], r["op"], r["size"], r["reg"]), []).append(r)
    out = []
    for (label, op, size, reg), rs in by.items():
        merged = dict(label=label, op=op, size=size, reg=reg, rounds=len(rs))
        for k in rs[0]:
            if isinstance(rs[0][k], float):
                merged[k] = statistics.median(r[k] for r in rs)
        merged["wrong"] = sum(r.get("wrong", 0) for r in rs)
        out.append(merged)
    return out


def part_registered(run, quick):
    sizes = [8, 64 * K, 4 * M, 32 * M, 256 * M] if quick else [8, 64 * K, M, 4 * M, 8 * M, 32 * M, 128 * M, 256 * M, G]
    coll = [256 * M] if quick else [4 * M, 32 * M, 256 * M]
    budget = ["--budget", "30" if quick else "50", "--repeat", "3" if quick else "5"]
    rows = []
    for _ in range(run.args.rounds or (1 if quick else 3)):
        for label, kind, regs in (("stock", "stock", "0,1"), ("vccl", "registered", "1")):
            ops = "push,sendrecv" if label == "stock" else "sendrecv"
            rows += run.bench(label, run.env(kind), ["--ops", ops, "--sizes", size_arg(sizes), "--reg", regs] + budget)
            rows += run.bench(label, run.env(kind), ["--ops", "alltoall", "--sizes", size_arg(coll), "--reg", regs] + budget)
            # Stock NCCL 2.28.9 never ends an in-place allgather of registered buffers in this benchmark.
            regs = "0" if label == "stock" else regs
            rows += run.bench(label, run.env(kind), ["--ops", "allgather", "--sizes", size_arg(coll), "--reg", regs] + budget)
    return middle(rows)


def part_unregistered(run, quick):
    sizes = [4 * M, 256 * M] if quick else [64 * K, 4 * M, 32 * M, 256 * M]
    budget = ["--budget", "30" if quick else "50", "--repeat", "3", "--sizes", size_arg(sizes), "--ops", "sendrecv", "--reg", "0"]
    rows = []
    for _ in range(1 if quick else run.args.rounds or 2):
        rows += run.bench("stock", run.env("stock"), budget)
        rows += run.bench("vccl recommended", run.env("unregistered"), budget)
    for name in QUICK_CANDIDATES if quick else CANDIDATES:
        env = run.env("common", candidate_env(**CANDIDATES[name]))
        rows += run.bench(name, env, budget, limit=45)
    return middle(rows)


def part_gemm(run, quick):
    sizes = [8 * M, 256 * M] if quick else [M, 8 * M, 32 * M, 256 * M]
    options = ["--gemm", "8192", "--gemm-count", "100", "--repeat", "2" if quick else "3", "--sizes", size_arg(sizes)]
    if run.args.cublas:
        options += ["--cublas", run.args.cublas]
    rows = run.bench("stock", run.env("stock"), options + ["--ops", "push,sendrecv", "--reg", "0,1"], limit=100)
    rows += run.bench("vccl", run.env("registered"), options + ["--ops", "sendrecv", "--reg", "1"], limit=70)
    if not quick:
        rows += run.bench("vccl", run.env("unregistered"), options + ["--ops", "sendrecv", "--reg", "0"], limit=70)
    return middle(rows)


def part_breakdown(run, quick):
    """One exchange at a time, and what the plugin's own clock says of a message."""
    sizes = [8, 64 * K, M, 4 * M]
    options = ["--ops", "push,sendrecv", "--sizes", size_arg(sizes), "--budget", "30", "--repeat", "3"]
    rows = run.bench("stock", run.env("stock"), options + ["--reg", "0,1"])
    rows += run.bench("vccl", run.env("registered"), options + ["--reg", "1"])
    stages = []
    for size in sizes if not quick else [64 * K, 4 * M]:
        log = os.path.join(run.args.work, f"timing.{size}.%p.log")
        env = run.env("registered", {"VCCL_TIMING": "1", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log})
        run.bench(f"timing {size}", env, ["--ops", "sendrecv", "--sizes", str(size), "--reg", "1", "--budget", "30", "--repeat", "3"], limit=40)
        for f in sorted(os.listdir(run.args.work)):
            if f.startswith(f"timing.{size}."):
                with open(os.path.join(run.args.work, f), errors="replace") as fh:
                    for line in fh:
                        if "vccl" in line and re.search(r"timing|stage|mean", line, re.I) and "VCCL_TIMING" not in line:
                            text = re.sub(r"^.*?NCCL INFO\s*", "", line.strip())
                            stages.append(dict(size=size, text=text[:300]))
    return dict(rows=middle(rows), stages=stages)


def proof(run):
    """One short run with NCCL's log on: which path the bytes took, and that the buffers were registered."""
    import nccl_log
    logs = os.path.join(run.args.work, "proof")
    os.makedirs(logs, exist_ok=True)
    env = run.env("registered", {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,REG", "NCCL_DEBUG_FILE": os.path.join(logs, "%p.log")})
    run.bench("proof", env, ["--ops", "sendrecv,alltoall,allgather", "--sizes", "4M", "--reg", "1", "--iters", "3", "--repeat", "1"], limit=40)
    ok, text = nccl_log.prove([logs], registered=True)
    if not ok:
        run.notes.append(f"the path is not proven: {text}")
    return ok, text


# ---------------------------------------------------------------- the report

def pick(rows, label, op, size, reg):
    return next((r for r in rows if (r["label"], r["op"], r["size"], r["reg"]) == (label, op, size, reg)), None)


def best_stock(rows, op, size):
    found = [r for r in (pick(rows, "stock", op, size, 0), pick(rows, "stock", op, size, 1)) if r]
    return min(found, key=lambda r: r["time_us"]) if found else None


def cell(row, key, form="{:.1f}"):
    return form.format(row[key]) if row else "-"


def table(head, lines):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)] + ["| " + " | ".join(x) + " |" for x in lines]) + "\n"


def judge_registered(rows):
    """[(op, size, stock plain, stock registered, vccl, bare, x stock, x bare, target text, met)]"""
    out = []
    for op in ("sendrecv", "alltoall", "allgather"):
        for size in sorted({r["size"] for r in rows if r["op"] == op}):
            ours, stock = pick(rows, "vccl", op, size, 1), best_stock(rows, op, size)
            bare = pick(rows, "stock", "push", size, 0) if op == "sendrecv" else None
            ratio = stock["time_us"] / ours["time_us"] if ours and stock else None
            to_bare = bare["time_us"] / ours["time_us"] if ours and bare else None
            least, text = TARGETS.get((op, size), (None, ""))
            met = None
            if least is not None and ratio is not None:
                met = ratio >= least and (op != "sendrecv" or size < 256 * M or to_bare is None or to_bare >= BARE_TARGET)
            out.append((op, size, pick(rows, "stock", op, size, 0), pick(rows, "stock", op, size, 1), ours, bare, ratio, to_bare, text, met))
    return out


def yes(met):
    return "" if met is None else "yes" if met else "**no**"


def render(data):
    h = data["header"]
    parts = data["parts"]
    out = [f"Measured on {h['date']}: {h.get('gpus', 2)} x {h.get('gpu', '?')} ({h.get('links', 'links unknown')}), driver "
           f"{h.get('driver', '?')}, CUDA {h.get('cuda', '?')}, NCCL {h.get('nccl', '?')}, {h.get('cpu', '?')}, kernel "
           f"{h.get('kernel', '?')}; vccl {h.get('vccl', '?')}. Two processes, one GPU each; medians of {h.get('rounds', '?')} alternating "
           f"rounds. Bandwidths are busbw in GB/s as nccl-tests defines it; stock is NCCL with its own defaults "
           f"(NCCL_NVLS_ENABLE={h.get('nvls', '0')}).\n"]
    if data.get("proof"):
        out.append(f"NCCL's log in the same run: {data['proof']}.\n")
    rows = parts.get("registered")
    if rows:
        out.append("### Registered buffers\n")
        lines = []
        for op, size, plain, reg, ours, bare, ratio, to_bare, text, met in judge_registered(rows):
            lines.append([op, size_text(size), cell(plain, "time_us"), cell(reg, "time_us"), cell(ours, "time_us"), cell(plain, "busbw"),
                          cell(reg, "busbw"), cell(ours, "busbw"), cell(bare, "busbw"), f"{ratio:.2f}" if ratio else "-",
                          f"{to_bare:.2f}" if to_bare else "-", text, yes(met)])
        out.append(table(["operation", "size", "stock plain us", "stock registered us", "vccl us", "stock plain GB/s", "stock registered GB/s",
                          "vccl GB/s", "bare copy GB/s", "x stock", "x bare", "target", "met"], lines))
        out.append("`x stock` divides stock's better time by vccl's. The bare copy is one peer copy of that size in each direction at the "
                   "same time, back to back. alltoall and allgather run in place; the size is the whole buffer of a rank.\n")
    rows = parts.get("unregistered")
    if rows:
        out.append("### Buffers that are not registered (sendrecv)\n")
        sizes = sorted({r["size"] for r in rows})
        lines = []
        for label in dict.fromkeys(r["label"] for r in rows):
            line = [label if label in ("stock",) or label.startswith("vccl") else f"vccl, {label}"]
            for size in sizes:
                r, s = pick(rows, label, "sendrecv", size, 0), pick(rows, "stock", "sendrecv", size, 0)
                line.append(f"{r['busbw']:.1f} ({s['time_us'] / r['time_us']:.2f})" if r and s else cell(r, "busbw"))
            lines.append(line)
        out.append(table(["settings"] + [f"{size_text(s)}, GB/s (x stock)" for s in sizes], lines))
        r, s = pick(rows, "vccl recommended", "sendrecv", 256 * M, 0), pick(rows, "stock", "sendrecv", 256 * M, 0)
        if r and s:
            ratio = s["time_us"] / r["time_us"]
            out.append(f"At 256 MiB the recommended settings reach {ratio:.2f} x stock's plain bandwidth (at least {UNREGISTERED_TARGET}: "
                       f"{'met' if ratio >= UNREGISTERED_TARGET else 'not met'}). `2M x 8` means 2 MiB chunks "
                       "(NCCL_P2P_NET_CHUNKSIZE, an eighth of NCCL_BUFFSIZE) on 8 channels (NCCL_MIN_P2P_NCHANNELS, "
                       "NCCL_MAX_P2P_NCHANNELS, NCCL_NCHANNELS_PER_NET_PEER).\n")
    rows = parts.get("gemm")
    if rows:
        out.append("### Beside matrix products (8192^3, bf16, back to back)\n")
        lines = []
        for r in sorted(rows, key=lambda r: (r["size"], r["label"], r["reg"])):
            name = "bare copy" if r["op"] == "push" else f"{r['label']}, {'registered' if r['reg'] else 'plain'}"
            lines.append([size_text(r["size"]), name, f"{r['round_alone_us']:.0f}", f"{r['round_us']:.0f}", f"{r['busbw']:.1f}",
                          f"{r['alone_ms']:.3f}", f"{r['beside_ms']:.3f}", f"{r['slower_pct']:.1f}"])
        out.append(table(["sendrecv of", "by", "round alone us", "round beside us", "GB/s beside", "GEMM alone ms", "GEMM beside ms",
                          "GEMM slower %"], lines))
        verdicts = []
        for size in sorted({r["size"] for r in rows}):
            ours = pick(rows, "vccl", "sendrecv", size, 1)
            stock = [r for r in rows if r["label"] == "stock" and r["op"] == "sendrecv" and r["size"] == size]
            if ours and stock:
                best = max(r["busbw"] for r in stock)
                verdicts.append(f"{size_text(size)}: GEMM {ours['slower_pct']:.1f} % slower (at most {GEMM_TARGET:.0f}: "
                                f"{'met' if ours['slower_pct'] <= GEMM_TARGET else 'not met'}), {ours['busbw'] / best:.2f} x stock's throughput")
        out.append("; ".join(verdicts) + ".\n")
    part = parts.get("breakdown")
    if part:
        out.append("### Where a message's time goes\n")
        lines = []
        for size in sorted({r["size"] for r in part["rows"]}):
            bare, stock, ours = pick(part["rows"], "stock", "push", size, 0), best_stock(part["rows"], "sendrecv", size), \
                pick(part["rows"], "vccl", "sendrecv", size, 1)
            over = f"{ours['sync_us'] - bare['sync_us']:.1f}" if ours and bare else "-"
            lines.append([size_text(size), cell(bare, "sync_us"), cell(stock, "sync_us"), cell(ours, "sync_us"), over, cell(bare, "time_us"),
                          cell(stock, "time_us"), cell(ours, "time_us")])
        out.append(table(["size", "bare copy, waited for, us", "stock, waited for, us", "vccl, waited for, us", "vccl above the copy, us",
                          "bare copy, back to back, us", "stock, back to back, us", "vccl, back to back, us"], lines))
        if part["stages"]:
            out.append("The plugin's own clock (VCCL_TIMING=1):\n")
            out.append("```text\n" + "\n".join(f"{size_text(s['size']):>8}  {s['text']}" for s in part["stages"]) + "\n```\n")
    if data.get("notes"):
        out.append("### Notes of the run\n")
        out += [f"- {n}" for n in data["notes"]]
        out.append("")
    return "\n".join(out)


def put_into(page, text):
    with open(page) as f:
        old = f.read()
    if BEGIN not in old or END not in old:
        sys.exit(f"{page} has no {BEGIN} ... {END}")
    head, rest = old.split(BEGIN, 1)
    _, foot = rest.split(END, 1)
    with open(page, "w") as f:
        f.write(f"{head}{BEGIN}\n\n{text}\n{END}{foot}")


def verdicts(data):
    """PASS or FAIL lines for the targets."""
    out = []
    for op, size, _, _, ours, _, ratio, to_bare, text, met in judge_registered(data["parts"].get("registered") or []):
        if met is not None:
            bare = f", {to_bare:.3f} x bare" if to_bare else ""
            out.append((met, f"perf/{op} {size_text(size)}: {ratio:.3f} x stock{bare}, {ours['busbw']:.1f} GB/s (target {text})"))
    rows = data["parts"].get("unregistered") or []
    r, s = pick(rows, "vccl recommended", "sendrecv", 256 * M, 0), pick(rows, "stock", "sendrecv", 256 * M, 0)
    if r and s:
        ratio = s["time_us"] / r["time_us"]
        out.append((ratio >= UNREGISTERED_TARGET, f"perf/unregistered 256 MiB: {ratio:.3f} x stock, {r['busbw']:.1f} GB/s (at least {UNREGISTERED_TARGET})"))
        named = [(x["busbw"], x["label"]) for x in rows if x["size"] == 256 * M and x["label"] != "stock"]
        out.append((True, "perf/unregistered settings at 256 MiB: " + ", ".join(f"{label} {bw:.0f}" for bw, label in sorted(named, reverse=True))))
    rows = data["parts"].get("gemm") or []
    for size in sorted({x["size"] for x in rows}):
        ours = pick(rows, "vccl", "sendrecv", size, 1)
        stock = [x for x in rows if x["label"] == "stock" and x["op"] == "sendrecv" and x["size"] == size]
        if ours and stock:
            best = max(stock, key=lambda x: x["busbw"])
            ok = ours["slower_pct"] <= GEMM_TARGET and ours["busbw"] >= best["busbw"]
            out.append((ok, f"perf/gemm beside {size_text(size)}: {ours['slower_pct']:.1f} % slower (stock {best['slower_pct']:.1f}), round "
                            f"{ours['round_us']:.0f} us (stock {best['round_us']:.0f}), {ours['busbw']:.1f} GB/s (stock {best['busbw']:.1f})"))
    return out


def machine():
    h = {"date": datetime.date.today().isoformat(), "kernel": platform.release(), "nvls": os.environ.get("NCCL_NVLS_ENABLE", "0")}
    try:
        with open("/proc/cpuinfo") as f:
            h["cpu"] = next(x.split(":", 1)[1].strip() for x in f if x.startswith("model name"))
    except (OSError, StopIteration):
        h["cpu"] = platform.machine()
    try:
        q = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
        drivers = q.stdout.split()
        h["driver"], h["gpus"] = drivers[0], 2
        topo = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout
        m = re.search(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", topo)
        h["links"] = m.group(1) if m else "links unknown"
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    return h


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--bench", help="the nccl_bench program")
    ap.add_argument("--lib", help="folder of libnccl-net-vccl.so")
    ap.add_argument("--nccl", help="libnccl.so.2")
    ap.add_argument("--cublas", help="libcublas.so.N")
    ap.add_argument("--out", help="folder for perf.json and perf.md")
    ap.add_argument("--work", help="folder for logs")
    ap.add_argument("--parts", default="registered,unregistered,gemm,breakdown")
    ap.add_argument("--rounds", type=int, default=0)
    ap.add_argument("--limit", type=float, default=0, help="seconds in all: 440, or 170 with --quick")
    ap.add_argument("--quick", action="store_true")
    ap.add_argument("--version-text", default="", help="what the report calls this vccl")
    ap.add_argument("--render", metavar="PERF_JSON")
    ap.add_argument("--into", metavar="PAGE")
    args = ap.parse_args()
    if args.render:
        with open(args.render) as f:
            text = render(json.load(f))
        put_into(args.into, text) if args.into else print(text)
        return
    if not args.bench or not args.lib:
        ap.error("--bench and --lib are needed")
    args.bench, args.lib = os.path.abspath(args.bench), os.path.abspath(args.lib)
    args.limit = args.limit or (170 if args.quick else 440)
    args.out = args.out or "."
    args.work = args.work or tempfile.mkdtemp(prefix="vccl-perf.")
    os.makedirs(args.out, exist_ok=True)
    os.makedirs(args.work, exist_ok=True)
    run = Runner(args)
    data = {"header": machine(), "parts": {}, "notes": run.notes, "proof": None}
    data["header"]["vccl"] = args.version_text or "(version not given)"
    data["header"]["rounds"] = args.rounds or (1 if args.quick else 3)

    def save():
        data["header"].update(run.header)
        with open(os.path.join(args.out, "perf.json"), "w") as f:
            json.dump(data, f, indent=1)
        with open(os.path.join(args.out, "perf.md"), "w") as f:
            f.write(render(data))

    ok, text = proof(run)
    data["proof"] = text
    print(f"{'PASS' if ok else 'FAIL'} perf/path: {text}", flush=True)
    todo = {"registered": part_registered, "unregistered": part_unregistered, "gemm": part_gemm, "breakdown": part_breakdown}
    failed = not ok
    for name in args.parts.split(","):
        if run.left() < 15:
            run.notes.append(f"{name}: not begun, no time was left")
            continue
        try:
            data["parts"][name] = todo[name](run, args.quick)
        except Exception as e:
            run.notes.append(f"{name}: {type(e).__name__}: {e}")
        try:
            save()
        except Exception as e:
            print(f"FAIL perf/report: {type(e).__name__}: {e}", flush=True)
    for met, line in verdicts(data):
        print(f"{'PASS' if met else 'FAIL'} {line}", flush=True)
        failed = failed or not met
    for n in run.notes:
        print(f"     note: {n}", flush=True)
    save()
    print(f"     {os.path.join(args.out, 'perf.md')}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
