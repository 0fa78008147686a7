#!/bin/sh
# Remakes requirements/*.txt from pyproject.toml: names, versions and hashes, and no address of an index.
#
#   scripts/lock.sh            keeps the versions that still fit
#   scripts/lock.sh --upgrade  takes the newest of everything (any option of `uv pip compile` will do)
#
# cpu.txt and gpu.txt are whole environments for Linux on x86_64 and Python 3.12 or 3.13; dev.txt is what the
# tests need beside cpu.txt, docs.txt what the documentation's pages need beside both. The first two hold the extra hyperpod, for the image and for the tests.
# serving.txt and serving-cpu.txt are environments of their own, with another vLLM.
set -eu
cd "$(dirname "$0")/.."

lock() {
    .venv/bin/uv pip compile --quiet --python .venv/bin/python --python-version 3.12 \
        --python-platform x86_64-manylinux_2_28 --generate-hashes \
        --no-emit-index-url --no-annotate --no-header "$@" >/dev/null
}

lock pyproject.toml --extra cpu --extra hyperpod --output-file requirements/cpu.txt "$@"
lock pyproject.toml --extra gpu --extra hyperpod --output-file requirements/gpu.txt "$@"
# The packages of an extra alone, without those of this package.
extra() {
    .venv/bin/python -c '
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]], sep="\n")
' "$1"
}

extra dev | lock - --constraints requirements/cpu.txt --output-file requirements/dev.txt "$@"
extra docs | lock - --constraints requirements/cpu.txt --constraints requirements/dev.txt \
    --output-file requirements/docs.txt "$@"

# The settings for uv in pyproject.toml are for the trainer's torch.
lock --no-config requirements/serving.in --output-file requirements/serving.txt "$@"
lock --no-config requirements/serving-cpu.in --override requirements/serving-cpu-overrides.txt \
    --output-file requirements/serving-cpu.txt "$@"
