"""The one table of keys that users of veRL and of the reference type and that have another place, or none, here.

Three fates, printed by `psrl-launch --check`:
    mapped    the key is another name of one of ours
    implied   what it asks for is always so here; another value is refused, for the reason given
    refused   the feature is not built yet; the value that means "without it" is accepted

In a pattern `*` is one name or index and a last `**` a whole section. Values of implied and refused keys stay in the
untyped tree, so that interpolations to them work, and are judged after everything is resolved.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from psrl.config.origin import Path, dotted

NOTHING = object()
"""In `accepts`: a value that nobody can type, so the key is refused whatever it says."""


class Fate(StrEnum):
    MAPPED = "mapped"
    IMPLIED = "implied"
    REFUSED = "refused"


class Alias(msgspec.Struct, frozen=True):
    """One row. `accepts` None: any value. `same_as`: also the value of that key. `matters_if`: judged only if that
    key is true."""

    key: str
    fate: Fate
    text: str  # mapped: the new key; else what becomes of it, or why not
    accepts: tuple[Any, ...] | None = None
    same_as: str = ""
    matters_if: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))

    def matches(self, path: Path) -> bool:
        parts = self.parts
        if parts[-1] == "**":
            parts = parts[:-1]
            path = path[: len(parts)]
        return len(parts) == len(path) and all(a in ("*", str(b)) for a, b in zip(parts, path, strict=True))

    def target(self, path: Path) -> Path:
        """Where a mapped key goes."""
        assert self.fate is Fate.MAPPED
        to = tuple(self.text.removesuffix(".**").split("."))
        return (*to, *path[len(self.parts) - 1 :]) if self.key.endswith("**") else to

    def accepted(self, value: Any, get: Callable[[str], Any]) -> bool:
        """Is `value` harmless? `get` gives the resolved value of another key, or None."""
        if self.accepts is None and not self.same_as:
            return True
        if self.matters_if and get(self.matters_if) is not True:
            return True
        wanted = [*(self.accepts or ()), *([get(self.same_as)] if self.same_as else [])]
        return any(_same(value, other) for other in wanted)

    def refusal(self, value: Any) -> str:
        """Why `value` is not accepted, and what would be."""
        reason = f"{self.text} is not built yet" if self.fate is Fate.REFUSED else self.text
        options = [_yaml(item) for item in self.accepts or () if item is not NOTHING]
        if self.same_as:
            options.append(f"the value of {self.same_as}")
        remedy = f"accepted: {' or '.join(options)}" if options else "remove it"
        return f"{_yaml(value)} is refused: {reason}; {remedy}"

    def note(self) -> str:
        """What becomes of the key when its value is accepted."""
        if self.fate is Fate.MAPPED:
            return f"mapped to {self.text}"
        if self.fate is Fate.IMPLIED:
            return f"implied: {self.text}"
        return f"without effect: {self.text} is not built yet"


def find(path: Path) -> Alias | None:
    """The row for a key, exact rows before sections."""
    return next((alias for alias in ALIASES if alias.matches(path)), None)


def rename(path: Path) -> Path:
    """Follow mapped rows to the key of today."""
    for _ in range(4):
        alias = find(path)
        if alias is None or alias.fate is not Fate.MAPPED:
            return path
        path = alias.target(path)
    raise AssertionError(f"the alias table turns in circles at {dotted(path)}")


def _same(value: Any, other: Any) -> bool:
    if isinstance(other, bool):
        return str(value).lower() in (("true", "yes", "on") if other else ("false", "no", "off"))
    if isinstance(value, int | float) and isinstance(other, int | float):
        return not isinstance(value, bool) and float(value) == float(other)
    return value is other or (other is not None and str(value).lower() == str(other).lower())


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mapped(key: str, to: str) -> Alias:
    return Alias(key, Fate.MAPPED, to)


def _implied(key: str, text: str, *accepts: Any, same_as: str = "", matters_if: str = "") -> Alias:
    return Alias(key, Fate.IMPLIED, text, accepts or None, same_as, matters_if)


def _unbuilt(key: str, feature: str, *accepts: Any, same_as: str = "", matters_if: str = "") -> Alias:
    """Refused but for the values given; with none given, any value is without effect as its switch is off."""
    return Alias(key, Fate.REFUSED, feature, accepts or None, same_as, matters_if)


_T, _G, _P = "train_actor_rollout_ref", "gen_actor_rollout_ref", "psrl.rollout_coordination"
_REDUNDANT = f"{_P}.redundant_rollout"
_ROUTING = f"{_P}.routing_strategy"
_SYNC = f"{_P}.sync_and_mig_strategy"


def _moved_layout() -> list[Alias]:
    sections = ["partial_rollout", "redundant_rollout", "routing_strategy", "sync_and_mig_strategy",
                "proactive_filter_strategy", "session_strategy", "status_collection", "rollout_gateway"]  # fmt: skip
    return [_mapped(f"psrl.{name}.**", f"{_P}.{name}.**") for name in sections]


def _parallel(root: str) -> list[Alias]:
    sizes = ("data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size")
    return [
        *(_unbuilt(f"{root}.rollout.{size}", "an engine over several devices", 1) for size in sizes),
        _implied(f"{root}.rollout.gpu_memory_utilization", "the engine's cache follows max_num_seqs and the lengths"),
        _mapped(f"{root}.rollout.n", "psrl.rollout_n"),
        _implied(f"{root}.rollout.prompt_length", "the one limit is in data", same_as="data.max_prompt_length"),
        _implied(f"{root}.rollout.response_length", "the one limit is in data", same_as="data.max_response_length"),
        _implied(f"{root}.rollout.mode", "rollout is always asynchronous", "async"),
        _implied(f"{root}.rollout.enable_chunked_prefill", "the engine prefills up to max_num_batched_tokens a step"),
        _implied(f"{root}.rollout.disable_log_stats", "statistics go to metrics.jsonl"),
        _implied(f"{root}.rollout.calculate_log_probs", "log-probs come with every sampled token", True),
        _implied(f"{root}.rollout.ignore_eos", "an answer ends at its end token", False),
        _implied(f"{root}.rollout.enforce_eager", "the torch engine runs eagerly"),
        _implied(f"{root}.rollout.free_cache_engine", "trainer and engines do not share a device's memory"),
        _implied(f"{root}.rollout.load_format", "weights always come from the weight store"),
    ]


ALIASES: tuple[Alias, ...] = (
    # roots and older layouts
    _mapped("actor_rollout_ref.**", f"{_T}.**"),
    _mapped(f"{_G}.model.**", f"{_T}.model.**"),
    *_moved_layout(),
    # psrl: places and processes
    _implied("psrl.ps_manager_ip", "one machine: control runs in the head process behind a Unix socket"),
    _implied("psrl.reward_service_ip", "one machine: reward workers are local processes"),
    _implied("psrl.ps_mode", "weights go through shared memory on one machine", "cpu", "cpu_ref", "nixl_cpu"),
    _implied("psrl.logging_path", "logs are kept in logs/ of trainer.default_local_dir"),
    _unbuilt("psrl.profile.disable_attn", "profiling without attention", False),
    _unbuilt("psrl.profile.fix_weight", "profiling with fixed weights", False),
    _implied("psrl.log_prob.enable_rollout_engine_log_prob",
             "they come with every sampled token; algorithm.rollout_correction.bypass_mode chooses their use", True),
    _implied("psrl.max_dispatch_ahead", "the staleness bound alone limits what is generated ahead", None),
    _implied("psrl.retry_bound", "retries are limited by gen_actor_rollout_ref.rollout.agent.retry_limit", -1),
    _implied("psrl.retry_ratio", "retries are limited by gen_actor_rollout_ref.rollout.agent.retry_limit", 1.0),
    _unbuilt("psrl.colocate", "sharing devices between training and rollout", False),
    _implied("psrl.colocate_validate_and_train", "validation runs on the rollout replicas"),
    _implied("psrl.fuse_rollout_with_validate", "validation runs on the rollout replicas", True),
    _unbuilt("psrl.deployment.rollout_nnodes_per_instance", "a replica over several nodes", 1),
    _unbuilt("psrl.deployment.rollout_ngpus_per_node_per_instance", "a replica over several devices", 1),
    _implied("psrl.deployment.n_validate_instances", "validation runs on the rollout replicas"),
    _implied("psrl.deployment.validate_nnodes_per_instance", "validation runs on the rollout replicas", 1),
    _implied("psrl.deployment.validate_ngpus_per_node_per_instance", "validation runs on the rollout replicas", 1),
    _unbuilt("psrl.deployment.train_nnodes", "training on several nodes", 1),
    _unbuilt("psrl.deployment.total_nnodes", "a run on several nodes", 1, None),
    _mapped("trainer.n_gpus_per_node", "psrl.deployment.train_ngpus_per_node"),
    _mapped("trainer.nnodes", "psrl.deployment.train_nnodes"),
    # psrl: rollout
    _mapped("algorithm.filter_groups.enable", "psrl.group_post_process.enable"),
    _unbuilt("psrl.buffer_post_process.enable", "post-processing of whole buffers", False),
    _unbuilt("psrl.buffer_post_process.name", "post-processing of whole buffers", None, "null"),
    _implied(f"{_REDUNDANT}.enable", "with as many groups and answers as are trained nothing is redundant"),
    *(_unbuilt(f"{_REDUNDANT}.{key}", "redundant rollout", None, same_as=same, matters_if=f"{_REDUNDANT}.enable")
      for key, same in (("redundant_global_batch_size", "data.train_batch_size"),
                        ("alg_global_batch_size", "data.train_batch_size"),
                        ("redundant_rollout_n", "psrl.rollout_n"), ("alg_rollout_n", "psrl.rollout_n"))),
    _implied(f"{_P}.partial_rollout.interrupt_as_prompt", "an interrupted answer goes on as an answer", False),
    _unbuilt(f"{_ROUTING}.enable_multi_priority_queue", "several priority queues", False),
    _unbuilt(f"{_ROUTING}.enable_group_sticky", "pinning groups to a replica", False),
    _unbuilt(f"{_ROUTING}.enable_trajectory_sticky", "pinning trajectories to a replica", False),
    _unbuilt(f"{_ROUTING}.kv_transfer.enable", "moving keys and values between replicas", False),
    _unbuilt(f"{_ROUTING}.kv_transfer.**", "moving keys and values between replicas"),
    _unbuilt(f"{_ROUTING}.cache_aware_policy.**", "cache-aware routing"),
    _unbuilt(f"{_ROUTING}.cost_model_path", "routing by a cost model", None),
    _unbuilt(f"{_ROUTING}.request_sort_indicator", "another order of waiting requests", "small_id"),
    _unbuilt(f"{_ROUTING}.candidate_sort_indicator", "another order of candidate replicas", "version"),
    *(_unbuilt(f"{_ROUTING}.{key}", "routing by throughput or budget")
      for key in ("request_budget", "delta_throughput_threshold", "max_num_waiting_reqs_after_preemption")),
    _implied(f"{_ROUTING}.check_interval_in_ms", "routing reacts to events"),
    _implied(f"{_ROUTING}.admission_reject_on_waiting", "requests wait in the gateway, not in engines", True),
    _unbuilt(f"{_SYNC}.mig.enable", "migration", False),
    _unbuilt(f"{_SYNC}.mig.**", "migration"),
    _unbuilt(f"{_SYNC}.sync.**", "status-based sync"),
    _unbuilt(f"{_P}.proactive_filter_strategy.method", "the proactive filter", None, "null"),
    _unbuilt(f"{_P}.proactive_filter_strategy.threshold", "the proactive filter"),
    _unbuilt(f"{_P}.session_strategy.thunder_agent.enable", "session scheduling", False),
    _unbuilt(f"{_P}.session_strategy.thunder_agent.**", "session scheduling"),
    _implied(f"{_P}.status_collection.enable", "replicas always report their status", True),
    _implied(f"{_P}.status_collection.**", "replicas report with their answers"),
    _unbuilt(f"{_P}.rollout_gateway.trajectory_id_strategy", "another choice of trajectory ids", "manual"),
    _implied(f"{_P}.rollout_gateway.**", "the gateway runs in the head process"),
    _unbuilt("psrl.fine_grain_overlap.granularity", "fine-grained overlap", "none", None),
    _unbuilt("psrl.fine_grain_overlap.**", "fine-grained overlap"),
    _implied("psrl.broadcast_init.**", "every process reads the first weights from shared memory"),
    _implied("psrl.nixl.**", "weights go through shared memory on one machine"),
    _implied("psrl.checkpoint.use_dcp_save", "checkpoints are safetensors shards, always"),
    _unbuilt("psrl.tms.range", "releasing training memory", None, "null"),
    _implied("psrl.agentic_rl.manager_retry_on_error", "lost work is offered again", True),
    _implied("psrl.agentic_rl.trajectory_output.**", "trajectories.jsonl is always written"),
    # rollout engines; validation engines
    *_parallel(_G),
    *_parallel(_T),
    *(_implied(f"{_T}.rollout.{key}", "the trainer uses the sampling settings of the rollout",
               same_as=f"{_G}.rollout.{key}") for key in ("temperature", "top_p", "top_k", "name")),
    _implied(f"{_T}.rollout.max_num_batched_tokens", "validation runs on the rollout replicas"),
    _implied(f"{_T}.rollout.max_num_seqs", "validation runs on the rollout replicas"),
    _mapped(f"{_G}.rollout.val_kwargs.**", f"{_T}.rollout.val_kwargs.**"),
    _mapped(f"{_T}.rollout.agent.**", f"{_G}.rollout.agent.**"),
    _mapped(f"{_G}.rollout.agent.trajectory_timeout", f"{_G}.rollout.agent.trajectory_timeout_s"),
    _implied(f"{_G}.rollout.agent.raise_on_error", "a failed trajectory is counted by name and the run goes on", False),
    _unbuilt(f"{_G}.rollout.agent.default_agent_loop", "another agent loop", "generate_only_agent",
             "single_turn_agent"),
    *(_unbuilt(f"{root}.rollout.multi_turn.enable", "multi-turn rollout", False) for root in (_G, _T)),
    # trainer side
    _implied(f"{_T}.rollout.log_prob_use_dynamic_bsz", "micro-batches are always packed by tokens", True),
    _implied(f"{_T}.rollout.log_prob_micro_batch_size_per_gpu", "micro-batches are always packed by tokens"),
    _implied(f"{_T}.rollout.log_prob_max_token_len_per_gpu", "log-prob passes use actor.ppo_max_token_len_per_gpu"),
    _implied(f"{_T}.ref.**", "there is no reference policy while use_kl_loss is off"),
    _implied(f"{_T}.hybrid_engine", "trainer and engines are separate processes"),
    _implied(f"{_T}.model.use_remove_padding", "sequences are always packed without padding", True),
    _unbuilt(f"{_T}.model.trust_remote_code", "code from model directories", False),
    _unbuilt(f"{_T}.model.lora_rank", "LoRA", 0, None),
    _unbuilt(f"{_T}.model.enable_activation_offload", "activation offload", False),
    _unbuilt(f"{_T}.model.use_liger", "Liger kernels", False),
    _unbuilt(f"{_T}.actor.use_kl_loss", "the KL loss", False),
    _unbuilt(f"{_T}.actor.kl_loss_coef", "the KL loss"),
    _unbuilt(f"{_T}.actor.kl_loss_type", "the KL loss"),
    _implied(f"{_T}.actor.use_dynamic_bsz", "micro-batches are always packed by tokens", True),
    _implied(f"{_T}.actor.ppo_micro_batch_size_per_gpu", "micro-batches are always packed by tokens"),
    _implied(f"{_T}.actor.ppo_micro_batch_size", "micro-batches are always packed by tokens", None),
    _implied(f"{_T}.actor.shuffle", "a batch is trained in the order of its groups", False),
    _unbuilt(f"{_T}.actor.ulysses_sequence_parallel_size", "sequence parallelism", 1),
    _unbuilt(f"{_T}.actor.policy_loss.loss_mode", "another policy loss", "vanilla"),
    _unbuilt(f"{_T}.actor.policy_loss.**", "another policy loss"),
    _unbuilt(f"{_T}.actor.use_torch_compile", "torch.compile in training", False),
    _unbuilt(f"{_T}.actor.megatron.**", "Megatron", NOTHING),
    _unbuilt(f"{_T}.actor.optim.lr_scheduler_type", "another schedule", "constant"),
    _unbuilt(f"{_T}.actor.optim.warmup_style", "another schedule", "constant", None),
    _unbuilt(f"{_T}.actor.fsdp_config.fsdp_size", "hybrid sharding", -1),
    _implied(f"{_T}.actor.fsdp_config.model_dtype", "master weights are fp32; see fsdp_config.mixed_precision", "fp32",
             "float32"),
    _unbuilt("critic.**", "the critic", NOTHING),
    _unbuilt("distillation.**", "distillation", NOTHING),
    # algorithm
    _unbuilt("algorithm.use_kl_in_reward", "KL in the reward", False),
    _unbuilt("algorithm.kl_penalty", "KL in the reward"),
    _unbuilt("algorithm.kl_ctrl.**", "KL in the reward"),
    _unbuilt("algorithm.gamma", "discounting", 1.0),
    _unbuilt("algorithm.lam", "generalised advantage estimation", 1.0),
    _unbuilt("algorithm.rollout_correction.rollout_is", "rollout correction", None, "null"),
    _unbuilt("algorithm.rollout_correction.rollout_rs", "rollout correction", None, "null"),
    _unbuilt("algorithm.rollout_correction.**", "rollout correction"),
    # reward
    _implied("reward.launch_reward_fn_async", "rewards never hold up generation", True),
    _unbuilt("reward.reward_normalization", "reward normalisation", None, "null"),
    _implied("reward.reward_loop_worker.enable", "scores are always computed in worker processes", True),
    _implied("reward.reward_loop_worker.max_concurrency_per_worker", "a worker scores one answer at a time"),
    _implied("reward.reward_loop_worker.queue_size_per_worker", "agent loops bound what waits for a score"),
    _mapped("custom_reward_function.**", "reward.custom_reward_function.**"),
    _unbuilt("reward_model.enable", "reward models", False),
    _unbuilt("reward_model.reward_manager", "choosing the manager there; use reward.active_managers", "dapo", "naive"),
    _unbuilt("reward_model.**", "reward models", NOTHING),
    _unbuilt("data.reward_model_dicts.*.reward_model_name", "reward models", None),
    _implied("data.reward_model_dicts.*.reward_fn_key", "rows name their source in data_source", None, "data_source"),
    # data
    _implied("data.reward_fn_key", "rows name their source in data_source", "data_source"),
    _unbuilt("data.use_multi_dataset", "mixing data sets by ratio", False),
    _unbuilt("data.train_datas", "mixing data sets by ratio", None),
    _unbuilt("data.train_datasets_ratios", "mixing data sets by ratio", None),
    _implied("data.filter_overlong_prompts_workers", "prompts are measured in one pass"),
    _implied("data.validation_shuffle", "the order of validation does not matter", False),
    _implied("data.val_batch_size", "the whole validation set is one round", None),
    _implied("data.dataloader_num_workers", "rows are read by the head process"),
    _implied("data.gen_batch_size", "the staleness bound decides what is generated", None,
             same_as="data.train_batch_size"),
    _unbuilt("data.image_key", "images", None, "images"),
    _unbuilt("data.video_key", "videos", None, "videos"),
    _implied("data.return_raw_chat", "agent loops always get the chat"),
    # trainer
    _implied("trainer.balance_batch", "ranks get equal work, always", True),
    _unbuilt("trainer.critic_warmup", "the critic", 0),
    _unbuilt("trainer.max_critic_ckpt_to_keep", "the critic"),
    _unbuilt("trainer.log_val_generations", "logging of answers as text", 0),
    _implied("trainer.rollout_data_dir", "trajectories.jsonl is in trainer.default_local_dir", None),
    _implied("trainer.validation_data_dir", "trajectories.jsonl is in trainer.default_local_dir", None),
    _implied("trainer.del_local_ckpt_after_load", "checkpoints are only removed by trainer.max_actor_ckpt_to_keep",
             False),
    _unbuilt("trainer.esi_redundant_time", "saving before an instance expires", 0),
    _unbuilt("trainer.default_hdfs_dir", "checkpoints on HDFS", None),
    # transfer queue
    _implied("transfer_queue.enable", "samples always go through the queue"),
    _unbuilt("transfer_queue.metrics.enabled", "a metrics port of the queue", False),
    _unbuilt("transfer_queue.metrics.port", "a metrics port of the queue"),
    _implied("transfer_queue.controller.**", "the ledger decides what is trained"),
    _implied("transfer_queue.backend.storage_backend", "samples are kept in shared memory", "SimpleStorage"),
    _implied("transfer_queue.backend.SimpleStorage.**", "the arena is sized in bytes: transfer_queue.arena_bytes"),
)  # fmt: skip
