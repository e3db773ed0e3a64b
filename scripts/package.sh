#!/usr/bin/env bash
# Builds the wheel and the source archive into dist/ twice, and refuses bytes that differ: bash scripts/package.sh
# --run: then runs the wheel as a user does, by uvx in a fresh environment, with packages from the index (3 GB for torch).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Times of files in the archives: the last commit's, so that everyone builds the same bytes of it.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
tools=(build twine)
case "${1:-}" in
    "") ;;
    --run) tools+=(uv) ;;
    *) echo "error: got '$1'; allowed: --run, or nothing" >&2; exit 2 ;;
esac
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/tools"
"$folder/tools/bin/python" -m pip install --quiet --disable-pip-version-check "${tools[@]}" >&2
rm -rf dist
for out in dist "$folder/again"; do
    rm -rf build token_recycling.egg-info  # what one build leaves must not be in the next
    "$folder/tools/bin/python" -m build --outdir "$out" . >"$folder/log" || { cat "$folder/log" >&2; exit 1; }
done
diff -r dist "$folder/again" || { echo "error: two builds of one source differ; see above" >&2; exit 1; }
"$folder/tools/bin/python" -m twine check --strict dist/*
sha256sum dist/*
if [ "${1:-}" = --run ]; then
    wheel=$(realpath dist/*.whl)
    demo=$PWD/data/demo/model
    cd "$folder"
    tools/bin/uvx --from "$wheel" token-recycling doctor
    tools/bin/uvx --from "$wheel" token-recycling generate --model-path "$demo" --prompt "The sea is" --max-new-tokens 20
fi
