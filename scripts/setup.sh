#!/usr/bin/env bash
# Make .venv: SGLang for the CPU platform, and this package, editable.  A second call takes no time.
#
#   bash scripts/setup.sh [--dev]      --dev: with the tools that scripts/test.sh needs
#
# An interrupted call is continued by the next one.  PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SGLANG=0.5.23
TORCH=2.14.1
TORCHVISION=0.29.1
NEED_GB=11

fail() {
    printf 'error: %s\n' "$1" >&2
    printf '    hint: %s\n' "$2" >&2
    exit 1
}

dev=0
for word in "$@"; do
    case "$word" in
        --dev) dev=1 ;;
        -h | --help)
            sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) fail "unknown argument $word, allowed --dev" "bash scripts/setup.sh --help" ;;
    esac
done

suits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3 python; do
        if suits "$name"; then
            command -v "$name"
            return 0
        fi
    done
    return 1
}

started=$SECONDS
step() { printf '[%4ds] %s\n' "$((SECONDS - started))" "$1"; }

# A stamp names everything that decides what is installed, and is written last.
stamp_of() { echo "$(cat requirements/cpu.txt setup.py pyproject.toml scripts/setup.sh "$@" | sha256sum | cut -d' ' -f1) $PWD"; }
run_stamp="$(stamp_of)"
dev_stamp="$(stamp_of requirements/dev.txt)"
has_stamp() { [ -x .venv/bin/eagle3x ] && [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }
# An environment with the tools holds everything the demo needs.
if has_stamp .venv/eagle3x-dev "$dev_stamp" || { [ "$dev" = 0 ] && has_stamp .venv/eagle3x-run "$run_stamp"; }; then
    step "environment ready: .venv"
    exit 0
fi

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
    step "there is a GPU here: to serve on it, pip install sglang==$SGLANG and then pip install . in an environment"
    step "    of your own; this one is for the demo and the tests, which use the CPU everywhere"
fi

have_torch="$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)"
if [ "${have_torch%%+*}" != "$TORCH" ]; then
    free_gb="$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')"
    [ "$free_gb" -ge "$NEED_GB" ] || fail "$free_gb GB free where this folder is, $NEED_GB GB needed" \
        "free some space, or clone to another disk"
fi

if ! suits .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python="$(find_python)" || fail "no Python 3.11 or newer with venv was found" \
        "install one, for instance: apt install python3 python3-venv; or name one: PYTHON=/path/to/python3.11 bash scripts/setup.sh"
    step "creating .venv with $python"
    rm -rf .venv
    "$python" -m venv .venv
fi

# Where an earlier call was killed, a distribution may look installed and lack files.  pip goes by its
# folder of metadata alone, so that goes, and the distribution is installed over what is there.
.venv/bin/python - <<'CHECK'
import csv, pathlib, shutil, sysconfig

site = pathlib.Path(sysconfig.get_paths()["purelib"])


def whole(info):
    record = info / "RECORD"
    if not record.is_file():
        return False
    for name, _, size in csv.reader(record.read_text(encoding="utf-8").splitlines()):
        file = site / name
        if not name.endswith(".pyc") and not (file.is_file() and size in ("", str(file.stat().st_size))):
            return False
    return True


for info in site.glob("*.dist-info"):
    if not whole(info):
        print(f"    incomplete, installing it again: {info.name.removesuffix('.dist-info')}")
        shutil.rmtree(info)
CHECK

# On a terminal pip shows its own bars; in a log the steps are enough.  It would call SGLang's CUDA packages,
# which are left out on purpose, conflicts.
quiet=--quiet
[ ! -t 1 ] || quiet=--progress-bar=on
pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install "$quiet" --no-warn-conflicts "$@"; }

step "torch $TORCH and torchvision $TORCHVISION, which SGLang pins: about 5.5 GB installed on x86-64, with the"
step "    CUDA libraries that PyPI's build of torch brings along; nothing else here is for a GPU"
pip -c requirements/cpu.txt "torch==$TORCH" "torchvision==$TORCHVISION"
step "what SGLang imports on a CPU (requirements/cpu.txt): about 1.5 GB installed"
pip -r requirements/cpu.txt
step "sglang $SGLANG, the wheel alone: 220 MB installed"
pip --no-deps "sglang==$SGLANG"
if [ "$dev" = 1 ]; then
    step "tools for the tests (requirements/dev.txt): 100 MB installed"
    pip -r requirements/dev.txt
fi
step "this package, editable"
pip "setuptools>=77,<85"
pip --no-deps --no-build-isolation -e .
.venv/bin/eagle3x version >/dev/null || fail "eagle3x does not start" "remove .venv and run this again"
if [ "$dev" = 1 ]; then
    echo "$dev_stamp" > .venv/eagle3x-dev
else
    echo "$run_stamp" > .venv/eagle3x-run
fi
step "ready: .venv"
