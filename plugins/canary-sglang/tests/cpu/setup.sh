#!/usr/bin/env bash
# Makes a virtual environment in which an unmodified SGLang serves on a CPU: setup.sh VENV [SGLANG_VERSION]
# About 40 s and 2 GB with an idle machine and a near index; modules are compiled later, as they are imported.
set -euo pipefail
venv=$1
version=${2:-0.5.21}
here=$(cd "$(dirname "$0")" && pwd)
test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile)
"${pip[@]}" --no-deps -r "$here/requirements.txt"
"${pip[@]}" --no-deps "sglang==$version"
site=$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cp "$here/sglang_on_cpu.py" "$site/"
echo "import sglang_on_cpu" >"$site/sglang_on_cpu.pth"
