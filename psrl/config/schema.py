"""Every configuration key, as frozen structs. A key that nothing reads does not exist.

Key names are those that veRL users type; of our own there are few. Units stand in the names.
`psrl.config.load` turns composed YAML into these; `psrl.config.check` holds the rules between keys.
"""

from typing import Any

import msgspec


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class RewardModelSpec(_Section):
    """One scoring source of `data.reward_model_dicts`; the scores add up weighted by reward_coef."""

    reward_loop_type: str = "dapo"  # a name in reward.managers
    reward_fn: str = "default"  # default: by data_source; else a name given in reward_fn of the manager
    reward_coef: float = 1.0


class Data(_Section):
    train_files: list[str] | str
    val_files: list[str] | str
    prompt_key: str = "prompt"
    data_source_name: str | None = None  # for files without a data_source column
    max_prompt_length: int = 512
    max_response_length: int = 512
    train_batch_size: int = 1024  # prompts per step
    truncation: str = "error"  # error | left | right | middle, for prompts over max_prompt_length
    filter_overlong_prompts: bool = False
    shuffle: bool = False
    seed: int = 1
    train_max_samples: int = -1
    val_max_samples: int = -1
    apply_chat_template_kwargs: dict[str, Any] = {}
    reward_model_dicts: list[RewardModelSpec] = msgspec.field(default_factory=lambda: [RewardModelSpec()])


class Model(_Section):
    path: str
    override_config: dict[str, Any] = {}  # free-form: keys of the Hugging Face config
    enable_gradient_checkpointing: bool = True


class Optim(_Section):
    lr: float = 1e-6
    lr_warmup_steps: int = -1  # <= 0: lr_warmup_steps_ratio * total steps
    lr_warmup_steps_ratio: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)


class FsdpConfig(_Section):
    param_offload: bool = False
    optimizer_offload: bool = False
    mixed_precision: str = "auto"  # auto: bf16 compute on GPU, fp32 on CPU; or fp32 | bf16. Masters are fp32 always


class Actor(_Section):
    strategy: str = "fsdp2"
    ppo_mini_batch_size: int = 256  # prompts per optimizer update
    ppo_epochs: int = 1
    ppo_max_token_len_per_gpu: int = 16384  # packed tokens per micro-batch
    clip_ratio: float = 0.2
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0  # dual clip, > 1
    loss_agg_mode: str = "token-mean"  # seq-mean-token-sum | seq-mean-token-sum-norm | seq-mean-token-mean
    loss_scale_factor: int | None = None  # of seq-mean-token-sum-norm; null: data.max_response_length
    entropy_coeff: float = 0.0
    grad_clip: float = 1.0
    max_skipped_updates: int = 5  # consecutive non-finite updates after which the run stops
    optim: Optim = Optim()
    fsdp_config: FsdpConfig = FsdpConfig()


class ValKwargs(_Section):
    temperature: float = 0.0
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1


class TrainRollout(_Section):
    val_kwargs: ValKwargs = ValKwargs()


class TrainActorRolloutRef(_Section):
    model: Model
    actor: Actor = Actor()
    rollout: TrainRollout = TrainRollout()


class Agent(_Section):
    num_workers: int = 1
    max_concurrent_groups: int = 64  # per worker
    retry_limit: int = 1  # attempts after the first for a failed trajectory
    trajectory_timeout_s: float = 600.0


class GenRollout(_Section):
    name: str = "torch"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_num_seqs: int = 256  # concurrent sequences in one engine
    max_num_batched_tokens: int = 8192  # prefill tokens of one engine step
    dtype: str = "auto"  # auto: bfloat16 on GPU, float32 on CPU
    seed: int = 0
    agent: Agent = Agent()


class GenActorRolloutRef(_Section):
    rollout: GenRollout = GenRollout()


class FilterGroups(_Section):
    metric: str = "acc"  # a numeric extra info of the reward, or score
    max_num_gen_batches: int = 10  # refills stop at this many batches generated for one step


class RolloutCorrection(_Section):
    bypass_mode: bool = False  # True: old log-probs are the rollout's; False: recomputed by the trainer


class Algorithm(_Section):
    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    min_spread: float = 0.0  # smaller reward spreads in a group count as none
    filter_groups: FilterGroups = FilterGroups()
    rollout_correction: RolloutCorrection = RolloutCorrection()


class OverlongBufferCfg(_Section):
    enable: bool = False
    len: int = 512
    penalty_factor: float = 1.0
    log: bool = False


class RewardKwargs(_Section):
    overlong_buffer_cfg: OverlongBufferCfg = OverlongBufferCfg()
    max_resp_len: int | None = None  # null: data.max_response_length


class RewardFn(_Section):
    path: str
    name: str = "compute_score"
    kwargs: dict[str, Any] = {}  # free-form: handed to the function


class RewardManager(_Section):
    reward_fn: list[RewardFn] = []  # empty: the built-in rule for the row's data_source
    reward_kwargs: RewardKwargs = RewardKwargs()


class RewardLoopWorker(_Section):
    num_workers: int = 1
    timeout_s: float = 30.0  # one score
    retry_limit: int = 2


class Reward(_Section):
    active_managers: list[str] = msgspec.field(default_factory=lambda: ["dapo"])
    managers: dict[str, RewardManager] = msgspec.field(
        default_factory=lambda: {"dapo": RewardManager(), "naive": RewardManager()}
    )
    custom_reward_function: RewardFn | None = None  # the same as managers.<active>.reward_fn of one entry
    reward_loop_worker: RewardLoopWorker = RewardLoopWorker()


class Trainer(_Section):
    project_name: str = "psrl"
    experiment_name: str = "default"
    logger: list[str] = msgspec.field(default_factory=lambda: ["console"])  # console, wandb; JSONL is always written
    total_epochs: int = 30
    total_training_steps: int | None = None
    val_before_train: bool = True
    val_only: bool = False
    test_freq: int = -1
    save_freq: int = -1
    max_actor_ckpt_to_keep: int | None = None
    default_local_dir: str = "runs/${trainer.experiment_name}"  # the run directory
    resume_mode: str = "auto"  # auto | disable | resume_path
    resume_from_path: str | None = None
    seed: int = 0


class TransferQueue(_Section):
    arena_bytes: int | None = None  # null: what (staleness + 1) buffers and the validation set need
    extent_bytes: int = 1 << 20


class Deployment(_Section):
    n_rollout_instances: int = 1
    train_ngpus_per_node: int = 1  # trainer ranks
    rollout_port: int = 0  # first replica's gRPC port on loopback, the next ones follow; 0: picked by the kernel
    master_port: int = 0  # torch.distributed's port; 0: picked by the kernel
    threads_per_process: int = 1  # torch threads on CPU
    max_restarts: int = 3  # of one replica or worker process


class GroupPostProcess(_Section):
    enable: bool = False
    name: str = "dynamic_sampling_filter"


class RoutingStrategy(_Section):
    method: str = "request_num_balance"  # or round_robin
    max_concurrent_seqs_per_instance: int = 1024


class SyncAndMigStrategy(_Section):
    method: str = "greedy"
    check_interval_in_ms: int = 100


class PartialRollout(_Section):
    enable: bool = True  # False: a replica syncs only when idle


class RolloutCoordination(_Section):
    routing_strategy: RoutingStrategy = RoutingStrategy()
    sync_and_mig_strategy: SyncAndMigStrategy = SyncAndMigStrategy()
    partial_rollout: PartialRollout = PartialRollout()


class Sync(_Section):
    running: str = "recompute"  # recompute | keep | abort: what a sync does to running requests
    timeout_s: float = 120.0


class Psrl(_Section):
    rollout_n: int = 1
    staleness: int = 0
    staleness_buffer_entries: int | None = None  # null: data.train_batch_size, which it must equal
    group_post_process: GroupPostProcess = GroupPostProcess()
    rollout_coordination: RolloutCoordination = RolloutCoordination()
    sync: Sync = Sync()
    deployment: Deployment = Deployment()
    allow_truncated_sampling: bool = False
    progress_timeout_s: float = 900.0  # watchdog: no step and no token for so long ends the run by name


class Config(_Section):
    data: Data
    train_actor_rollout_ref: TrainActorRolloutRef
    gen_actor_rollout_ref: GenActorRolloutRef = GenActorRolloutRef()
    algorithm: Algorithm = Algorithm()
    reward: Reward = Reward()
    trainer: Trainer = Trainer()
    transfer_queue: TransferQueue = TransferQueue()
    psrl: Psrl = Psrl()
