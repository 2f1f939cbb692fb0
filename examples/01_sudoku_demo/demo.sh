#!/usr/bin/env bash
# The main job on a laptop: SFT a tiny LLaDA on easy Sudoku, import it, BGPO on hard Sudoku, export it, plot.
#   [SEED=0 NPROC=2] bash examples/01_sudoku_demo/demo.sh [RUN_FOLDER] [KEY=VALUE for the BGPO run]...
# A stage whose result exists is skipped, so an interrupted demo goes on where it stopped.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../.." && pwd)"
run="${1:-runs/demo}"
shift || true
export NPROC="${NPROC:-2}"
seed="${SEED:-0}"
started=$SECONDS

stage() { # stage TITLE RESULT COMMAND...
  local title="$1" result="$2"
  shift 2
  if [ -e "$result" ]; then
    echo "== $title: $result is there already"
    return
  fi
  echo "== $title"
  "$@"
}

mkdir -p "$run"
stage "1/6 a tiny LLaDA without weights" "$run/tiny_llada/config.json" \
  python "$here/make_tiny_llada.py" "$run/tiny_llada"
stage "2/6 supervised fine-tuning on easy puzzles, $NPROC processes" "$run/hf_sft" \
  "$root/launch/torchrun.sh" train "$here/sft.yaml" out="$run/sft" model.path="$run/tiny_llada" seed="$seed"
stage "2/6 … as a Hugging Face checkpoint" "$run/hf_sft" \
  megamem convert export "$run/sft" "$run/hf_sft"
stage "3/6 import it" "$run/imported" \
  megamem convert import "$run/hf_sft" "$run/imported"
stage "4/6 BGPO on hard puzzles, $NPROC processes" "$run/hf_bgpo" \
  "$root/launch/torchrun.sh" train "$here/bgpo.yaml" out="$run" model.path="$run/imported" seed="$seed" "$@"
stage "5/6 export to Hugging Face" "$run/hf_bgpo" \
  megamem convert export "$run" "$run/hf_bgpo"
stage "6/6 plot" "$run/demo.png" \
  python "$root/tools/plot_run.py" "$run"
python "$here/summary.py" "$run" $((SECONDS - started))
