"""Rules between keys: what cannot work together, said before anything starts.

Pure: a Config in, contradictions out, all of them at once and each with both values. Ranges of single keys are in the
schema's types; files, ports, memory and models are checked by `psrl.launch.preflight`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from psrl.config.keys import nearest_word
from psrl.config.schema import Config


class Contradiction(msgspec.Struct, frozen=True):
    """`text` is one plain sentence; `keys` are the dotted keys that it is about."""

    keys: tuple[str, ...]
    text: str


Rule = Callable[[Config], Iterator[Contradiction]]

_ACTOR = "train_actor_rollout_ref.actor"
_GEN = "gen_actor_rollout_ref.rollout"
_VAL = "train_actor_rollout_ref.rollout.val_kwargs"
_ROUTING = "psrl.rollout_coordination.routing_strategy"
_SYNC = "psrl.rollout_coordination.sync_and_mig_strategy"

# key -> (what works today, what is known in the field and not built yet)
CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    f"{_ACTOR}.strategy": (("fsdp2",), ("fsdp", "megatron")),
    f"{_ACTOR}.loss_agg_mode": (
        ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"),
        (),
    ),
    f"{_ACTOR}.fsdp_config.mixed_precision": (("auto", "fp32", "bf16"), ()),
    f"{_GEN}.name": (("torch",), ("vllm", "sglang", "scripted")),
    f"{_GEN}.dtype": (("auto", "float32", "bfloat16", "float16"), ()),
    "data.truncation": (("error", "left", "right", "middle"), ()),
    "algorithm.adv_estimator": (
        ("grpo",),
        ("gae", "grpo_vectorized", "rloo", "rloo_vectorized", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
         "remax", "opo", "gpg", "grpo_passk", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"),
    ),
    "trainer.resume_mode": (("auto", "disable", "resume_path"), ()),
    f"{_ROUTING}.method": (
        ("request_num_balance", "round_robin"),
        ("random", "throughput_optimal", "throughput_optimal_with_budget", "throughput_balance", "cache_aware",
         "cache_aware_v1"),
    ),
    f"{_SYNC}.method": (("greedy",), ("status_based",)),
    "psrl.sync.running": (("recompute", "keep", "abort"), ()),
}  # fmt: skip
GSM8K_METHODS = ("strict", "flexible")
MANAGERS = (("dapo", "naive"), ("batch", "prime", "remote", "limited", "gdpo"))
LOGGERS = (("console", "wandb"), ("tensorboard", "swanlab", "mlflow", "clearml", "trackio", "file", "vemlp_wandb"))


def check(config: Config) -> list[str]:
    """Every contradiction, one sentence each; an empty list means the settings fit together."""
    return [contradiction.text for contradiction in contradictions(config)]


def contradictions(config: Config) -> list[Contradiction]:
    """The same with the keys that each is about."""
    return [found for rule in RULES for found in rule(config)]


def get(config: Any, key: str) -> Any:
    """The value at a dotted key of a Config."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _choices(config: Config) -> Iterator[Contradiction]:
    for key, (built, unbuilt) in CHOICES.items():
        if (text := _choice(get(config, key), built, unbuilt)) is not None:
            yield Contradiction((key,), f"{key}={text}")
    for logger in config.trainer.logger:
        if (text := _choice(logger, *LOGGERS)) is not None:
            yield Contradiction(("trainer.logger",), f"trainer.logger: {text}")


def _choice(value: str, built: tuple[str, ...], unbuilt: tuple[str, ...]) -> str | None:
    if value in built:
        return None
    options = f"choose {' or '.join(built)}" if len(built) < 3 else f"choose one of {', '.join(built)}"
    if value in unbuilt:
        return f"{value} is not built yet; {options}"
    meant = nearest_word(value, built)
    return f"{value} is not known{f' (did you mean {meant}?)' if meant else ''}; {options}"


def _batch(config: Config) -> Iterator[Contradiction]:
    batch, mini, n = config.data.train_batch_size, get(config, f"{_ACTOR}.ppo_mini_batch_size"), config.psrl.rollout_n
    entries, ranks = config.psrl.staleness_buffer_entries, config.psrl.deployment.train_ngpus_per_node
    batch_key, mini_key, ranks_key = (
        "data.train_batch_size",
        f"{_ACTOR}.ppo_mini_batch_size",
        "psrl.deployment.train_ngpus_per_node",
    )
    if entries is not None and entries != batch:
        yield Contradiction(
            ("psrl.staleness_buffer_entries", batch_key),
            f"psrl.staleness_buffer_entries={entries} must equal {batch_key}={batch}: a buffer is one batch",
        )
    if mini > batch:
        yield Contradiction((mini_key, batch_key), f"{mini_key}={mini} is more than {batch_key}={batch}")
    elif batch % mini:
        yield Contradiction((mini_key, batch_key), f"{batch_key}={batch} is not a multiple of {mini_key}={mini}")
    if mini * n % ranks:
        yield Contradiction(
            (mini_key, "psrl.rollout_n", ranks_key),
            f"a mini-batch of {mini_key}={mini} times psrl.rollout_n={n} samples does not divide among "
            f"{ranks_key}={ranks} ranks",
        )
    if config.algorithm.adv_estimator == "grpo" and n < 2:
        yield Contradiction(
            ("psrl.rollout_n", "algorithm.adv_estimator"),
            f"psrl.rollout_n={n} is too few for algorithm.adv_estimator=grpo, which compares the answers of a "
            "group: at least 2",
        )


def _lengths(config: Config) -> Iterator[Contradiction]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    budget = get(config, f"{_ACTOR}.ppo_max_token_len_per_gpu")
    if budget < prompt + response:
        yield Contradiction(
            (f"{_ACTOR}.ppo_max_token_len_per_gpu", "data.max_prompt_length", "data.max_response_length"),
            f"{_ACTOR}.ppo_max_token_len_per_gpu={budget} holds no sequence of data.max_prompt_length={prompt} + "
            f"data.max_response_length={response} = {prompt + response} tokens",
        )
    limit = config.train_actor_rollout_ref.model.override_config.get("max_position_embeddings")
    if isinstance(limit, int) and limit < prompt + response:
        yield Contradiction(
            (
                "train_actor_rollout_ref.model.override_config.max_position_embeddings",
                "data.max_prompt_length",
                "data.max_response_length",
            ),
            f"max_position_embeddings={limit} of the model is less than data.max_prompt_length={prompt} + "
            f"data.max_response_length={response}",
        )


def _rewards(config: Config) -> Iterator[Contradiction]:
    reward = config.reward
    if not reward.active_managers:
        yield Contradiction(("reward.active_managers",), "reward.active_managers is empty: nothing would be scored")
    for name in reward.active_managers:
        if name in reward.managers and (text := _choice(name, *MANAGERS)) is not None:
            yield Contradiction(("reward.active_managers",), f"reward.active_managers: {text}")
        if name not in reward.managers:
            yield Contradiction(
                ("reward.active_managers", "reward.managers"),
                f"reward.active_managers has {name}, which is not in reward.managers ({', '.join(reward.managers)})",
            )
    if not config.data.reward_model_dicts:
        yield Contradiction(("data.reward_model_dicts",), "data.reward_model_dicts is empty: nothing would be scored")
    for index, spec in enumerate(config.data.reward_model_dicts):
        key = f"data.reward_model_dicts.{index}"
        if spec.reward_loop_type not in reward.active_managers:
            yield Contradiction(
                (f"{key}.reward_loop_type", "reward.active_managers"),
                f"{key}.reward_loop_type={spec.reward_loop_type} is not in "
                f"reward.active_managers={reward.active_managers}",
            )
        elif (manager := reward.managers.get(spec.reward_loop_type)) is not None:
            names = {fn.name for fn in manager.reward_fn} | {"default", "compute_score"}
            if reward.custom_reward_function:
                names.add(reward.custom_reward_function.name)
            if spec.reward_fn not in names:
                yield Contradiction(
                    (f"{key}.reward_fn", f"reward.managers.{spec.reward_loop_type}.reward_fn"),
                    f"{key}.reward_fn={spec.reward_fn} is no function of reward.managers.{spec.reward_loop_type} "
                    f"({', '.join(sorted(names))})",
                )
        if not math.isfinite(spec.reward_coef):
            yield Contradiction((f"{key}.reward_coef",), f"{key}.reward_coef={spec.reward_coef} is not finite")
    for name, manager in reward.managers.items():
        yield from _overlong(config, name, manager.reward_kwargs)
        key = f"reward.managers.{name}.reward_kwargs.gsm8k_method"
        if (text := _choice(manager.reward_kwargs.gsm8k_method, GSM8K_METHODS, ())) is not None:
            yield Contradiction((key,), f"{key}={text}")


def _overlong(config: Config, name: str, kwargs: Any) -> Iterator[Contradiction]:
    buffer, key = kwargs.overlong_buffer_cfg, f"reward.managers.{name}.reward_kwargs"
    if not buffer.enable:
        return
    limit_key = f"{key}.max_resp_len" if kwargs.max_resp_len is not None else "data.max_response_length"
    limit = kwargs.max_resp_len if kwargs.max_resp_len is not None else config.data.max_response_length
    if limit < buffer.len:
        yield Contradiction(
            (limit_key, f"{key}.overlong_buffer_cfg.len"),
            f"{limit_key}={limit} is less than {key}.overlong_buffer_cfg.len={buffer.len}",
        )


def _sampling(config: Config) -> Iterator[Contradiction]:
    rollout, val = config.gen_actor_rollout_ref.rollout, config.train_actor_rollout_ref.rollout.val_kwargs
    if rollout.temperature == 0:
        yield Contradiction(
            (f"{_GEN}.temperature",),
            f"{_GEN}.temperature=0 gives every group the same answer; training needs more than 0",
        )
    cuts = {"top_p": (rollout.top_p, rollout.top_p < 1), "top_k": (rollout.top_k, rollout.top_k > 0)}
    truncated = [f"{_GEN}.{name}={value:g}" for name, (value, cut) in cuts.items() if cut]
    if truncated and not config.psrl.allow_truncated_sampling:
        yield Contradiction(
            (f"{_GEN}.top_p", f"{_GEN}.top_k", "psrl.allow_truncated_sampling"),
            f"{' and '.join(truncated)} with psrl.allow_truncated_sampling=false: cutting the distribution in training "
            "biases the ratio of the loss",
        )
    if val.do_sample and val.temperature == 0:
        yield Contradiction(
            (f"{_VAL}.do_sample", f"{_VAL}.temperature"),
            f"{_VAL}.do_sample=true needs {_VAL}.temperature above 0, not {val.temperature:g}",
        )


def _optimizer(config: Config) -> Iterator[Contradiction]:
    optim = config.train_actor_rollout_ref.actor.optim
    for name in ("lr", "weight_decay"):
        if not math.isfinite(get(optim, name)):
            yield Contradiction((f"{_ACTOR}.optim.{name}",), f"{_ACTOR}.optim.{name} is not finite")
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Contradiction(
            (f"{_ACTOR}.optim.betas",), f"{_ACTOR}.optim.betas={list(optim.betas)} are not both at least 0 and below 1"
        )
    low = config.train_actor_rollout_ref.actor.clip_ratio_low
    if low >= 1:
        yield Contradiction((f"{_ACTOR}.clip_ratio_low",), f"{_ACTOR}.clip_ratio_low={low:g} must be below 1")


def _schedule(config: Config) -> Iterator[Contradiction]:
    trainer = config.trainer
    for name in ("save_freq", "test_freq"):
        if (value := get(trainer, name)) == 0 or value < -1:
            yield Contradiction(
                (f"trainer.{name}",), f"trainer.{name}={value}: give a number of steps from 1 on, or -1 for never"
            )
    if trainer.val_only and not trainer.val_before_train:
        yield Contradiction(
            ("trainer.val_only", "trainer.val_before_train"),
            "trainer.val_only=true with trainer.val_before_train=false would do nothing",
        )
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield Contradiction(
            ("trainer.resume_mode", "trainer.resume_from_path"),
            "trainer.resume_mode=resume_path needs trainer.resume_from_path, which is null",
        )
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path:
        yield Contradiction(
            ("trainer.resume_mode", "trainer.resume_from_path"),
            f"trainer.resume_from_path={trainer.resume_from_path} is only read with trainer.resume_mode=resume_path, "
            f"not {trainer.resume_mode}",
        )
    for key in ("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name",
                "train_actor_rollout_ref.model.path", "data.prompt_key"):  # fmt: skip
        if not get(config, key).strip():
            yield Contradiction((key,), f"{key} is empty")
    for key in ("data.train_files", "data.val_files"):
        files = get(config, key)
        if not files or not all(name.strip() for name in ([files] if isinstance(files, str) else files)):
            yield Contradiction((key,), f"{key} is empty")
    for key, batch in (("data.train_max_samples", config.data.train_batch_size), ("data.val_max_samples", 1)):
        if get(config, key) != -1 and get(config, key) < batch:
            yield Contradiction(
                (key, "data.train_batch_size"), f"{key}={get(config, key)} leaves less than a batch of {batch}; -1: all"
            )


def _rollout(config: Config) -> Iterator[Contradiction]:
    psrl, deployment = config.psrl, config.psrl.deployment
    room = psrl.rollout_coordination.routing_strategy.max_concurrent_seqs_per_instance
    if room < psrl.rollout_n:
        yield Contradiction(
            (f"{_ROUTING}.max_concurrent_seqs_per_instance", "psrl.rollout_n"),
            f"{_ROUTING}.max_concurrent_seqs_per_instance={room} is less than psrl.rollout_n={psrl.rollout_n}",
        )
    filtering = psrl.group_post_process
    if filtering.enable and filtering.name != "dynamic_sampling_filter":
        yield Contradiction(
            ("psrl.group_post_process.enable", "psrl.group_post_process.name"),
            f"psrl.group_post_process.enable=true with psrl.group_post_process.name={filtering.name or 'null'}: "
            "choose dynamic_sampling_filter",
        )
    first, replicas, master = deployment.rollout_port, deployment.n_rollout_instances, deployment.master_port
    if first and first + replicas - 1 > 65535:
        yield Contradiction(
            ("psrl.deployment.rollout_port", "psrl.deployment.n_rollout_instances"),
            f"psrl.deployment.rollout_port={first} and psrl.deployment.n_rollout_instances={replicas} "
            "need ports above 65535",
        )
    if first and first <= master < first + replicas:
        yield Contradiction(
            ("psrl.deployment.rollout_port", "psrl.deployment.master_port"),
            f"psrl.deployment.master_port={master} is among the replicas' ports {first} to {first + replicas - 1}",
        )
    queue = config.transfer_queue
    if queue.arena_bytes is not None and queue.extent_bytes is not None and queue.arena_bytes < queue.extent_bytes:
        yield Contradiction(
            ("transfer_queue.arena_bytes", "transfer_queue.extent_bytes"),
            f"transfer_queue.arena_bytes={queue.arena_bytes} is less than "
            f"transfer_queue.extent_bytes={queue.extent_bytes}",
        )


RULES: tuple[Rule, ...] = (_choices, _batch, _lengths, _rewards, _sampling, _optimizer, _schedule, _rollout)
