#!/usr/bin/env bash
# Runs the tests that meet transformers most closely on another version of it, in an environment of its own:
#   bash scripts/test_transformers.sh [VERSION [pytest arguments]]     (default: the newest that pyproject.toml allows)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERSION=${1:-}
shift || true
wanted=${VERSION:+transformers==$VERSION}
wanted=${wanted:-$(sed -n 's/^ *"\(transformers[<>=].*\)",$/\1/p' pyproject.toml)}
folder=.venv/transformers-${VERSION:-newest}

source scripts/setup.sh
use_python "$IMPORTS, pytest, xdist, hypothesis" -r requirements.txt -r requirements-test.txt
# All other packages are those of the usual environment.
[ -x "$folder/bin/python" ] || "$PYTHON" -m venv "$folder"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/usual.pth"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade --no-deps "$wanted" >&2

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$folder/bin/python" -c 'import transformers; print("transformers", transformers.__version__)' >&2
"$folder/bin/python" -m pytest -n auto --maxprocesses 4 --dist loadfile tests/model "$@"
