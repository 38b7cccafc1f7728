#!/usr/bin/env bash
# Creates .venv/bridge, or the folder that is given: the packages of .venv, and Megatron-Bridge with its own.
# Called by the Makefile. It has no pip: that of .venv installs, and both must be on one version of Python.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-.venv/bridge}
python=$(readlink --canonicalize .venv/bin/python)
base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -m venv --clear --without-pip "$folder"
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$base" > "$packages/project.pth"
echo "Megatron-Bridge and what it imports: 0.5 GB"
.venv/bin/python -m pip --python "$folder/bin/python" install --quiet --disable-pip-version-check \
    --no-deps --requirement tests/bridge/requirements.txt
# Packages for GPUs that Bridge names are lent by tests/bridge/lent.py, in each process: scripts know nothing
# of it. The link is relative, so that a checkout may be moved.
module=lent_to_bridge
ln --symbolic --relative --force tests/bridge/lent.py "$packages/${module}.py"
echo "import $module; $module.install()" > "$packages/${module}.pth"
touch "$folder/installed"
