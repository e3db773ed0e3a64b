#!/usr/bin/env bash
# Checks the installed packages against the published vulnerabilities: bash scripts/audit.sh [pip-audit arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
use_python "$IMPORTS" -r requirements.txt
has_imports "$PYTHON" pip_audit || "$PYTHON" -m pip install --quiet --disable-pip-version-check "pip-audit>=2.7,<3" >&2
"$PYTHON" -m pip_audit --local --progress-spinner off "$@"
