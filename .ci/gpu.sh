#!/usr/bin/env bash
# On a machine with a CUDA GPU and torch: the tests that need one, in parts of at most 9 minutes, and speed beside the
# results that are kept in benchmarks/results.
#
#   bash .ci/gpu.sh norm|msda|check|trace|bench [output folder]     default of the folder: $OUT, else out/
#
# Exit code: that of the tests; of bench, 1 if anything takes 5 % longer than the kept results say.
set -uo pipefail
cd "$(dirname "$0")/.."
part="${1:?expected norm, msda, check, trace or bench}"
out="${2:-${OUT:-out}}"
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTEST_PLUGINS=_retrograd_pytest
# Processes share the GPU: eight of them keep it busy, more only take its memory.
workers=()
python3 -c "import xdist" 2>/dev/null && workers=(-n 8)

tests() { # files: everything, not only what is marked gpu, since the same tests take the GPU where there is one
  timeout 520 python3 -m pytest -q --no-header --tb=short --no-showlocals -p no:cacheprovider \
    --junitxml="$out/$part.xml" "${workers[@]}" "$@" >"$out/$part.log" 2>&1
  local code=$?
  tail -60 "$out/$part.log"
  return $code
}

drift() { # what, arguments of bench: measured now, beside what was kept
  timeout 260 python3 -m retrograd bench "$1" "${@:2}" --max-seconds 220 --providers retrograd \
    --out "$out/$1.jsonl" --compare "benchmarks/results/$1-nvidia-h200.jsonl" --fail-slower 5 2>&1 | tee "$out/bench-$1.txt"
}

python3 -c "import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())"
case "$part" in
norm) tests tests/ops/norm tests/ops/test_pdl.py tests/nn tests/patch ;;
msda) tests tests/ops/msda ;;
check) tests tests/check tests/catalog ;;
trace) tests tests/trace ;;
bench)
  drift norm --shapes 32768x256,32768x4096,16384x16384,4096x65536,2048x131072 --dtypes bfloat16
  norm=$?
  drift msda --shapes enc800,dec300 && exit "$norm"
  ;;
*) echo "unknown part $part, expected norm, msda, check, trace or bench" >&2 && exit 2 ;;
esac
