#!/usr/bin/env bash
# Every number of docs/performance.md that needs a GPU, stage by stage, as JSON in a folder:
#
#   bash benchmarks/on_gpu.sh OUT [STAGE …]      STAGE: tests image inference strips scoring roofline towers efficiency; default: all
#
# A finished stage is skipped, so a run that was stopped can go on. A stage that fails does not stop the others. PYTHON
# names the interpreter. TOWERS=IMAGE,TEXT are the folders of two towers for `towers`, whose weights may be random.
# Nothing else should run on the GPU meanwhile. Exit codes: 2 usage, 3 no GPU, 1 a stage failed.
set -uo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
  "" | -h | --help) sed -n '2,8s/^# \{0,1\}//p' benchmarks/on_gpu.sh; [ -n "${1:-}" ] && exit 0 || exit 2 ;;
esac
python=${PYTHON:-python}
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "these benchmarks need a CUDA GPU; there is none here" >&2
  exit 3
}
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
known="tests image inference strips scoring roofline towers efficiency"
failed=""

run() { # NAME COMMAND…: writes NAME.log, and NAME.json by the command itself
  local name=$1 started
  shift
  [ -e "$out/$name.done" ] && { echo "== $name: finished before"; return; }
  started=$(date +%s)
  if "$@" > "$out/$name.log" 2>&1; then touch "$out/$name.done"; else failed="$failed $name"; fi
  tail -n 25 "$out/$name.log"
  echo "== $name: $(($(date +%s) - started)) s"
}

for stage in ${*:-$known}; do
  case $stage in
    tests) run tests "$python" -m pytest -m gpu -n 0 -q -p no:cacheprovider tests ;;
    image) # what the adapter adds to a training step, dense and in strips
      run image "$python" benchmarks/image_step.py --backbone clip:vit-b32 --precision fp32 --modes compiled \
        --methods sigmoid,vacsr --fused --tile 0,auto --steps 20 --json "$out/image.json" ;;
    inference) # against PCME++'s head
      run inference "$python" benchmarks/image_step.py --backbone clip:vit-b32 --precision fp32 --modes eager \
        --methods pcmepp,sigmoid,vacsr --steps 30 --json "$out/inference.json" ;;
    strips) # the loss of large batches, in and without graphs
      run strips "$python" benchmarks/strip_training.py --compile --check --profile --strips auto,16384 \
        --batches 1024,4096,16384:64,65536:4 --json "$out/strips.json" ;;
    scoring) run scoring "$python" benchmarks/scoring.py --json "$out/scoring.json" ;;
    roofline) # each d compiles in a process of its own first, then one run times all
      for dim in 256 512 1024; do
        "$python" -m vacsr bench roofline --device cuda --size small --dim $dim > "$out/warm-$dim.log" 2>&1 &
      done
      wait
      run roofline "$python" -m vacsr bench roofline --device cuda --json "$out/roofline.json" ;;
    towers) # a whole step over its towers alone
      [ -n "${TOWERS:-}" ] || { echo "== towers: left out, TOWERS=IMAGE,TEXT is not set"; continue; }
      run towers "$python" benchmarks/image_step.py --backbone "towers:$TOWERS" --dim 512 --context 48 --precision bf16 \
        --modes compiled --no-optimizer --steps 60 --json "$out/towers.json" ;;
    efficiency) run efficiency "$python" -m vacsr compare tables/efficiency.yaml --out "$out/efficiency" ;;
    *) echo "unknown stage '$stage', expected some of: $known" >&2; exit 2 ;;
  esac
done
[ -z "$failed" ] || { echo "failed:$failed; see the logs in $out" >&2; exit 1; }
