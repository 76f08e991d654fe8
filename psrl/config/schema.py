"""Every configuration key, as frozen structs. A key that nothing reads does not exist.

Key names are those that veRL users type; of our own there are few. Units stand in the names, ranges in the types.
`psrl.config.load` turns composed YAML into these; `psrl.config.rules` holds the rules between keys, `aliases` what
becomes of the reference's other keys. Defaults stand here and, with a comment each, in
`yaml/base.yaml`: a test compares.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
AllOrCount = Annotated[int, Meta(ge=-1)]  # -1: all, or off
Port = Annotated[int, Meta(ge=0, le=65535)]  # 0: picked by the kernel
Positive = Annotated[float, Meta(gt=0)]
AtLeastZero = Annotated[float, Meta(ge=0)]
Probability = Annotated[float, Meta(gt=0, le=1)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class RewardModelSpec(_Section, frozen=True, kw_only=True):
    """One scoring source of `data.reward_model_dicts`; the scores add up weighted by reward_coef."""

    reward_loop_type: str = "dapo"  # a name in reward.managers
    reward_fn: str = "default"  # default: by data_source; else a name given in reward_fn of the manager
    reward_coef: float = 1.0


class Data(_Section, frozen=True, kw_only=True):
    train_files: list[str] | str
    val_files: list[str] | str
    prompt_key: str = "prompt"
    data_source_name: str | None = None  # for files without a data_source column
    max_prompt_length: Count = 512
    max_response_length: Count = 512
    train_batch_size: Count = 1024  # prompts per step
    truncation: str = "error"  # error | left | right | middle, for prompts over max_prompt_length
    filter_overlong_prompts: bool = False
    shuffle: bool = False
    seed: NonNegative = 1
    train_max_samples: AllOrCount = -1
    val_max_samples: AllOrCount = -1
    apply_chat_template_kwargs: dict[str, Any] = {}  # free-form: handed to the chat template
    reward_model_dicts: list[RewardModelSpec] = msgspec.field(default_factory=lambda: [RewardModelSpec()])


class Model(_Section, frozen=True, kw_only=True):
    path: str
    override_config: dict[str, Any] = {}  # free-form: keys of the Hugging Face config
    enable_gradient_checkpointing: bool = True


class Optim(_Section, frozen=True, kw_only=True):
    lr: AtLeastZero = 1e-6
    lr_warmup_steps: int = -1  # <= 0: lr_warmup_steps_ratio * total steps
    lr_warmup_steps_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    weight_decay: AtLeastZero = 0.01
    betas: tuple[float, float] = (0.9, 0.999)


class FsdpConfig(_Section, frozen=True, kw_only=True):
    param_offload: bool = False
    optimizer_offload: bool = False
    mixed_precision: str = "auto"  # auto: bf16 compute on GPU, fp32 on CPU; or fp32 | bf16. Masters are fp32 always


class Actor(_Section, frozen=True, kw_only=True):
    strategy: str = "fsdp2"
    ppo_mini_batch_size: Count = 256  # prompts per optimizer update
    ppo_epochs: Count = 1
    ppo_max_token_len_per_gpu: Count = 16384  # packed tokens per micro-batch
    clip_ratio: Positive = 0.2  # what clip_ratio_low and clip_ratio_high are when not set themselves
    clip_ratio_low: Positive = 0.2
    clip_ratio_high: Positive = 0.2
    clip_ratio_c: Annotated[float, Meta(gt=1)] = 3.0  # dual clip
    loss_agg_mode: str = "token-mean"  # seq-mean-token-sum | seq-mean-token-sum-norm | seq-mean-token-mean
    loss_scale_factor: Count | None = None  # of seq-mean-token-sum-norm; null: data.max_response_length
    entropy_coeff: float = 0.0
    grad_clip: Positive = 1.0
    max_skipped_updates: Count = 5  # consecutive non-finite updates after which the run stops
    optim: Optim = Optim()
    fsdp_config: FsdpConfig = FsdpConfig()


class ValKwargs(_Section, frozen=True, kw_only=True):
    temperature: AtLeastZero = 0.0
    do_sample: bool = False
    top_p: Probability = 1.0
    top_k: AllOrCount = -1
    n: Count = 1


class TrainRollout(_Section, frozen=True, kw_only=True):
    val_kwargs: ValKwargs = ValKwargs()


class TrainActorRolloutRef(_Section, frozen=True, kw_only=True):
    model: Model
    actor: Actor = Actor()
    rollout: TrainRollout = TrainRollout()


class Agent(_Section, frozen=True, kw_only=True):
    num_workers: Count = 1
    max_concurrent_groups: Count = 64  # per worker
    retry_limit: NonNegative = 1  # attempts after the first for a failed trajectory
    trajectory_timeout_s: Positive = 600.0


class GenRollout(_Section, frozen=True, kw_only=True):
    name: str = "torch"
    temperature: AtLeastZero = 1.0
    top_p: Probability = 1.0
    top_k: AllOrCount = -1
    max_num_seqs: Count = 256  # concurrent sequences in one engine
    max_num_batched_tokens: Count = 8192  # prefill tokens of one engine step
    dtype: str = "auto"  # auto: bfloat16 on GPU, float32 on CPU
    seed: NonNegative = 0
    agent: Agent = Agent()


class GenActorRolloutRef(_Section, frozen=True, kw_only=True):
    rollout: GenRollout = GenRollout()


class FilterGroups(_Section, frozen=True, kw_only=True):
    metric: str = "acc"  # a numeric extra info of the reward, or score
    max_num_gen_batches: Count = 10  # refills stop at this many batches generated for one step


class RolloutCorrection(_Section, frozen=True, kw_only=True):
    bypass_mode: bool = False  # True: old log-probs are the rollout's; False: recomputed by the trainer


class Algorithm(_Section, frozen=True, kw_only=True):
    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    min_spread: AtLeastZero = 0.0  # smaller reward spreads in a group count as none
    filter_groups: FilterGroups = FilterGroups()
    rollout_correction: RolloutCorrection = RolloutCorrection()


class OverlongBufferCfg(_Section, frozen=True, kw_only=True):
    enable: bool = False
    len: Count = 512
    penalty_factor: AtLeastZero = 1.0
    log: bool = False


class RewardKwargs(_Section, frozen=True, kw_only=True):
    overlong_buffer_cfg: OverlongBufferCfg = OverlongBufferCfg()
    max_resp_len: Count | None = None  # null: data.max_response_length
    gsm8k_method: str = "strict"  # strict: "#### 42" | flexible: the last number; of the built-in rules


class RewardFn(_Section, frozen=True, kw_only=True):
    path: str
    name: str = "compute_score"
    kwargs: dict[str, Any] = {}  # free-form: handed to the function


class RewardManager(_Section, frozen=True, kw_only=True):
    reward_fn: list[RewardFn] = []  # empty: the built-in rule for the row's data_source
    reward_kwargs: RewardKwargs = RewardKwargs()


class RewardLoopWorker(_Section, frozen=True, kw_only=True):
    num_workers: Count = 1
    timeout_s: Positive = 30.0  # one score
    retry_limit: NonNegative = 2


class Reward(_Section, frozen=True, kw_only=True):
    active_managers: list[str] = msgspec.field(default_factory=lambda: ["dapo"])
    managers: dict[str, RewardManager] = msgspec.field(
        default_factory=lambda: {"dapo": RewardManager(), "naive": RewardManager()}
    )
    custom_reward_function: RewardFn | None = None  # the same as managers.<active>.reward_fn of one entry
    reward_loop_worker: RewardLoopWorker = RewardLoopWorker()


class Trainer(_Section, frozen=True, kw_only=True):
    project_name: str = "psrl"
    experiment_name: str = "default"
    logger: list[str] = msgspec.field(default_factory=lambda: ["console"])  # console, wandb; JSONL is always written
    total_epochs: Count = 30
    total_training_steps: Count | None = None
    val_before_train: bool = True
    val_only: bool = False
    test_freq: int = -1
    save_freq: int = -1
    max_actor_ckpt_to_keep: Count | None = None
    default_local_dir: str = "runs/${trainer.experiment_name}"  # the run directory
    resume_mode: str = "auto"  # auto | disable | resume_path
    resume_from_path: str | None = None
    seed: NonNegative = 0


class TransferQueue(_Section, frozen=True, kw_only=True):
    arena_bytes: Count | None = None  # null: what (staleness + 1) buffers and the validation set need
    extent_bytes: Count | None = None  # null: the largest row


class Deployment(_Section, frozen=True, kw_only=True):
    n_rollout_instances: Count = 1
    train_ngpus_per_node: Count = 1  # trainer ranks
    rollout_port: Port = 0  # first replica's gRPC port on loopback, the next ones follow; 0: private Unix sockets
    master_port: Port = 0  # torch.distributed's port; 0: picked by the kernel
    threads_per_process: Count = 1  # torch threads on CPU
    max_restarts: NonNegative = 3  # of one replica or worker process


class GroupPostProcess(_Section, frozen=True, kw_only=True):
    enable: bool = False
    name: str | None = "dynamic_sampling_filter"


class RoutingStrategy(_Section, frozen=True, kw_only=True):
    method: str = "request_num_balance"  # or round_robin
    max_concurrent_seqs_per_instance: Count = 1024


class SyncAndMigStrategy(_Section, frozen=True, kw_only=True):
    method: str = "greedy"
    check_interval_in_ms: Count = 100


class PartialRollout(_Section, frozen=True, kw_only=True):
    enable: bool = True  # False: a replica syncs only when idle


class RolloutCoordination(_Section, frozen=True, kw_only=True):
    routing_strategy: RoutingStrategy = RoutingStrategy()
    sync_and_mig_strategy: SyncAndMigStrategy = SyncAndMigStrategy()
    partial_rollout: PartialRollout = PartialRollout()


class Sync(_Section, frozen=True, kw_only=True):
    running: str = "recompute"  # recompute | keep | abort: what a sync does to running requests
    timeout_s: Positive = 120.0


class Psrl(_Section, frozen=True, kw_only=True):
    rollout_n: Count = 1
    staleness: NonNegative = 0
    staleness_buffer_entries: Count | None = None  # null: data.train_batch_size, which it must equal
    group_post_process: GroupPostProcess = GroupPostProcess()
    rollout_coordination: RolloutCoordination = RolloutCoordination()
    sync: Sync = Sync()
    deployment: Deployment = Deployment()
    allow_truncated_sampling: bool = False
    progress_timeout_s: Annotated[float, Meta(ge=1)] = (
        900.0  # watchdog: no token, no end of a group and no step for so long ends the run; over the longest step
    )


class Config(_Section, frozen=True, kw_only=True):
    data: Data
    train_actor_rollout_ref: TrainActorRolloutRef
    gen_actor_rollout_ref: GenActorRolloutRef = GenActorRolloutRef()
    algorithm: Algorithm = Algorithm()
    reward: Reward = Reward()
    trainer: Trainer = Trainer()
    transfer_queue: TransferQueue = TransferQueue()
    psrl: Psrl = Psrl()
