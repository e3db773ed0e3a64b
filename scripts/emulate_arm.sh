#!/usr/bin/env bash
# Compiles the CPU kernels for ARM (aarch64) and tests them under emulation on an x86 machine with Debian:
#   bash scripts/emulate_arm.sh [pytest arguments]   (no arguments: the tests of the kernels, about half an hour)
# Without tests/conftest.py, whose imports take minutes there. Once: dpkg --add-architecture arm64; apt-get update; apt-get install g++-aarch64-linux-gnu libsimde-dev qemu-user-static
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
use_python "$IMPORTS, pytest, hypothesis" -r requirements.txt -r requirements-test.txt
folder=.venv/arm
usual=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$("$PYTHON" -c 'import sys; print("{}.{}".format(*sys.version_info))')
if [ ! -d "$folder/site" ]; then
    mkdir -p "$folder"/{debs,wheels,root,include,new}
    (cd "$folder/debs" && apt-get download -q {"python$version",{python,libpython}"$version"-minimal,"libpython$version-stdlib",lib{c6,gcc-s1,stdc++6,gomp1,ssl3,ffi8,expat1,bz2-1.0,lzma5,sqlite3-0,uuid1},zlib1g}:arm64)
    for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder/root"; done
    # The last torch of the package index that is for ARM and without CUDA. What is Python alone is the usual environment's.
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 \
        --platform manylinux2014_aarch64 --python-version "$version" --abi "cp${version/./}" --abi abi3 \
        -d "$folder/wheels" torch==2.9.1 'numpy<3' safetensors tokenizers regex pyyaml markupsafe hypothesis
    for wheel in "$folder"/wheels/*.whl; do "$PYTHON" -m zipfile -e "$wheel" "$folder/new"; done
    ln -s /usr/include/simde "$folder/include/simde"
    printf '#!/bin/sh\nexec aarch64-linux-gnu-g++ -I%q "$@"\n' "$PWD/$folder/include" >"$folder/g++"
    chmod +x "$folder/g++"
    mv "$folder/new" "$folder/site"
fi
[ $# -gt 0 ] || set -- tests/model/kernels/test_{short_pass,short_attention,row_operations,top_k,quantised_weights}.py
export PYTHONPATH="$PWD:$PWD/$folder/site:$usual" CXX="$PWD/$folder/g++" TORCH_EXTENSIONS_DIR="$PWD/$folder/extensions" OMP_NUM_THREADS=1
exec qemu-aarch64-static -cpu max,sve=off -L "$folder/root" "$folder/root/usr/bin/python$version" -m pytest --noconftest -p no:cacheprovider "$@"
