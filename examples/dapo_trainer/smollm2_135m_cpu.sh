#!/usr/bin/env bash
# Three DAPO steps with a real model on real data, on two CPU cores: SmolLM2-135M-Instruct on GSM8K, in some ten minutes.
# It shows that the whole chain works, not that the model learns: that takes hours and a GPU.
#
#   examples/dapo_trainer/smollm2_135m_cpu.sh [STALENESS] [key=value ...]
#
# Environment: GSM8K_SOURCE  a directory with GSM8K's train.jsonl and test.jsonl (default: hub, which needs a network)
#              OUT           where model, data and the run go (default: outputs/smollm2_135m_cpu)
set -euo pipefail

staleness=1
if (($#)) && [[ $1 != *=* ]]; then
  staleness=$1
  shift
fi
out=${OUT:-outputs/smollm2_135m_cpu}
source=${GSM8K_SOURCE:-hub}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

for tool in psrl psrl-launch; do
  if ! command -v "$tool" >/dev/null; then
    echo "$tool is not on PATH: activate the virtualenv that PSRL is installed in" >&2
    exit 1
  fi
done
[[ -f $out/model/model.safetensors ]] || psrl model smollm2 --out "$out/model"
[[ -f $out/data/test.parquet ]] || psrl data gsm8k --source "$source" --out "$out/data"

# Dynamic sampling (psrl.group_post_process) is off. Untrained, this model answers nearly nothing of GSM8K, so nearly every
# group has equal scores; filtering those would refill for ever and train on nothing. What differs within a group here is the
# overlong penalty, which is enough to see gradients.
# shellcheck disable=SC2086  # PSRL_LAUNCH_ARGS are several words
exec psrl-launch ${PSRL_LAUNCH_ARGS:-} dapo_trainer \
  data.train_files="$out/data/train.parquet" \
  data.val_files="$out/data/test.parquet" \
  data.max_prompt_length=256 \
  data.max_response_length=96 \
  data.train_batch_size=4 \
  data.filter_overlong_prompts=true \
  data.val_max_samples=8 \
  train_actor_rollout_ref.model.path="$out/model" \
  train_actor_rollout_ref.actor.ppo_mini_batch_size=4 \
  train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024 \
  train_actor_rollout_ref.actor.optim.lr_warmup_steps=1 \
  gen_actor_rollout_ref.rollout.max_num_seqs=16 \
  gen_actor_rollout_ref.rollout.max_num_batched_tokens=1024 \
  reward.managers.dapo.reward_kwargs.overlong_buffer_cfg.len=64 \
  psrl.rollout_n=4 \
  psrl.staleness="$staleness" \
  psrl.group_post_process.enable=false \
  trainer.experiment_name=smollm2-135m-cpu-staleness-"$staleness" \
  trainer.default_local_dir="$out/run-staleness-$staleness" \
  trainer.logger='[console]' \
  trainer.total_training_steps=3 \
  trainer.test_freq=3 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  "$@"
