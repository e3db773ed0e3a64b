#!/usr/bin/env bash
# Sets up what is missing, then lints, checks types and runs the tests: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
use_python "$IMPORTS, pytest, ruff, mypy, hypothesis, ray, accelerate" -r requirements.txt -r scripts/requirements-test.txt

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest "$@"
