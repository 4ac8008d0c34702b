#!/usr/bin/env bash
# On a machine with a CUDA GPU and torch: the whole suite with real kernels, then the first speed table.
# usage: bash .ci/gpu.sh [output folder]
set -uo pipefail
cd "$(dirname "$0")/.."
OUT="${1:-out}"; mkdir -p "$OUT"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTEST_PLUGINS=_retrograd_pytest
python3 -m pytest -q --no-header --tb=short --no-showlocals 2>&1 | tail -40
for op in rms_norm rms_norm_atomic rms_norm_residual; do
  python3 -m retrograd verify "$op" --device cuda -q -o "$OUT/$op.json" | tail -14; echo "exit ${PIPESTATUS[0]}"
done
PYTHONPATH=src timeout 300 python3 -m retrograd bench norm --out "$OUT/norm.jsonl" --max-seconds 240
