#!/usr/bin/env bash
# Everything that needs a GPU, on a bare machine with nvcc, torch and no network: build, check on the GPU, benchmarks,
# compute-sanitizer, check on the CPU. One stage that fails does not keep the others from running. A short table comes
# last; the JSON, one for each kind of GPU, is written after every benchmark, so that a run that is cut off leaves what it
# had, and one with --only adds to it. What a failure needs lies beside it: gpu.log has the machine, all output and the
# tests' local variables, gpu-logs what servers have written.
#
#   benchmarks/gpu/run.sh [--only STAGE[,STAGE...]] [RESULTS_FOLDER]     (default: all stages, benchmarks/results)
#   benchmarks/gpu/run.sh --list                                        (stages, cases and bars; needs no GPU)
#
# PYTHON (python3, with its headers) must have torch, transformers, numpy, numba, pytest, pytest-timeout, hypothesis and
# cmake or a cmake beside it; pdlink's own dependencies, nanobind and libucx-cu13 may lie as wheels in the folder
# PDLINK_WHEELS (.whl), which benchmarks/gpu/wheels.sh fills, and the native modules, too: then nothing is compiled, and
# neither nvcc nor cmake is needed. What is missing is said at the start, a line each.
# All stages take more than 600 s: for a visit whose commands have so much each, --only in two of them, and
# `wheels.sh --vllm` beforehand.
# PDLINK_GPU_SECONDS (600): end before so much time is over, and leave out what no longer fits. Each stage leaves those
# after it the time that they need at least. Nothing is written into the source tree but results.
# Exit: 0 all done and every bar met, 1 something failed, missed its bar or was not measured, 3 no GPU: then the stages
# that can run without one have run, on a double of the driver and on the CPU, and nothing is measured.
set -u -o pipefail
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
cd "$(dirname "$0")/../.."
source_tree=$PWD
stages=(gpu-tests benchmarks serving vllm conformance chaos sglang memcheck racecheck cpu-tests)
without_gpu=(conformance chaos serving cpu-tests)
declare -A most=([gpu-tests]=150 [benchmarks]=240 [serving]=240 [vllm]=200 [conformance]=180 [chaos]=120 [sglang]=260 [memcheck]=60 [racecheck]=60 [cpu-tests]=240)
declare -A least=([gpu-tests]=60 [benchmarks]=100 [serving]=150 [vllm]=120 [conformance]=60 [chaos]=80 [sglang]=100 [memcheck]=20 [racecheck]=20 [cpu-tests]=0)
python=${PYTHON:-python3}
while [[ ${1:-} == --* ]]; do
    case $1 in
        --list)
            echo "stages: build ${stages[*]}"
            PYTHONPATH=$source_tree/benchmarks exec "$python" -m pdlink_bench.gpu.figures
            ;;
        --only)
            IFS=, read -ra only <<< "${2:?--only: a list of stages, see --list}"
            for one in "${only[@]}"; do
                [[ -n ${most[$one]:-} ]] || { echo "--only: got $one; expected some of ${stages[*]}" >&2; exit 2; }
            done
            stages=("${only[@]}") without_gpu=("${only[@]}")
            shift
            ;;
        *) echo "got $1; expected --only or --list" >&2; exit 2 ;;
    esac
    shift
done
results=$(mkdir -p "${1:-benchmarks/results}" && cd "${1:-benchmarks/results}" && pwd) || exit 1
work=${TMPDIR:-/tmp}/pdlink-gpu-$(id -u)
tree=$work/tree
wheels=$(realpath -m "${PDLINK_WHEELS:-.whl}")
seconds=${PDLINK_GPU_SECONDS:-600}
unset PDLINK_WHEELS PDLINK_GPU_SECONDS # workers would take them for settings
reserved=0 # seconds that later stages need
outcomes=$work/stages
log=$results/gpu.log
mkdir -p "$work" && : > "$log" && : > "$outcomes" || exit 1
rm -rf "$results/gpu-logs" "$work/pytest"
{ # the machine, as far as it says
    uname -srm
    echo "files open at most: $(ulimit -n); cores: $(nproc); $(grep MemAvailable /proc/meminfo)"
    nvidia-smi || echo "no nvidia-smi"
    nvidia-smi topo -m
    nvcc --version | tail -2
    "$python" -m pip list --disable-pip-version-check 2> /dev/null | grep -iE '^(torch|triton|vllm|sglang|sgl|flashinfer|transformers|numba|numpy|pytest|libucx|nvidia-cuda-runtime|nixl|lmcache)'
    env | grep -E '^(CUDA|NVIDIA|PYTORCH|TORCH|VLLM|SGLANG|UCX|PDLINK)_' | sort
} >> "$log" 2>&1

note() { # NAME OUTCOME SECONDS
    printf '%s\t%s\t%s\n' "$1" "$2" "$3" >> "$outcomes"
    [[ $2 == ok ]] || echo "== $1: $2" | tee -a "$log"
}

keep_logs() { # NAME: what servers have written in a stage that has failed, the last 256 KiB each
    local folder=$results/gpu-logs/${1//[^[:alnum:]]/-} one
    while IFS= read -r -d '' one; do
        mkdir -p "$folder" && tail -c 262144 "$work/pytest/$one" > "$folder/${one//\//_}"
    done < <(cd "$work/pytest" 2> /dev/null && find -- * -name '*.log' -type f -print0)
    if [[ -d $folder ]]; then echo "== logs of its servers: $folder" | tee -a "$log"; fi
}

step() { # NAME SECONDS COMMAND...: run, write down how it ended; its status
    local name=$1 limit=$2 left=$((seconds - SECONDS - 10)) start=$SECONDS rc=0 out pid tee_pid
    shift 2
    if ((left < 10)); then
        note "$name" "not run: out of time" 0
        return 1
    fi
    ((left - reserved < 60)) || left=$((left - reserved))
    limit=$((limit < left ? limit : left))
    echo "== $name (at most $limit s)" | tee -a "$log"
    # Not in a pipe: a process that the command has left would keep it open, and the GPU. Those in its group end with it.
    exec {out}> >(exec tee -a "$log")
    tee_pid=$!
    timeout --kill-after=5 "$limit" "$@" >&"$out" 2>&1 < /dev/null &
    pid=$!
    wait "$pid" || rc=$?
    kill -KILL -- "-$pid" 2> /dev/null
    exec {out}>&-
    timeout 3 tail --pid="$tee_pid" -f /dev/null
    case $rc in
        0) note "$name" ok $((SECONDS - start)) ;;
        124 | 137) note "$name" "FAILED: out of time ($limit s)" $((SECONDS - start)) ;;
        *) note "$name" "FAILED ($rc)" $((SECONDS - start)) ;;
    esac
    ((rc == 0)) || keep_logs "$name"
    return "$rc"
}

sources() { # a digest of what native modules are made of
    find csrc CMakeLists.txt -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1
}

take_modules() { # that were built elsewhere of these sources, for a Python that can use them
    [[ -f $wheels/modules/sources && $(< "$wheels/modules/sources") == "$(sources)" ]] || return
    cp "$wheels"/modules/*.so "$tree/pdlink/" || return
    (cd "$tree" && "$python" -c 'from pdlink import _copy, _cuda, _http, _index, _tcp; assert _cuda.fatbin()') && return
    rm -f "$tree"/pdlink/*.so
    return 1
}

build() {
    rm -rf "$tree" && mkdir "$tree" || return
    cp -a pdlink proxy benchmarks tests csrc pyproject.toml CMakeLists.txt "$tree" || return
    rm -f "$tree"/pdlink/*.so "$tree"/benchmarks/pdlink_bench/*.so
    if take_modules; then
        echo "the native modules were carried; nothing is compiled"
        return
    fi
    cd "$tree" || return
    "$python" -m cmake --version > /dev/null 2>&1 && cmake=("$python" -m cmake) || cmake=(cmake)
    "${cmake[@]}" -S . -B "$work/build" -DCMAKE_BUILD_TYPE=Release \
        -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" || return
    "${cmake[@]}" --build "$work/build" -j "$(nproc)" --target _copy _cuda _tcp _index _http || return
    "${cmake[@]}" --build "$work/build" -j "$(nproc)" --target _ucx || echo "built without UCX"
    cp "$work"/build/*.so "$tree/pdlink/" || return
    "$python" -c 'from pdlink import _cuda; assert _cuda.fatbin(), "built without nvcc: no GPU kernels"'
}

unpack() { # what wheels.sh --vllm has made, its byte code once: servers would make it again and again
    local one
    mkdir -p "$work/site/bin" || return
    for one in "$wheels"/*.tar.xz; do
        if command -v xz > /dev/null; then
            tar -xJf "$one" -C "$work/site" || return
        else
            "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="tar")' "$one" "$work/site" || return
        fi
    done
    printf '#!%s\nfrom vllm.entrypoints.cli.main import main\nmain()\n' "$("$python" -c 'import sys; print(sys.executable)')" \
        > "$work/site/bin/vllm" && chmod +x "$work/site/bin/vllm" || return
    env -u PYTHONDONTWRITEBYTECODE "$python" -m compileall -q -j 0 "$work/site" > /dev/null 2>&1 || true
    "$python" -c 'import importlib.metadata as m; print("carried: vLLM", m.version("vllm"))'
}

# Servers of the tests are forks: where torch asks the driver whether there is a GPU, forks cannot use it any more.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
export PYTHONPATH=$tree:$tree/proxy:$tree/benchmarks:$work/site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export -f build sources take_modules unpack
export python work tree wheels
rm -rf "$work/site"
find_carried='
import importlib.metadata, pathlib, sys
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    try:
        importlib.metadata.version(wheel.name.split("-")[0])
    except importlib.metadata.PackageNotFoundError:
        print(wheel)
'
# What is installed stays as it is: vLLM and SGLang were installed with their own versions of it.
mapfile -t carried < <("$python" -c "$find_carried" "$wheels")
if ((${#carried[@]})); then
    step "carried wheels" 120 "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
        --disable-pip-version-check --target "$work/site" "${carried[@]}"
fi
if [[ -f $wheels/vllm.tar.xz ]]; then # as wheels.sh --vllm has made it
    step "carried vLLM" 120 bash -c unpack
    PATH=$work/site/bin:$PATH
fi
find_missing='
import importlib.util, pathlib, re, shutil, sys, sysconfig, tomllib
names = {"pyyaml": "yaml", "pyzmq": "zmq", "prometheus-client": "prometheus_client"}
ours = [re.split("[<>=!~ ]", one)[0] for one in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]]
wanted = [*ours, "torch", "transformers", "pytest", "pytest-timeout", "hypothesis", "nanobind"]
carried = pathlib.Path(sys.argv[1], "modules").is_dir()
wanted = [one for one in wanted if not (carried and one == "nanobind")]
missing = [one for one in wanted if importlib.util.find_spec(names.get(one, one.replace("-", "_"))) is None]
for one in missing:
    print(f"== missing: {one}; install it, or carry its wheel (benchmarks/gpu/wheels.sh)")
tools = {"nvcc": shutil.which("nvcc"), "a C++ compiler": shutil.which("c++") or shutil.which("g++")}
tools["cmake"] = shutil.which("cmake") or importlib.util.find_spec("cmake")
header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
tools[f"the headers of this python ({header})"] = header.exists()
for one in [one for one, found in tools.items() if not found and not carried]:
    missing.append(one)
    print(f"== missing: {one}; install it on the machine")
sys.exit(bool(missing))
'
"$python" -c "$find_missing" "$wheels" 2>&1 | tee -a "$log" || note "what is needed" "FAILED: see the lines above" 0
step build 300 bash -c build || exit 1
cd "$tree" || exit 1 # "python -c" finds modules in the working directory first
# Warnings of versions that nobody chose here are no failures, nor are settings of pytest plugins that are not here.
pytest=("$python" -m pytest -p no:cacheprovider -p no:randomly -p no:benchmark -W default
    -W ignore::pytest.PytestConfigWarning --timeout 120 --showlocals -rs --basetemp "$work/pytest")

find_gpu='
import sys
from pdlink.cuda.driver import Device
from pdlink.errors import PdlinkError
device = Device(0)
try:
    device.open()
except PdlinkError as error:
    sys.exit(f"== {error}")
print(f"{device.name}, driver for CUDA {device.driver.version}")
'
check_torch='
import sys, torch
if not torch.cuda.is_available():
    built = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}"
    sys.exit(f"== {built}, finds no GPU, though the driver has one: what needs torch is skipped or fails")
'
is_here() { # STAGE: whether what it needs is installed; that it can be imported is what the stage shows
    case $1 in
        serving | vllm) "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)" ;;
        sglang) "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)" ;;
        memcheck | racecheck) command -v compute-sanitizer > /dev/null ;;
    esac
}
engine_tests() { # STAGE NAME: of a real engine's servers
    if is_here "$1"; then
        step "$2 on the GPU" "${most[$1]}" "${pytest[@]}" "tests/e2e/test_$1_gpu.py" -m "$1 and gpu"
    else
        note "$2 on the GPU" "absent: $2 is not here" 0
    fi
}
sanitizer() { # TOOL
    if is_here "$1"; then
        # What the driver answers is looked at by our own code, and torch asks it for things it may not have.
        step "compute-sanitizer $1" "${most[$1]}" compute-sanitizer --tool "$1" --error-exitcode 9 \
            --report-api-errors no "$python" -m pdlink_bench.gpu.sanitize
    else
        note "compute-sanitizer $1" "not run: it is not here" 0
    fi
}
conformance() { # every promise of a transport, fences under kills and stops among them, over device memory
    local -a which=(-m gpu) several=()
    [[ -n $gpu ]] || which=(-k double)
    ! "$python" -c "import xdist" 2> /dev/null || several=(-n 3)
    step "conformance over ${memory[0]}" "${most[conformance]}" "${pytest[@]}" "${several[@]}" \
        tests/conformance/transports "${which[@]}"
}
chaos() { # all its kinds; without a GPU over host memory
    step "chaos over ${memory[1]}" "${most[chaos]}" "$python" -m pdlink chaos --quiet --seed 35 --seconds 30 --every 2 \
        --clean 4 --calm 8 --json "$results/chaos.json" "${chaos_on[@]}"
}
serving() { # pairs of vLLM servers with a large model; without a GPU with a tiny one, on vLLM's build for CPUs
    local -a command=(-m pdlink_bench.gpu.bench --out "$json" --only serving)
    [[ -n $gpu ]] || command=(-m pdlink_bench.gpu.serving "$work/serving" --rehearse)
    if is_here serving; then
        step "serving, pairs of vLLM" "${most[serving]}" "$python" "${command[@]}"
    else
        note "serving, pairs of vLLM" "absent: vLLM is not here" 0
    fi
}
run_stage() {
    case $1 in
        gpu-tests) step "checks on the GPU" "${most[$1]}" "${pytest[@]}" tests/cuda -m gpu ;;
        benchmarks) step benchmarks "${most[$1]}" "$python" -m pdlink_bench.gpu.bench --out "$json" ;;
        serving) serving ;;
        vllm) engine_tests vllm vLLM ;;
        conformance) conformance ;;
        chaos) chaos ;;
        sglang) engine_tests sglang SGLang ;;
        memcheck | racecheck) sanitizer "$1" ;;
        cpu-tests) step "CPU checks: kernels as loops, driver calls on a test double" "${most[$1]}" \
            "${pytest[@]}" tests/cuda -m "not gpu" ;;
    esac
}
run_stages() { # STAGE...
    local number later
    for ((number = 1; number <= $#; number++)); do
        reserved=0
        for later in "${@:number + 1}"; do
            if is_here "$later"; then reserved=$((reserved + ${least[$later]})); fi
        done
        run_stage "${!number}"
    done
}
if ! gpu=$("$python" -c "$find_gpu" 2>&1); then
    echo "$gpu" | tee -a "$log"
    gpu="" json=$work/none.json memory=("memory of the driver's double" "host memory")
    chaos_on=(--transport mapped)
    rm -f "$json"
    run_stages "${without_gpu[@]}"
    "$python" -m pdlink_bench.gpu.bench --show "$json" --stages "$outcomes" | tee -a "$log"
    echo "== NO GPU: the stages above ran on a double of the driver or on the CPU, nothing was measured"
    exit 3
fi
echo "GPU: $gpu" | tee -a "$log"
"$python" -c 'import os, pdlink; print("pdlink is that of", os.path.dirname(pdlink.__file__))' 2>&1 | tee -a "$log"
"$python" -c "$check_torch" 2>&1 | tee -a "$log" || note "torch and the GPU" "FAILED: see the line above" 0
card=${gpu%%,*} memory=("memory of the GPU" "memory of the GPU")
card=${card// /-}
json=$results/$(date -u +%Y-%m-%d)-gpu-${card,,}.json
chaos_on=(--transport mapped --set transport.require=mapped-cuda --set engine.device=cuda)
run_stages "${stages[@]}"
"$python" -m pdlink_bench.gpu.bench --show "$json" --stages "$outcomes" --device "$gpu" | tee -a "$log"
rc=$?
echo "results: ${json#"$source_tree"/}"
exit "$rc"
