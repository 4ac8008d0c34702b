#!/usr/bin/env bash
# On a machine with a CUDA GPU and torch: what needs one, in parts; all of them take less than ten minutes on 16 cores.
#
#   bash .ci/gpu.sh [host|speed|verify|marked|suite|bench|all] [output folder]    defaults: all, and $OUT, else out/
#
# host    the C++ paths of eager ops from an empty cache: when they are there, equal bits
# speed   host time of eager norms and deformable attention, by C++ and by Python, beside torch
# verify  seconds to a verdict: quick and full, with a cold and a warm cache of kernels, with and without a budget
# marked  the tests that need a GPU
# suite   all tests, with real kernels
# bench   speed of kernels beside the results that are kept in benchmarks/results
# all     host, speed, verify, marked
#
# PART.txt has the output as it came, summary.txt a line a step; both are right up to where a run is cut. LIMIT_S is the
# time of all that is run, 540 s; PYTEST what else pytest is told. Exit code: 1 if a step failed.
set -uo pipefail
cd "$(dirname "$0")/.."
part="${1:-all}"
out="${2:-${OUT:-out}}"
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTEST_PLUGINS=_retrograd_pytest
cores=$(nproc)
end=$((SECONDS + ${LIMIT_S:-540}))
failed=0

step() { # name of the file, seconds, command: its output, how it ended and how long it took
  local name=$1 limit=$2 start=${EPOCHREALTIME/./} code tenths
  shift 2
  ((limit > end - SECONDS)) && limit=$((end - SECONDS))
  if ((limit < 5)); then
    echo "$name: no time was left: $*" | tee -a "$out/summary.txt"
    return 1
  fi
  printf '\n$ %s\n' "$*" >>"$out/$name.txt"
  # One interrupt, for the program alone: its own processes are its business, and a second one breaks pytest's summary.
  timeout --foreground -s INT -k 15 "$limit" "$@" >>"$out/$name.txt" 2>&1
  code=$?
  tenths=$(((${EPOCHREALTIME/./} - start) / 100000))
  echo "$name: exit $code in $((tenths / 10)).$((tenths % 10)) s: $*" | tee -a "$out/summary.txt"
  return $code
}

retrograd() { # name of the file, seconds, arguments
  step "$1" "$2" python3 -m retrograd "${@:3}"
}

tests() { # name, seconds, arguments of pytest: a line a test as it ends, JUnit XML also of a run that was interrupted
  local workers=()
  python3 -c "import xdist" 2>/dev/null && workers=(-n $((cores < 16 ? cores : 16)) --dist worksteal)
  # shellcheck disable=SC2086
  step "$1" "$2" python3 -m pytest -v --no-header --tb=short --no-showlocals -p no:cacheprovider --durations=15 \
    --junitxml="$out/$1.xml" "${workers[@]}" ${PYTEST:-} "${@:3}"
  local code=$?
  grep -E '^(\[gw|tests/)' "$out/$1.txt" | grep -oE '(PASSED|FAILED|ERROR|SKIPPED|XFAIL)' | sort | uniq -c | tee -a "$out/summary.txt"
  grep -E '^(\[gw|tests/).*(FAILED|ERROR)' "$out/$1.txt" | grep -oE 'tests/[^ ]*::[^ ]*' | sort -u | tee -a "$out/summary.txt"
  return $code
}

host() { step host 150 python3 benchmarks/host_path.py; }

speed() { step speed 150 python3 benchmarks/host_time.py --json "$out/host.jsonl" || failed=1; }

verify() {
  export TRITON_CACHE_DIR
  local options=(--device cuda -q)
  TRITON_CACHE_DIR=$(mktemp -d)
  retrograd verify 60 verify rms_norm --level quick "${options[@]}" || failed=1    # cold
  retrograd verify 40 verify rms_norm --level quick "${options[@]}" || failed=1    # warm
  retrograd verify 60 verify rms_norm --level full "${options[@]}" || failed=1     # quick has compiled some
  retrograd verify 40 verify rms_norm --level full "${options[@]}" || failed=1     # warm
  TRITON_CACHE_DIR=$(mktemp -d)
  retrograd verify 45 verify ms_deform_attn --level quick "${options[@]}" --budget 30s # cold; 3 is an answer
  retrograd verify 60 verify ms_deform_attn --level quick "${options[@]}"
  retrograd verify 45 verify ms_deform_attn --level full "${options[@]}" --budget 30s
  unset TRITON_CACHE_DIR
}

drift() { # what, arguments of bench: measured now, beside what was kept
  retrograd "bench-$1" 260 bench "$1" "${@:2}" --max-seconds 220 --providers retrograd --out "$out/$1.jsonl" \
    --compare "benchmarks/results/$1-nvidia-h200.jsonl" --fail-slower 5
}

python3 -c "import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())" |
  tee -a "$out/summary.txt"
case "$part" in
host) host || failed=1 ;;
speed) speed ;;
verify) verify ;;
marked) tests marked 600 -m gpu tests || failed=1 ;;
suite) tests suite 600 tests || failed=1 ;;
bench)
  drift norm --shapes 32768x256,32768x4096,16384x16384,4096x65536,2048x131072 --dtypes bfloat16 || failed=1
  drift msda --shapes enc800,dec300 || failed=1
  ;;
all)
  host || failed=1
  speed
  verify
  tests marked 600 -m gpu tests || failed=1
  ;;
*) echo "unknown part $part, expected host, speed, verify, marked, suite, bench or all" >&2 && exit 2 ;;
esac
exit $failed
