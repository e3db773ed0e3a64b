#!/usr/bin/env bash
# Installs SGLang without its compiled parts, and holds the plug-in to it: bash integrations/sglang/test.sh [pytest arguments]
# Settings: VENV (folder of the environment, default .venv/sglang), PYTHON (3.11)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
VENV="${VENV:-.venv/sglang}"

if ! "$VENV/bin/python" -c 'import sglang, pytest' 2>/dev/null; then
    "${PYTHON:-python3}" -m venv "$VENV"
    install=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${install[@]}" torch==2.13.0 >&2
    "${install[@]}" --no-deps sglang==0.5.23 >&2
    # What its modules import that is not compiled for CUDA.
    "${install[@]}" -r integrations/sglang/requirements-test.txt >&2
fi
# From a copy: a build leaves files beside its sources.
rm -rf "$VENV/source" && mkdir -p "$VENV/source" && cp -r integrations/vllm integrations/sglang "$VENV/source/"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
    "$VENV/source/vllm" "$VENV/source/sglang" >&2
exec "$VENV/bin/python" -m pytest --confcutdir=tests/integrations -p no:cacheprovider tests/integrations/sglang "$@"
