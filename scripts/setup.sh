# Sourced by eval.sh and scripts/test.sh: sets PYTHON to an interpreter that has the packages of the requirement
# files named in REQUIREMENTS, and makes the virtual environment .venv where there is none.
#
# An interpreter given as PYTHON, or an active virtual or conda environment, is used if it has what is needed.

IMPORTS="torch, transformers, fastchat, numpy, pandas, scipy, safetensors, shortuuid, pydantic, tqdm, matplotlib, jinja2, gguf, accelerate, sentencepiece, google.protobuf"

if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    # Every process would compile torch and transformers anew, more than half of its start. No file beside a source.
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$PWD/.venv/pycache}"
fi

has_imports() {
    "$1" -c "import importlib.util as i, sys; sys.exit(any(i.find_spec(n.strip()) is None for n in sys.argv[1].split(',')))" \
        "$2" >/dev/null 2>&1
}

use_python() {
    local imports="$1"
    shift
    if [ -z "${PYTHON:-}" ] && [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
        PYTHON=python
    fi
    if [ -n "${PYTHON:-}" ] && has_imports "$PYTHON" "$imports"; then
        return
    fi
    PYTHON=.venv/bin/python
    if [ ! -x "$PYTHON" ]; then
        echo "setting up .venv (once, some minutes; on Linux torch is several GB. Without a GPU, set" \
            "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu for its smaller build)" >&2
        python3 -m venv .venv
    fi
    if ! has_imports "$PYTHON" "$imports"; then
        # Python 3.10 comes with an older pip, which cannot build wavedrom, a package that fschat's ask for.
        "$PYTHON" -m pip install --quiet --disable-pip-version-check "pip>=23.1" >&2
        # Python compiles what it imports; to compile all modules takes as long as their installation.
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile "$@" >&2
    fi
}
