#!/usr/bin/env bash
# The whole job on one core: SFT a tiny Qwen3 on Countdown, GRPO with shared prompts, export.
#   [SEED=0] bash examples/03_grpo_qwen3_prefix/run.sh [RUN_FOLDER] [KEY=VALUE for the GRPO run]...
# A stage whose result exists is skipped and training resumes, so an interrupted job goes on where it stopped.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
run="${1:-runs/grpo_qwen3}"
shift || true
seed="${SEED:-0}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "== 1/4 a tiny Qwen3 without weights"
[ -e "$run/tiny_qwen3/config.json" ] || python "$here/make_tiny_model.py" "$run/tiny_qwen3" qwen3
echo "== 2/4 supervised fine-tuning"
[ -e "$run/hf_sft" ] || megamem train "$here/sft.yaml" out="$run/sft" model.path="$run/tiny_qwen3" seed="$seed"
[ -e "$run/hf_sft" ] || megamem convert export "$run/sft" "$run/hf_sft"
echo "== 3/4 GRPO"
[ -e "$run/hf_grpo" ] || megamem train "$here/grpo.yaml" out="$run" model.path="$run/hf_sft" seed="$seed" "$@"
echo "== 4/4 export to Hugging Face"
[ -e "$run/hf_grpo" ] || megamem convert export "$run" "$run/hf_grpo"
python "$here/summary.py" "$run"
