#!/usr/bin/env bash
# Set everything up and run every check: bash scripts/test.sh [arguments of pytest]
# With arguments, only pytest runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --dev

# Nothing of the caller's settings, one thread, and the CPU platform on machines with a GPU as well.
for name in "${!SGLANG_@}" "${!EAGLE3X_@}" PYTHONPATH PYTHONHOME; do
    unset "$name"
done
export PATH OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

if [ $# = 0 ]; then
    run .venv/bin/python -m ruff check .
    run .venv/bin/python -m ruff format --check .
    run .venv/bin/python -m mypy
fi
run .venv/bin/python -m pytest "$@"
if [ $# = 0 ]; then
    # The same tests on the Triton kernels: interpreted, which Triton decides once per process.
    run env TRITON_INTERPRET=1 .venv/bin/python -m pytest -m twin tests/kernels
fi
