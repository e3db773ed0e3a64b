#!/usr/bin/env bash
# Sets up what is missing, then lints, checks types and imports, and runs the tests: bash scripts/test.sh [pytest arguments]
# Without arguments: a quarter of the cases of each test, and of the tests that take long; another one for each commit.
# --part 1/1: all tests; -m quick: the core's laws and the reports, in a few minutes; -m "not slow": all but simulated
# GPUs and other processes.
# --setup: sets up, and no more; --lint: runs no tests.
# On another version of transformers, in an environment of its own, the tests that meet it most closely (or those named):
#   bash scripts/test.sh --transformers oldest|newest|VERSION [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
# A process for each core, with one thread each: threads of several would wait for each other. A file's
# tests share what is costly to set up, and stay together.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
parallel=(-n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder)

if [ "${1:-}" = --transformers ]; then
    range=$(sed -n 's/^ *"transformers\([<>=].*\)",$/\1/p' pyproject.toml)  # such as >=4.57,<5.25
    case "${2:-}" in
        oldest) wanted="==$(sed 's/^>=\([^,]*\),.*/\1/' <<<"$range").*" ;;
        newest) wanted=$range ;;
        [0-9]*) wanted="==$2" ;;
        *) echo "error: --transformers: got '${2:-}'; allowed: oldest, newest, or a version such as 5.24.0" >&2; exit 2 ;;
    esac
    folder=.venv/transformers-$2
    shift 2
    tests=(tests/model)
    for word; do case "$word" in tests/*) tests=() ;; esac; done
    use_python "$IMPORTS, pytest, xdist, hypothesis" -r requirements.txt -r requirements-test.txt
    # Packages that this version asks for in another version, and itself; all others are the usual environment's.
    [ -x "$folder/bin/python" ] || "$PYTHON" -m venv "$folder"
    purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
    usual=$("$PYTHON" -c "$purelib")
    echo "import site; site.addsitedir('$usual')" >"$("$folder/bin/python" -c "$purelib")/usual.pth"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "transformers$wanted" >&2
    "$folder/bin/python" -c 'import transformers; print("transformers", transformers.__version__)' >&2
    exec "$folder/bin/python" -m pytest "${parallel[@]}" "${tests[@]}" "$@"
fi

use_python "$IMPORTS, pytest, xdist, ruff, mypy, importlinter, setuptools, hypothesis, ray, fastapi, uvicorn, prometheus_client, llguidance, httpx" -r requirements.txt -r requirements-test.txt
if [ "${1:-}" = --setup ]; then exit; fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
if "$PYTHON" -c "import sys; sys.exit(sys.version_info < (3, 11))"; then
    "$PYTHON" -m mypy
else
    echo "test.sh: types are not checked on Python 3.10: the newest numpy for it has other types" >&2
fi
"$PYTHON" -c "from importlinter.cli import lint_imports_command as lint; lint()" --no-cache --no-logo
if [ "${1:-}" = --lint ]; then exit; fi
if [ $# = 0 ]; then
    commits=$(git rev-list --count HEAD 2>/dev/null || echo 0)
    set -- --part "$((commits % 4 + 1))/4"
    echo "test.sh: part ${2%/*} of 4 of the cases, by the number of commits; all: bash scripts/test.sh --part 1/1" >&2
fi
"$PYTHON" -m pytest "${parallel[@]}" "$@"
