#!/usr/bin/env bash
# Set everything up and run every check: bash scripts/test.sh [arguments of pytest]
# With arguments, only pytest runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --dev
export OMP_NUM_THREADS=1

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

if [ $# = 0 ]; then
    run .venv/bin/ruff check .
    run .venv/bin/ruff format --check .
    run .venv/bin/mypy
fi
run .venv/bin/python -m pytest "$@"
