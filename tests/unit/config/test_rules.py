"""Rules between keys: each says both values, and the shipped configs break none."""

import pytest

from psrl.config import check, load
from psrl.errors import ConfigError

T, G, P = "train_actor_rollout_ref", "gen_actor_rollout_ref", "psrl.rollout_coordination"


def test_the_quickstart_has_no_contradiction() -> None:
    assert check(load("quickstart").config) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["psrl.staleness_buffer_entries=64"], ["=64", "data.train_batch_size=32"]),
        (["psrl.rollout_n=1"], ["psrl.rollout_n=1", "grpo"]),
        ([f"{T}.actor.ppo_mini_batch_size=64"], ["=64", "data.train_batch_size=32"]),
        ([f"{T}.actor.ppo_mini_batch_size=24"], ["data.train_batch_size=32", "multiple", "=24"]),
        (["psrl.deployment.train_ngpus_per_node=3"], ["=32", "psrl.rollout_n=8", "=3 ranks"]),
        ([f"{T}.actor.ppo_max_token_len_per_gpu=59"], ["=59", "=32", "=28", "60 tokens"]),
        ([f"+{T}.model.override_config.max_position_embeddings=40"], ["=40", "=32", "=28"]),
        (["reward.managers.dapo.reward_kwargs={overlong_buffer_cfg: {enable: true, len: 29}}"], ["=29", "=28"]),
        (["reward.managers.dapo.reward_kwargs={max_resp_len: 9, overlong_buffer_cfg: {enable: true, len: 10}}"],
         ["max_resp_len=9", "=10"]),
        ([f"{T}.actor.clip_ratio_c=1"], ["number > 1", "got 1"]),
        ([f"{T}.actor.clip_ratio_low=1"], ["below 1"]),
        ([f"{T}.actor.loss_agg_mode=token_mean"], ["token_mean is not known (did you mean token-mean?)"]),
        ([f"{G}.rollout.top_p=0.9"], ["top_p=0.9", "psrl.allow_truncated_sampling=false"]),
        ([f"{G}.rollout.top_k=5"], ["top_k=5"]),
        ([f"{G}.rollout.temperature=0"], ["temperature=0"]),
        ([f"{T}.rollout.val_kwargs.do_sample=true"], ["do_sample=true", "temperature"]),
        (["trainer.max_actor_ckpt_to_keep=0"], ["≥ 1", "got 0"]),
        (["trainer.save_freq=0"], ["trainer.save_freq=0"]),
        (["trainer.test_freq=-2"], ["trainer.test_freq=-2"]),
        (["trainer.total_training_steps=0"], ["≥ 1"]),
        (["trainer.resume_mode=resume_path"], ["resume_from_path", "null"]),
        (["trainer.resume_from_path=x/global_step_3"], ["x/global_step_3", "auto"]),
        (["trainer.val_only=true", "trainer.val_before_train=false"], ["do nothing"]),
        (["algorithm.adv_estimator=gae"], ["gae is not built yet; choose grpo"]),
        (["trainer.logger=[console,tensorboard]"], ["tensorboard is not built yet; choose console or wandb"]),
        ([f"{P}.routing_strategy.method=random"], ["random is not built yet"]),
        ([f"{P}.routing_strategy.method=robin"], ["robin is not known"]),
        ([f"{P}.routing_strategy.max_concurrent_seqs_per_instance=4"], ["=4", "psrl.rollout_n=8"]),
        ([f"{P}.sync_and_mig_strategy.method=status_based"], ["not built yet; choose greedy"]),
        (["psrl.sync.running=stop"], ["stop is not known"]),
        ([f"{T}.actor.strategy=fsdp"], ["fsdp is not built yet; choose fsdp2"]),
        ([f"{G}.rollout.name=vllm"], ["vllm is not built yet; choose torch"]),
        (["psrl.group_post_process={enable: true, name: null}"], ["name=null"]),
        (["reward.active_managers=[dapo,prime]"], ["prime", "dapo, naive"]),
        (["data.reward_model_dicts.0.reward_loop_type=naive"], ["naive", "['dapo']"]),
        (["data.reward_model_dicts.0.reward_fn=mine"], ["reward_fn=mine", "default"]),
        (["reward.managers.dapo.reward_kwargs.gsm8k_method=loose"], ["loose is not known", "strict or flexible"]),
        (["data.reward_model_dicts=[]"], ["nothing would be scored"]),
        (["data.train_max_samples=20"], ["=20", "32"]),
        (["data.train_files=[]"], ["data.train_files is empty"]),
        (["psrl.deployment={rollout_port: 65535}"], ["65535", "n_rollout_instances=2"]),
        (["psrl.deployment={rollout_port: 5000, master_port: 5001}"], ["5001", "5000 to 5001"]),
        (["transfer_queue={arena_bytes: 1000, extent_bytes: 4096}"], ["arena_bytes=1000", "extent_bytes=4096"]),
        (["psrl.staleness=-1"], ["≥ 0", "got -1"]),
        ([f"{T}.actor.optim.betas=[0.9,1.0]"], ["below 1"]),
        ([f"{T}.actor.optim.lr=inf"], ["not finite"]),
    ],
)  # fmt: skip
def test_contradictions_are_named_with_both_values(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", overrides)
    (problem,) = caught.value.problems
    for word in words:
        assert word in problem
    assert "override " in problem  # where it was set


def test_truncated_sampling_can_be_allowed() -> None:
    load("quickstart", [f"{G}.rollout.top_p=0.9", "psrl.allow_truncated_sampling=true"])
