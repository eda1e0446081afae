#!/usr/bin/env bash
# Tests and measures vccl on two real GPUs. Needs the built library, python3 with PyTorch, a C++ compiler
# and two GPUs that can reach each other; no CUDA toolkit, no Rust.
set -uo pipefail

usage() {
    cat <<'USAGE'
usage: run.sh [--lib FILE] [--driver FILE] [--steps a,b,c] [--nccl FOLDER_OR_FILE ...] [--nccl-tests FOLDER]
              [--programs FOLDER] [--quick] [--budget SECONDS] [--out FOLDER]

--lib FILE          the plugin (target/dist/lib/libnccl-net-vccl.so)
--driver FILE       the conformance driver (target/dist/bin/plugin_driver)
--steps LIST        of conformance,torch,versions,nccl-tests,perf; these by default, in this order
--nccl WHERE        another libnccl.so.2 for the step versions, or a folder with one; may be repeated
--nccl-tests FOLDER with sendrecv_perf, alltoall_perf, all_gather_perf
--programs FOLDER   with nccl_smoke and nccl_bench already built, if there is no compiler
--scenarios LIST    of torch_suite.py's scenarios, instead of all
--parts LIST        of perf.py's parts, instead of all
--quick             fewer sizes, types and rounds
--budget SECONDS    for all steps together (no limit by default); what does not fit is cut short
--out FOLDER        gets summary.txt, perf.json, perf.md and logs.tar.gz (target/gpu-results)

Prints one line per check, PASS, FAIL or SKIP, and 'N passed, N failed' at the end. Exits 1 if any failed.
A step that fails does not stop the next.
USAGE
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
lib=$root/target/dist/lib/libnccl-net-vccl.so
driver=$root/target/dist/bin/plugin_driver
steps=conformance,torch,versions,nccl-tests,perf
out=$root/target/gpu-results
nccl_tests='' programs='' quick='' scenarios='' parts='' budget=1000000
nccls=()
while (($#)); do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --quick) quick=1 && shift && continue ;;
    esac
    (($# > 1)) || { usage >&2 && exit 2; }
    case $1 in
    --lib) lib=$2 ;;
    --driver) driver=$2 ;;
    --steps) steps=$2 ;;
    --nccl) nccls+=("$2") ;;
    --nccl-tests) nccl_tests=$2 ;;
    --programs) programs=$2 ;;
    --scenarios) scenarios=$2 ;;
    --parts) parts=$2 ;;
    --budget) budget=$2 ;;
    --out) out=$2 ;;
    *) usage >&2 && exit 2 ;;
    esac
    shift 2
done

mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/vccl-gpu.XXXXXX")
logs=$work/logs
mkdir -p "$logs" "$work/bin"
trap 'rm -rf "$work"' EXIT
summary=$out/summary.txt
: >"$summary"
SECONDS=0
# NVLink SHARP needs more than two GPUs to gain anything; NCCL_NVLS_ENABLE=2 in the environment turns it back on.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

say() { echo "$*" | tee -a "$summary"; }
has() { [[ ,$steps, == *,$1,* ]]; }
# limit SECONDS: that, or what is left of the budget
limit() {
    local left=$((${budget%.*} - SECONDS))
    echo $((left < $1 ? (left > 1 ? left : 1) : $1))
}
# The lines of a step that matter, on the screen and in the summary.
lines() { grep -E --line-buffered '^(PASS|FAIL|SKIP|     |#)' | cut -c1-400 | tee -a "$summary"; }
# shellcheck disable=SC2030
vccl_env() { # vccl_env registered|unregistered COMMAND...: under the recipe
    local kind=$1
    shift
    (
        set -a
        VCCL_RECIPE=$kind
        # shellcheck source-path=SCRIPTDIR source=recipe.env
        . "$here/recipe.env"
        unset VCCL_RECIPE
        LD_LIBRARY_PATH=$(dirname "$lib")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        set +a
        "$@"
    )
}
left_behind() {
    local found
    found=$({ find /dev/shm -maxdepth 1 -name '*vccl*' 2>/dev/null; grep -o ' /[^ ]*vccl[^ ]*$' /proc/net/unix 2>/dev/null; } | head -4 | tr '\n' ' ')
    [[ -z $found ]] || say "FAIL $1/left behind: $found"
}

# ---------------------------------------------------------------- what is here

lib=$(readlink -f "$lib")
[[ -f $lib ]] || { echo "no plugin at $lib: build it with ci/build, or name it with --lib" >&2 && exit 2; }
if [[ $(basename "$lib") != libnccl-net-vccl.so ]]; then
    cp "$lib" "$work/bin/libnccl-net-vccl.so" && lib=$work/bin/libnccl-net-vccl.so
fi
python=$(command -v python3) || { echo "no python3" >&2 && exit 2; }

# Libraries that Python packages brought: NCCL and cuBLAS
find_library() {
    "$python" - "$1" <<'PY'
import glob, os, sys
name = sys.argv[1]
found = []
for p in sys.path:
    found += glob.glob(os.path.join(p, "nvidia", "*", "lib", name))
    found += glob.glob(os.path.join(p, "torch", "lib", name))
found += glob.glob(f"/usr/local/cuda*/lib64/{name}") + glob.glob(f"/usr/lib/x86_64-linux-gnu/{name}")
print(found[0] if found else "")
PY
}
bundled=$(find_library 'libnccl.so.2')
cublas=$(find_library 'libcublas.so.1[0-9]')
bundled=${bundled:-libnccl.so.2}

say "# $(date -u +%FT%TZ) $(uname -r), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1 || echo 'no nvidia-smi')"
say "# plugin $(sha256sum "$lib" | cut -c1-12), nccl $bundled, steps $steps"

compile() {
    local name=$1 cxx
    if [[ -n $programs && -x $programs/$name ]]; then
        cp "$programs/$name" "$work/bin/$name" && return
    fi
    for cxx in "${CXX:-c++}" g++ clang++ "nvcc -x c++"; do
        # shellcheck disable=SC2086
        if timeout 120 $cxx -O2 -std=c++17 -o "$work/bin/$name" "$here/$name.cpp" -ldl -lpthread >"$logs/build.$name.txt" 2>&1; then
            return
        fi
    done
    say "FAIL build/$name: $(grep -m1 -i error "$logs/build.$name.txt" || tail -1 "$logs/build.$name.txt")"
    return 1
}
if has versions || has perf; then
    compile nccl_smoke &
    compile nccl_bench
    wait
fi

# ---------------------------------------------------------------- the steps

# Every kind of memory, side by side: most of a case's time is the start of its processes.
step_conformance() {
    [[ -x $driver ]] || { say "FAIL conformance: no driver at $driver" && return; }
    local kind log last seconds pids=() kinds=(vmm cuda host vmm:host host:vmm vmm-private)
    [[ -n $quick ]] && kinds=(vmm cuda host)
    seconds=$(limit 200)
    for kind in "${kinds[@]}"; do
        log=$logs/conformance.${kind/:/-to-}.txt
        local more=()
        [[ $kind == vmm && -z $quick ]] && more=(--large)
        (
            timeout -k 5 "$seconds" "$driver" conformance --plugin "$lib" --memory "$kind" --timeout 40 ${more[@]+"${more[@]}"} >"$log" 2>&1
            echo "exit code $?" >>"$log"
        ) &
        pids+=($!)
    done
    wait "${pids[@]}"
    for kind in "${kinds[@]}"; do
        log=$logs/conformance.${kind/:/-to-}.txt
        last=$(grep -E '^[0-9]+ passed' "$log" | tail -1)
        if [[ $(tail -1 "$log") == "exit code 0" && -n $last ]]; then
            say "PASS conformance/$kind: $last"
        else
            say "FAIL conformance/$kind: ${last:-not finished in $seconds s}, $(tail -1 "$log")"
            { grep -A4 '^FAILED' "$log" | grep -vE '^(ok|skipped|--)' | head -24; [[ -n $last ]] || tail -4 "$log"; } |
                cut -c1-200 | sed 's/^/     | /' | lines
        fi
    done
    left_behind conformance
}

torch_suite() { # torch_suite LABEL TOTAL ARGS...
    local label=$1 total=$2 kind=$3
    shift 3
    total=$(limit "$total")
    vccl_env "$kind" timeout -k 10 $((total + 20)) "$python" "$here/torch_suite.py" --label "$label" --out "$logs/torch" \
        --total $((total > 60 ? total - 60 : 1)) --limit $((total < 150 ? total : 150)) "$@" >"$logs/$label.txt" 2>&1
    local rc=$?
    lines <"$logs/$label.txt"
    grep -qE '^[0-9]+ passed' "$logs/$label.txt" || say "FAIL $label: no result, exit code $rc: $(tail -1 "$logs/$label.txt" | cut -c1-200)"
}

step_torch() {
    "$python" -c 'import torch, sys; sys.exit(torch.cuda.device_count() < 2)' >"$logs/torch.import.txt" 2>&1 ||
        { say "FAIL torch: PyTorch with two GPUs is needed: $(tail -1 "$logs/torch.import.txt")" && return; }
    # The buffers of these are registered, or do not depend on it.
    local names=${scenarios:-plain,expandable,hook,mempool,comms,graphs,cycles,held,abort,abort-api,abort-alone}
    torch_suite torch 460 registered --scenarios "$names" ${quick:+--core}
    # The other recipe, with what it is meant for.
    [[ -n $scenarios ]] || torch_suite torch-unregistered 90 unregistered --scenarios plain --core
}

# Whether this NCCL's ncclCommAbort hangs after a peer's death by itself, with no plugin.
socket_abort_hangs() { # socket_abort_hangs LIBNCCL NAME
    NCCL_NET_PLUGIN=none NCCL_NET=Socket NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 timeout -k 5 "$(limit 60)" \
        "$work/bin/nccl_smoke" --nccl "$1" --label socket --checks kill --limit 50 >"$logs/$2.socket.txt" 2>&1
    grep -q '^FAIL.*abort NOT done' "$logs/$2.socket.txt"
}

smoke() { # smoke LABEL LIBNCCL REG CHECKS
    local label=$1 file=$2 reg=$3 checks=$4 kind=unregistered
    local name=$label.reg$reg.${checks//,/-}
    [[ $reg == 1 ]] && kind=registered
    mkdir -p "$logs/$name"
    NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,REG NCCL_DEBUG_FILE=$logs/$name/%p.log \
        vccl_env $kind timeout -k 5 "$(limit 80)" "$work/bin/nccl_smoke" --nccl "$file" --label "$label" --reg "$reg" \
        --checks "$checks" --limit "$(limit 70)" ${quick:+--cycles 4} >"$logs/$name.txt" 2>&1
    local rc=$? good
    good=$(grep '^PASS' "$logs/$name.txt" | sed 's|^PASS [^/]*/||; s| reg=.*||' | tr '\n' ' ')
    if ((rc == 0)); then
        say "PASS $label/reg=$reg: ${good% }, $(awk '/ cases/ { for (i = 2; i <= NF; i++) if ($i ~ /^cases/) n += $(i - 1) } END { print n + 0 }' "$logs/$name.txt") cases"
    elif [[ $checks == kill ]] && grep -q '^FAIL.* error 6 .*abort NOT done' "$logs/$name.txt" && socket_abort_hangs "$file" "$name"; then
        # 2.21.5 was seen to do so.
        say "PASS $label/reg=$reg: peer-killed was reported as ncclRemoteError"
        say "SKIP $label/abort after that: it does not come back with this NCCL's own socket transport either"
    else
        grep '^FAIL' "$logs/$name.txt" | lines
        grep -q '^FAIL' "$logs/$name.txt" ||
            say "FAIL $label/reg=$reg $checks: exit code $rc: $(tail -1 "$logs/$name.txt" | cut -c1-200)"
        say "     | passed before: ${good:-nothing}"
        grep -h 'NCCL WARN' "$logs/$name"/*.log 2>/dev/null | head -4 | sed 's/^/     | /' | lines
    fi
    local proof=(--label "$label/$checks/reg=$reg")
    [[ $reg == 1 ]] && proof+=(--registered)
    "$python" "$here/nccl_log.py" "${proof[@]}" "$logs/$name" | lines
    left_behind "$label"
}

step_versions() {
    [[ -x $work/bin/nccl_smoke ]] || { say "FAIL versions: nccl_smoke was not built" && return; }
    local where file version label built
    built=$("$python" -c 'import torch; print(*torch.cuda.nccl.version(), sep=".")' 2>/dev/null || echo 0)
    for where in "$bundled" ${nccls[@]+"${nccls[@]}"}; do
        file=$where
        [[ -d $where ]] && file=$(find "$where" -name 'libnccl.so.2*' | sort | head -1)
        if [[ $file == */* && ! -f $file ]]; then
            say "FAIL versions: no libnccl.so.2 in $where" && continue
        fi
        version=$("$python" -c 'import ctypes, sys
v = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(v))
print(f"{v.value // 10000}.{v.value // 100 % 100}.{v.value % 100}")' "$file" 2>"$logs/version.txt") ||
            { say "FAIL versions: $file does not load: $(tail -1 "$logs/version.txt" | cut -c1-200)" && continue; }
        label=nccl-$version
        smoke "$label" "$file" 0 ops,comms
        smoke "$label" "$file" 1 ops,comms,cycles
        smoke "$label" "$file" 1 kill
        [[ $where == "$bundled" ]] && continue
        if [[ $(printf '%s\n%s\n' "$built" "$version" | sort -V | head -1) != "$built" ]]; then
            say "SKIP $label/torch: this PyTorch was built for NCCL $built and needs its symbols"
        else
            torch_suite "$label-torch" 130 registered --core --preload "$file"
        fi
    done
}

step_nccl_tests() {
    [[ -n $nccl_tests ]] || { say "SKIP nccl-tests: no folder given (--nccl-tests)" && return; }
    local op kind label env_kind rc run nccl_dir
    nccl_dir=$(dirname "$bundled")
    for op in sendrecv alltoall all_gather; do
        [[ -x $nccl_tests/${op}_perf ]] || { say "SKIP nccl-tests/$op: not in $nccl_tests" && continue; }
        # Two processes where the binary was built with MPI and there is an mpirun; else two GPUs in one process.
        run=("$nccl_tests/${op}_perf" -g 2)
        if ldd "$nccl_tests/${op}_perf" 2>/dev/null | grep -q 'libmpi.*=> /' && command -v mpirun >/dev/null; then
            run=(mpirun --allow-run-as-root -np 2 "$nccl_tests/${op}_perf" -g 1)
        fi
        for kind in stock vccl; do
            label=nccl-tests.$op.$kind
            env_kind=(env)
            [[ $kind == vccl ]] && env_kind=(vccl_env registered env NCCL_DEBUG=INFO "NCCL_DEBUG_SUBSYS=INIT,NET" "NCCL_DEBUG_FILE=$logs/$label.%p.log")
            # shellcheck disable=SC2031
            LD_LIBRARY_PATH=$nccl_dir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "${env_kind[@]}" timeout -k 5 "$(limit 60)" "${run[@]}" \
                -b 64K -e 256M -f 8 -w 5 -n 20 -c 1 -R 1 >"$logs/$label.txt" 2>&1
            rc=$?
            if ((rc == 0)) && grep -q 'Out of bounds values : 0 OK' "$logs/$label.txt"; then
                say "PASS nccl-tests/$op/$kind: $(grep 'Avg bus bandwidth' "$logs/$label.txt" | tr -s ' #' ' ')"
            else
                say "FAIL nccl-tests/$op/$kind: exit code $rc: $(grep -iE 'error|fail|wrong|invalid' "$logs/$label.txt" | head -2 | tr '\n' ' ' | cut -c1-200)"
            fi
            grep -E '^ +[0-9]' "$logs/$label.txt" | sed 's/^/     | /' | cut -c1-140 | tee -a "$summary"
            if [[ $kind == vccl ]]; then
                # One process holds both ranks, unless MPI started two.
                local ranks=1
                [[ ${run[0]} == mpirun ]] && ranks=2
                "$python" "$here/nccl_log.py" --ranks $ranks --label "nccl-tests/$op" "$logs/$label".*.log | lines
            fi
        done
    done
}

step_perf() {
    [[ -x $work/bin/nccl_bench ]] || { say "FAIL perf: nccl_bench was not built" && return; }
    local seconds=440 version
    [[ -n $quick ]] && seconds=170
    seconds=$(limit $seconds)
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" 2>/dev/null | head -1)
    timeout -k 10 $((seconds + 30)) "$python" "$here/perf.py" --bench "$work/bin/nccl_bench" --lib "$(dirname "$lib")" --nccl "$bundled" \
        --out "$out" --work "$logs/perf" --limit "$seconds" --version-text "${version:-?} ($(sha256sum "$lib" | cut -c1-12))" \
        ${cublas:+--cublas "$cublas"} ${quick:+--quick} ${parts:+--parts "$parts"} >"$logs/perf.txt" 2>&1
    local rc=$?
    lines <"$logs/perf.txt"
    grep -q 'perf.md' "$logs/perf.txt" || say "FAIL perf: no report, exit code $rc: $(tail -1 "$logs/perf.txt" | cut -c1-200)"
}

for step in ${steps//,/ }; do
    case $step in
    conformance | torch | versions | nccl-tests | perf) ;;
    *) say "FAIL $step: there is no such step" && continue ;;
    esac
    if ((SECONDS + 5 > ${budget%.*})); then
        say "FAIL $step: not begun, the budget of $budget s was spent" && continue
    fi
    begun=$SECONDS
    say "== $step"
    "step_${step//-/_}"
    say "== $step: $((SECONDS - begun)) s"
done

tar -C "$work" -czf "$out/logs.tar.gz" logs 2>/dev/null
passed=$(grep -c '^PASS' "$summary")
failed=$(grep -c '^FAIL' "$summary")
say "$passed passed, $failed failed in $SECONDS s"
((failed == 0))
