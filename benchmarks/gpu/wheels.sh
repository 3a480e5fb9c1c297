#!/usr/bin/env bash
# Fetch, on a machine with a network, the wheels that `make gpu` wants on one without: what a machine that has CUDA and
# torch usually lacks. The folder PDLINK_WHEELS (.whl) then goes along with the source tree.
#
#   benchmarks/gpu/wheels.sh [PYTHON_VERSION]     (default 3.12: of the machine with the GPU, whose torch is for CUDA)
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
platforms=()
for tag in manylinux_2_34 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${tag}_$(uname -m)")
done
fetch() {
    "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
        --python-version "${version}" "${platforms[@]}" -d "$folder" "$@"
}
version=${1:-3.12}
folder=${PDLINK_WHEELS:-.whl}
rm -rf "$folder"
fetch annotated-types httptools libucx-cu13 msgspec nanobind pydantic pyzmq typing-inspection
fetch "pydantic-core$(unzip -p "$folder"/pydantic-2*.whl '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core *//p')"
du -sh "$folder"
