#!/usr/bin/env bash
# Builds the site of the documents, strictly (a broken link is an error), in a temporary folder: bash scripts/docs.sh
#   bash scripts/docs.sh FOLDER   keeps the site in a new folder
#   bash scripts/docs.sh serve    shows it at http://127.0.0.1:8000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -gt 1 ] || { [ "${1:-serve}" != serve ] && [ -e "$1" ]; }; then
    echo "error: docs: got '$*'; allowed: nothing, serve, or a folder that does not exist" >&2
    exit 2
fi
source scripts/setup.sh
export NO_MKDOCS_2_WARNING=1 # a note about the next major version
use_python "mkdocs, material, mkdocstrings_handlers.python" -r requirements-docs.txt
python=$(command -v "$PYTHON")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/pages"
# Pages, and the files that they link to, as they lie here; the package under its installed name.
cp --parents -r README.md SECURITY.md CHANGELOG.md CONTRIBUTING.md docs examples {data/*,data/demo/*,integrations/*}/README.md \
    data/demo/model/train_log.jsonl tests/simulated_device/{steps.json,test_batches.py} \
    tests/evaluation/{checking/test_served.py,scoring/test_intervals.py} "$work/pages"
# Tests run the blocks that say `runnable`; here the word would hide the language.
find "$work/pages" -name "*.md" -exec sed -i 's/^```python runnable$/```python/' {} +
cp mkdocs.yml "$work"
ln -s "$PWD/model" "$work/token_recycling"
if [ "${1:-}" = serve ]; then
    "$python" -m mkdocs serve --config-file "$work/mkdocs.yml"
    exit
fi
"$python" -m mkdocs build --strict --config-file "$work/mkdocs.yml"
echo "built $(find "$work/site" -name '*.html' | wc -l) pages, all links checked"
[ $# = 0 ] || mv "$work/site" "$1"
