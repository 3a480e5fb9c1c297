#!/usr/bin/env bash
# Everything that needs a GPU, on a bare machine with nvcc, torch and no network: build, check on the CPU, check on the
# GPU, watch with compute-sanitizer, two processes on one GPU, benchmarks. A short table comes last, JSON beside it.
#
#   benchmarks/gpu/run.sh [RESULTS_FOLDER]      (default benchmarks/results)
#
# PYTHON (python3) must have torch, transformers, numpy, numba, nanobind, pytest, pytest-timeout and hypothesis; what
# else is missing (msgspec, pydantic and what it needs, libucx-cu13, ...) may lie as wheels in the folder PDLINK_WHEELS
# (.whl). Nothing is written into the source tree but results.
# Exit: 0 all done and every bar met, 1 something failed or missed its bar, 3 no GPU (build and CPU checks are done).
set -u -o pipefail
cd "$(dirname "$0")/../.."
source_tree=$PWD
results=$(mkdir -p "${1:-benchmarks/results}" && cd "${1:-benchmarks/results}" && pwd) || exit 1
python=${PYTHON:-python3}
work=${TMPDIR:-/tmp}/pdlink-gpu-$(id -u)
tree=$work/tree
wheels=${PDLINK_WHEELS:-.whl}
failed=()

step() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" || {
        echo "== $name FAILED ($?)"
        failed+=("$name")
        return 1
    }
}

build() {
    mkdir -p "$work" || return
    rm -rf "$tree" && mkdir "$tree" || return
    cp -a pdlink proxy benchmarks packages tests csrc pyproject.toml CMakeLists.txt "$tree" || return
    rm -f "$tree"/pdlink/*.so
    "$python" -m cmake --version > /dev/null 2>&1 && cmake=("$python" -m cmake) || cmake=(cmake)
    "${cmake[@]}" -S "$tree" -B "$work/build" -DCMAKE_BUILD_TYPE=Release \
        -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" || return
    "${cmake[@]}" --build "$work/build" -j "$(nproc)" --target _copy _cuda _tcp || return
    "${cmake[@]}" --build "$work/build" -j "$(nproc)" --target _ucx || echo "built without UCX"
    cp "$work"/build/*.so "$tree/pdlink/" || return
    "$python" -c 'from pdlink import _cuda; assert _cuda.fatbin(), "built without nvcc: no GPU kernels"'
}

export PYTHONPATH=$tree:$tree/packages:$work/site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if compgen -G "$wheels/*.whl" > /dev/null; then
    step "carried wheels" 120 "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade \
        --target "$work/site" "$wheels"/*.whl
fi
export -f build
export python work tree
step build 400 bash -c build || exit 1
cd "$tree" || exit 1
# Settings of pytest plugins that are not here are no error.
pytest=("$python" -m pytest -p no:cacheprovider -p no:randomly -W ignore::pytest.PytestConfigWarning)
step "kernels on the CPU, driver calls on a test double" 300 "${pytest[@]}" tests/cuda -m "not gpu"

find_gpu='
import sys
from pdlink.cuda.driver import Device
from pdlink.errors import PdlinkError
device = Device(0)
try:
    device.open()
except PdlinkError as error:
    sys.exit(f"== {error}")
print("GPU:", device.name)
'
if ! "$python" -c "$find_gpu"; then
    echo "== NO GPU: the build and the CPU checks above are all that was done. ${failed[*]:+Failed: ${failed[*]}}"
    exit 3
fi
step "correctness on the GPU" 300 "${pytest[@]}" tests/cuda -m gpu
if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
        step "compute-sanitizer $tool" 300 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" -m pdlink_bench.gpu.sanitize
    done
else
    failed+=("compute-sanitizer is not here")
fi
date=$(date -u +%Y-%m-%d)
json=$results/$date-gpu.json
step benchmarks 540 "$python" -m pdlink_bench.gpu.bench --out "$json"
echo "results: ${json#"$source_tree"/}"
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all checks passed and every bar was met"
