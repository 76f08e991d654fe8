"""From a configuration to a RunSpec: what is decided, and what can be refused, before a process of the run starts."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from psrl._core import memory_available
from psrl.config.schema import Config
from psrl.control import ControlState, TrajectoryLog, total_steps
from psrl.data import ChatTokenizer, Order, Position, PromptDataset, Sampler
from psrl.data.dataset import CheckTruth
from psrl.errors import CheckpointError, ConfigError, DataError, PsrlError
from psrl.launch.architecture import architecture_problems, ask_transformers, doubts
from psrl.launch.model_files import cache_values, manifest_of, max_positions, read_config
from psrl.launch.ports import free_ports
from psrl.launch.preflight import machine_problems
from psrl.launch.previous import set_aside
from psrl.launch.spec import CHECKPOINTS, RunSpec, is_own_checkpoint
from psrl.reward.plan import RewardPlan
from psrl.reward.process import verify
from psrl.train.checkpoint_dir import Checkpoint, resume_point
from psrl.transfer.capacity import QueueLoad, QueuePlan, plan_queue
from psrl.types import Epoch, Version
from psrl.weights.manifest import Manifest
from psrl.weights.store import WeightStore

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What a run needs, found without starting anything."""

    manifest: Manifest
    queue: QueuePlan
    total_steps: int
    device: str
    dataset: str  # one line on the training data
    order: Order  # in which its rows are drawn

    @property
    def shared_bytes(self) -> int:
        return self.queue.arena_bytes + WeightStore.required_bytes(self.manifest.total_bytes)


def make_plan(config: Config) -> Plan:
    """Check files, model, data, rewards, memory, ports. Raises ConfigError with all problems at once."""
    problems: list[str] = []
    device = accelerator()
    manifest = _try(
        problems, lambda: manifest_of(Path(config.train_actor_rollout_ref.model.path), dtype(config, device))
    )
    if manifest is not None:
        problems += _model_problems(config, manifest)
    problems += _length_problems(config)
    problems += _offload_problems(config, device)
    tokenizer = _try(problems, lambda: _tokenizer(config))
    rewards = _try(problems, lambda: _checked_rewards(config))
    train = validation = None
    if tokenizer is not None:
        check_truth = rewards.check_truth if rewards is not None else _no_check
        train = _try(problems, lambda: _train_data(config, tokenizer, check_truth))
        validation = _try(problems, lambda: _validation_data(config, tokenizer, check_truth))
    else:
        problems += missing_files(config)
    _try(problems, lambda: _check_resume(config))
    if rewards is not None and train is not None and validation is not None:
        sources = train.data_sources | validation.data_sources
        _try(problems, lambda: rewards.check_data_sources(sources))
    if rewards is not None:
        problems += filter_problems(config, rewards.known_metrics())
    num_validation = len(validation) if validation is not None else 0
    queue = _try(problems, lambda: _queue_plan(config, num_validation))
    plan = None
    if manifest is not None and queue is not None and train is not None:
        order = Order(
            len(train), config.data.train_batch_size, config.data.shuffle, config.data.seed, train.fingerprint
        )
        plan = Plan(manifest, queue, total_steps(config, len(train)), device, train.describe(), order)
    problems += machine_problems(
        config,
        shared_bytes=plan.shared_bytes if plan is not None else None,
        disk_bytes=_disk_bytes(config, manifest),
    )
    if manifest is not None:
        problems += _memory_problems(config, manifest, device, plan.shared_bytes if plan is not None else 0)
    problems += logger_problems(config)
    if problems or plan is None:
        raise ConfigError(*dict.fromkeys(problems))  # a missing directory is said once, whoever needed it
    return plan


def make_spec(config: Config, plan: Plan, run_dir: Path, socket_dir: Path) -> RunSpec:
    """Choose where to start from and number this attempt; when that is not this directory's own checkpoint, but it has
    a record, the record is moved aside. Raises ConfigError if the checkpoint asked for is no good, or was made with
    other data.
    """
    mode = config.trainer.resume_mode
    checkpoint = resume_point(run_dir / CHECKPOINTS, mode, config.trainer.resume_from_path)
    initial = 0
    if checkpoint is not None:
        state = ControlState.decode(checkpoint.control_state())
        Sampler(plan.order).restore(msgspec.msgpack.decode(state.feed, type=Position))
        initial = state.version
    if mode == "disable" or (checkpoint is not None and not is_own_checkpoint(checkpoint.path, run_dir)):
        set_aside(run_dir)
    log = TrajectoryLog(run_dir)
    log.close()
    return RunSpec(
        config=config,
        run_dir=str(run_dir),
        socket_dir=str(socket_dir),
        attempt=log.attempt,
        epoch=Epoch(log.attempt),
        initial_version=Version(initial),
        resume_from=str(checkpoint.path.absolute()) if checkpoint is not None else None,
        total_steps=plan.total_steps,
        manifest=plan.manifest.encode(),
        device=plan.device,
        master_port=config.psrl.deployment.master_port or free_ports(1)[0],
    )


def is_finished(spec: RunSpec) -> bool:
    """Whether an earlier start did all there is to do, its last validation and record included."""
    if spec.config.trainer.val_only or spec.initial_version < spec.total_steps:
        return False
    return TrajectoryLog.ended(Path(spec.run_dir))


def accelerator() -> str:
    """cuda if this machine shows an NVIDIA device to this process, else cpu. Without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "cuda" if visible != "" and any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def dtype(config: Config, device: str) -> str:
    """In what dtype weights are published: the engine's."""
    asked = config.gen_actor_rollout_ref.rollout.dtype
    return asked if asked != "auto" else ("bfloat16" if device == "cuda" else "float32")


def _tokenizer(config: Config) -> ChatTokenizer | None:
    """None, without a word, if the model's directory is not there: that has been said."""
    path = config.train_actor_rollout_ref.model.path
    return ChatTokenizer.load(path, config.data.apply_chat_template_kwargs) if Path(path).is_dir() else None


def _no_check(data_source: str, ground_truth: object) -> str:
    return ""


def _train_data(config: Config, tokenizer: ChatTokenizer, check_truth: CheckTruth) -> PromptDataset:
    data = config.data
    with _led_in_by("data.train_files"):
        dataset = PromptDataset.load(data.train_files, data, tokenizer, data.train_max_samples, check_truth)
        dataset.require(data.train_batch_size)
        return dataset


def _validation_data(config: Config, tokenizer: ChatTokenizer, check_truth: CheckTruth) -> PromptDataset:
    data = config.data
    with _led_in_by("data.val_files"):
        dataset = PromptDataset.load(data.val_files, data, tokenizer, data.val_max_samples, check_truth)
        dataset.require(1)
        return dataset


@contextmanager
def _led_in_by(key: str) -> Iterator[None]:
    """A DataError with the key that named the files before its text."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def missing_files(config: Config) -> list[str]:
    """What can be said of the data without a tokenizer: files that are not there."""
    named = {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
    return [
        f"{key}: {file} does not exist"
        for key, files in named.items()
        for file in ([files] if isinstance(files, str) else files)
        if not Path(file).expanduser().exists()
    ]


def filter_problems(config: Config, known: frozenset[str] | None) -> list[str]:
    """A metric for dynamic sampling that no score will have; silent where functions of the user's may report it."""
    filtering, metric = config.psrl.group_post_process, config.algorithm.filter_groups.metric
    if not filtering.enable or filtering.name != "dynamic_sampling_filter" or known is None:
        return []
    names = sorted({"score", *known})
    if metric in names:
        return []
    return [
        f"algorithm.filter_groups.metric={metric} is not a metric of the built-in rewards: use {' or '.join(names)}"
    ]


def logger_problems(config: Config) -> list[str]:
    """Loggers whose package is not installed."""
    if "wandb" in config.trainer.logger and importlib.util.find_spec("wandb") is None:
        return ["trainer.logger names wandb, which is not installed: pip install wandb, or take it out of the list"]
    return []


def _check_resume(config: Config) -> None:
    """Is the checkpoint that is asked for by path there and whole? Its checksums are compared when it is read."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
        try:
            Checkpoint.open(Path(trainer.resume_from_path))
        except CheckpointError as error:
            raise ConfigError(f"trainer.resume_from_path={trainer.resume_from_path}: {error}") from error


def _checked_rewards(config: Config) -> RewardPlan:
    """The plan, its functions loaded once in a process of their own, as a reward worker will."""
    rewards = RewardPlan.of(config.reward, config.data)
    verify(rewards)
    return rewards


def _model_problems(config: Config, manifest: Manifest) -> list[str]:
    """What the model's config, overrides included, says otherwise than its weights, or transformers does not know."""
    model = config.train_actor_rollout_ref.model
    path = Path(model.path)
    said, shapes = read_config(path), {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
    problems = architecture_problems(path, said, model.override_config, shapes)
    if not problems and doubts(said, model.override_config):
        problems = ask_transformers(path, model.override_config)
    return problems


def _length_problems(config: Config) -> list[str]:
    """The context length against prompt and response; silent when the model's config cannot be read."""
    model = config.train_actor_rollout_ref.model
    try:
        limit = max_positions(read_config(Path(model.path)), model.override_config)
    except ConfigError:
        return []
    needed = config.data.max_prompt_length + config.data.max_response_length
    if limit is None or needed <= limit:
        return []
    return [
        f"data.max_prompt_length={config.data.max_prompt_length} and data.max_response_length="
        f"{config.data.max_response_length} make {needed} tokens, the model takes {limit} (max_position_embeddings); "
        "lower them, or set +train_actor_rollout_ref.model.override_config.max_position_embeddings"
    ]


def _offload_problems(config: Config, device: str) -> list[str]:
    """What `psrl.train.fsdp` would refuse only in the trainer's process; offloading means nothing on a CPU."""
    fsdp = config.train_actor_rollout_ref.actor.fsdp_config
    if device != "cuda" or fsdp.param_offload or not fsdp.optimizer_offload:
        return []
    key = "train_actor_rollout_ref.actor.fsdp_config"
    return [f"{key}.optimizer_offload=true with {key}.param_offload=false is not built yet; set both or neither"]


def _memory_problems(config: Config, manifest: Manifest, device: str, shared_bytes: int) -> list[str]:
    """On CPU: what replicas and trainer may come to take, against what there is. On a GPU the engine says so itself.

    A replica holds its weights, a pulled copy of them, and keys and values of as many full-length rows as can be
    admitted; the trainer float32 weights, gradients and two moments, sharded over its ranks.
    """
    if device != "cpu":
        return []
    rollout = config.gen_actor_rollout_ref.rollout
    routing = config.psrl.rollout_coordination.routing_strategy
    num_replicas = config.psrl.deployment.n_rollout_instances
    admissible = (config.psrl.staleness + 1) * config.data.train_batch_size * config.psrl.rollout_n
    rows = min(rollout.max_num_seqs, routing.max_concurrent_seqs_per_instance, admissible)
    length = config.data.max_prompt_length + config.data.max_response_length
    model = config.train_actor_rollout_ref.model
    item_bytes = 4 if manifest.tensors[0].dtype == "float32" else 2
    cache = rows * length * cache_values(read_config(Path(model.path)), model.override_config) * item_bytes
    replicas = num_replicas * (2 * manifest.total_bytes + cache)
    trainer = 16 * manifest.total_bytes // item_bytes
    needed, available = shared_bytes + replicas + trainer, memory_available()
    if needed <= available:
        return []
    return [
        f"the run may take {needed / 2**30:.1f} GiB of memory and {available / 2**30:.1f} GiB can be had: "
        f"{num_replicas} replicas with keys and values of {rows} rows of {length} tokens take {replicas / 2**30:.1f}, "
        f"the trainer {trainer / 2**30:.1f}; lower gen_actor_rollout_ref.rollout.max_num_seqs or the lengths"
    ]


def _queue_plan(config: Config, num_validation: int) -> QueuePlan:
    agents = config.gen_actor_rollout_ref.rollout.agent.num_workers
    load = QueueLoad(
        staleness=config.psrl.staleness,
        prompts_per_step=config.data.train_batch_size,
        rollout_n=config.psrl.rollout_n,
        validation_rows=num_validation * config.train_actor_rollout_ref.rollout.val_kwargs.n,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        num_writers=agents + config.psrl.deployment.train_ngpus_per_node + 1,
    )
    queue = config.transfer_queue
    return plan_queue(load, arena_bytes=queue.arena_bytes, extent_bytes=queue.extent_bytes)


def _disk_bytes(config: Config, manifest: Manifest | None) -> int:
    """Room for logs and the checkpoints kept: float32 weights, two moments, and the export, of each."""
    if manifest is None or config.trainer.save_freq <= 0:
        return 1 << 26
    values = manifest.total_bytes // (4 if manifest.tensors[0].dtype == "float32" else 2)
    kept = (config.trainer.max_actor_ckpt_to_keep or 1) + 1
    return (1 << 26) + 16 * values * kept


def _try(problems: list[str], make: Callable[[], T]) -> T | None:
    """What `make` returns, or None with its complaint noted."""
    try:
        return make()
    except ConfigError as error:
        problems += error.problems
    except (DataError, PsrlError) as error:
        problems.append(str(error))
    return None
