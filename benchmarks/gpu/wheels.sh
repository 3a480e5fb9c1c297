#!/usr/bin/env bash
# Fetch, on a machine with a network, the wheels that `make gpu` wants on one without: what a machine that has CUDA and
# torch usually lacks. Where this machine has that Python with its headers, cmake and nvcc, the native modules are built,
# too, so that no time there goes into compiling. The folder PDLINK_WHEELS (.whl) then goes along with the source tree.
#
#   benchmarks/gpu/wheels.sh [--vllm [FILE]] [PYTHON_VERSION]
#
# PYTHON_VERSION (3.12) is that of the machine with the GPU, whose torch is for CUDA. --vllm adds vLLM and NIXL, cut down
# to what its stages need (bundle.py); FILE names what the machine has, as `pip freeze` there writes it.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
platforms=()
for tag in manylinux_2_34 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${tag}_$(uname -m)")
done
fetch() { # what is named, with what it needs
    "$python" -m pip download -q --disable-pip-version-check --only-binary=:all: --implementation cp \
        --python-version "${version}" "${platforms[@]}" -d "$folder" "$@"
}
has=() vllm=""
if [[ ${1:-} == --vllm ]]; then
    vllm=yes
    shift
    if [[ -f ${1:-} ]]; then
        has=(--has "$1")
        shift
    fi
fi
version=${1:-3.12}
folder=${PDLINK_WHEELS:-.whl}
rm -rf "$folder"
# The dependencies of pyproject.toml but for numpy and numba, and what builds the native modules.
mapfile -t ours < <("$python" - << 'LIST'
import re
import tomllib

for one in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    if re.split(r"[<>=!~ ]", one)[0] not in ("numpy", "numba"):
        print(one)
LIST
)
fetch "${ours[@]}" nanobind
fetch --no-deps libucx-cu13
target=$(command -v "python$version" || true)
if [[ -n $target ]] && command -v cmake > /dev/null && command -v nvcc > /dev/null && "$target" -c '
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'; then
    built=$(mktemp -d)
    trap 'rm -rf "$built"' EXIT
    for wheel in "$folder"/nanobind-*.whl "$folder"/libucx*.whl; do "$python" -m zipfile -e "$wheel" "$built/site"; done
    PYTHONPATH=$built/site cmake -S . -B "$built/build" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$target"
    PYTHONPATH=$built/site cmake --build "$built/build" -j "$(nproc)"
    mkdir "$folder/modules"
    cp "$built"/build/*.so "$folder/modules/"
    find csrc CMakeLists.txt -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1 \
        > "$folder/modules/sources"
else
    echo "no native modules were built: that takes python$version with its headers, cmake and nvcc here"
fi
if [[ -n $vllm ]]; then "$python" benchmarks/gpu/bundle.py "$folder" "${has[@]}"; fi
du -sh "$folder"
