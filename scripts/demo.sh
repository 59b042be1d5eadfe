#!/usr/bin/env bash
# Set everything up and replay the incident: bash scripts/demo.sh [--json] [--prompts N] [--plot FILE] ...
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# SGLang's processes look up lscpu; bash has a PATH even where the caller gave none, they would not.
export PATH
# Standard output belongs to the demo: with --json it is one JSON object.
bash "$root/scripts/setup.sh" >&2
exec "$root/.venv/bin/eagle3x" demo "$@"
