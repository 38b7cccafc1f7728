#!/usr/bin/env bash
# Creates .venv with a Python that megatron-core's wheel accepts, and installs what constraints.txt pins.
# Called by the Makefile. PYTHON=/path/to/python overrides the search, TORCH_INDEX=URL is of wheels for CPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

is_usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_usable "$PYTHON" && { echo "$PYTHON"; return; }
        echo "error: PYTHON=$PYTHON must be Python 3.12 or 3.13 with its venv module; give another one" >&2
        return 1
    fi
    local candidate
    for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python \
        python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python python3; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    cat >&2 <<'MESSAGE'
error: no Python 3.12 or 3.13 with its venv module was found; megatron-core's wheel needs one.
Install it, for example:
    apt-get install python3.12 python3.12-venv      (Ubuntu 24.04)
    pyenv install 3.12                              (anywhere)
or name one that is elsewhere: make venv PYTHON=/path/to/python3.12
MESSAGE
    return 1
}

if [ -L .venv ]; then
    echo "error: .venv is a link to $(readlink .venv): making it again would empty that. Remove the link first" >&2
    exit 1
fi
python=$(find_python)
echo "using $("$python" --version) ($python)"
size="5.4 GB, of which PyTorch with CUDA takes 4.5"
torch=()
if [ -n "${TORCH_INDEX:-}" ]; then
    size="2.5 GB"
    torch=(--extra-index-url "$TORCH_INDEX" triton)  # which PyTorch for CPUs does not bring; tests use it
elif ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
    echo "no GPU found: PyTorch for CPUs is enough, and saves 3 GB. Add TORCH_INDEX=URL (docs/install.md)"
fi
echo "1 of 3: .venv with about 140 packages, as constraints.txt pins them: $size; $(df -Ph . | awk 'NR == 2 { print $4 }') are free"
[ -t 1 ] && quiet=() || quiet=(--quiet)  # pip's bars are for people
pip=(.venv/bin/python -m pip install "${quiet[@]}" --disable-pip-version-check)
"$python" -m venv --clear .venv
# Also for what builds packages, which pip installs in places of their own.
export PIP_CONSTRAINT=$PWD/constraints.txt PIP_BUILD_CONSTRAINT=$PWD/constraints.txt
"${pip[@]}" --upgrade pip
echo "2 of 3: moe_ft and what it needs, in a minute from a local mirror, in ten over a slow line"
"${pip[@]}" -e '.[dev,docs]' "${torch[@]}"
# Another version of Megatron than the one that constraints.txt pins. A test puts it in front on PYTHONPATH.
echo "3 of 3: megatron-core 0.18.2, for tests, in .venv/megatron"
env --unset=PIP_CONSTRAINT "${pip[@]}" --no-deps --target .venv/megatron/0.18.2 megatron-core==0.18.2
touch .venv/installed
echo ".venv is ready: $(du -sh .venv | cut -f1)"
