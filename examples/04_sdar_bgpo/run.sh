#!/usr/bin/env bash
# The whole job on one core: SFT a tiny SDAR on Countdown, BGPO with shared prompts, export.
#   [SEED=0] bash examples/04_sdar_bgpo/run.sh [RUN_FOLDER] [KEY=VALUE for the BGPO run]...
# A stage whose result exists is skipped and training resumes, so an interrupted job goes on where it stopped.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
run="${1:-runs/sdar_bgpo}"
shift || true
seed="${SEED:-0}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "== 1/4 a tiny SDAR without weights"
[ -e "$run/tiny_sdar/config.json" ] || python "$here/../03_grpo_qwen3_prefix/make_tiny_model.py" "$run/tiny_sdar" sdar
echo "== 2/4 supervised fine-tuning"
[ -e "$run/hf_sft" ] || megamem train "$here/sft.yaml" out="$run/sft" model.path="$run/tiny_sdar" seed="$seed"
[ -e "$run/hf_sft" ] || megamem convert export "$run/sft" "$run/hf_sft"
echo "== 3/4 BGPO"
[ -e "$run/hf_bgpo" ] || megamem train "$here/bgpo.yaml" out="$run" model.path="$run/hf_sft" seed="$seed" "$@"
echo "== 4/4 export to Hugging Face"
[ -e "$run/hf_bgpo" ] || megamem convert export "$run" "$run/hf_bgpo"
python "$here/../03_grpo_qwen3_prefix/summary.py" "$run"
