#!/usr/bin/env bash
# Makes a Python, on a machine without a GPU, that is a lent machine's as nearly as possible: the same torch and
# triton, the packages that matter here, none of the versions that this project pins. 8 GB, 5 to 9 minutes.
#   bash tools/gpu_day/imitate.sh FOLDER        then: make gpu-day DAY=first PYTHON=FOLDER/bin/python
set -euo pipefail
FOLDER=$1
"${PYTHON:-.venv/bin/python}" -m venv "$FOLDER"
install() { "$FOLDER/bin/pip" install -q --disable-pip-version-check "$@"; }
install torch==2.11.0
install numpy==2.5.2 transformers==5.17.0 tokenizers==0.23.2 safetensors==0.8.0 sentencepiece==0.2.2 \
    tiktoken==0.14.0 accelerate==1.15.0 filelock fsspec jinja2 psutil rich tensorboard xxhash pytest \
    pytest-timeout pytest-xdist hypothesis einops pyyaml msgpack packaging prometheus-client ninja wheel setuptools \
    h5py scipy pandas protobuf onnx==1.23.1 onnxscript==0.7.2 mpi4py cuda-bindings cuda-core
# Newer packages bring these, and the lent machine does not have them.
"$FOLDER/bin/pip" uninstall -q -y pydantic pydantic-core annotated-types typing-inspection
"$FOLDER/bin/python" -c "import torch, triton; print(torch.__version__, triton.__version__)"
