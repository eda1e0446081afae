#!/usr/bin/env python3
"""What NCCL's own log (NCCL_DEBUG=INFO, one file per rank) proves about the path that traffic took.

usage: nccl_log.py [--registered] [--net NAME] [--ranks N] FILE_OR_FOLDER...

Exits 0 when the log of every rank shows channels `via NET/NAME` and none by another path, and, with
--registered, user buffers registered with NET (which NCCL does from 2.24 on), or declined by the plugin for a
reason that it gives.
"""
import argparse
import os
import re
import sys

CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : .*? via (\S+)")
VERSION = re.compile(r"NCCL version (\S+)")
REGISTERED = re.compile(r"NET register userbuff", re.I)
# The plugin refuses cudaMalloc memory where it would be staged.
DECLINED = re.compile(r"is not registered but goes through NCCL's buffers")
REGISTER_FAILED = re.compile(r"failed to NET register userbuff", re.I)


def read(path):
    """Counts of one log file."""
    found = {"file": path, "version": None, "channels": {}, "registered": 0, "register_failed": 0, "declined": False, "warnings": [], "plugin": []}
    with open(path, errors="replace") as f:
        for line in f:
            m = CHANNEL.search(line)
            if m:
                found["channels"][m.group(1)] = found["channels"].get(m.group(1), 0) + 1
            m = VERSION.search(line)
            if m:
                found["version"] = m.group(1)
            if REGISTER_FAILED.search(line):
                found["register_failed"] += 1
            elif REGISTERED.search(line):
                found["registered"] += 1
            found["declined"] |= DECLINED.search(line) is not None
            if "NCCL WARN" in line and len(found["warnings"]) < 5:
                found["warnings"].append(line.strip())
            if "NET/Plugin" in line and len(found["plugin"]) < 5:
                found["plugin"].append(line.strip())
    return found


def files_of(paths):
    out = []
    for p in paths:
        if os.path.isdir(p):
            out += [os.path.join(p, f) for f in sorted(os.listdir(p))]
        elif os.path.exists(p):
            out.append(p)
    return out


def prove(paths, registered=False, net="vccl", ranks=2):
    """(ok, one line that says what was seen)."""
    logs = [found for found in map(read, files_of(paths)) if found["channels"]]
    ours = re.compile(rf"^NET/{re.escape(net)}(/|$)", re.I)
    if len(logs) < ranks:
        seen = [w for found in map(read, files_of(paths)) for w in found["warnings"] + found["plugin"]]
        return False, f"{len(logs)} logs with channels, {ranks} wanted; {'; '.join(seen[:3]) or 'no warnings'}"
    total = gdr = regs = failed = 0
    other = {}
    for found in logs:
        for via, n in found["channels"].items():
            if ours.match(via):
                total += n
                gdr += n if "GDRDMA" in via else 0
            else:
                other[via] = other.get(via, 0) + n
        regs += found["registered"]
        failed += found["register_failed"]
    each = all(any(ours.match(via) for via in found["channels"]) for found in logs)
    each_reg = all(found["registered"] for found in logs)
    version = next((found["version"] for found in logs if found["version"]), "?")
    text = f"NCCL {version}: {total} channels via NET/{net}, {gdr} of them with GPU memory"
    ok = each and total > 0 and gdr > 0 and not other
    if other:
        text += f"; by another path: {other}"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if registered and numbers and tuple(map(int, numbers.groups())) < (2, 24):
        text += "; this release registers nothing with NET"
    elif registered:
        text += f"; {regs} buffers registered with NET, {failed} refused"
        if os.environ.get("VCCL_TRANSPORT") == "tcp" and all(found["declined"] for found in logs):
            text += " as cudaMalloc memory that would be staged"
        else:
            ok = ok and each_reg and failed == 0
    return ok, text


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--registered", action="store_true")
    ap.add_argument("--net", default="vccl")
    ap.add_argument("--ranks", type=int, default=2)
    ap.add_argument("--label", default="log")
    ap.add_argument("paths", nargs="+")
    args = ap.parse_args()
    ok, text = prove(args.paths, args.registered, args.net, args.ranks)
    print(f"{'PASS' if ok else 'FAIL'} {args.label}/path: {text}")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
