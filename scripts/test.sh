#!/usr/bin/env bash
# Sets up what is missing, then lints, checks types and imports, and runs the tests: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
use_python "$IMPORTS, pytest, xdist, ruff, mypy, importlinter, setuptools, hypothesis, ray" -r requirements.txt -r requirements-test.txt

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -c "from importlinter.cli import lint_imports_command as lint; lint()" --no-cache --no-logo
# A process for each core, with one thread each: threads of several would wait for each other. A file's
# tests share what is costly to set up, and stay together.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$PYTHON" -m pytest -n auto --maxprocesses 4 --dist loadfile "$@"
