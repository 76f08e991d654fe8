"""What PSManager needs to know of a run, derived once from the configuration."""

import msgspec

from psrl.config.schema import Config
from psrl.types import Epoch, SamplingParams, Version

MIN_FAILED_IN_A_ROW = 8


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`initial_version` is what the trainer publishes first: 0, or the version of the checkpoint it resumes."""

    total_steps: int  # steps of the whole run: buffers initial_version .. total_steps - 1
    batch_size: int  # groups of one step (B)
    rollout_n: int  # siblings of a group (n)
    staleness: int
    epoch: Epoch = Epoch(0)
    initial_version: Version = Version(0)
    filter_enabled: bool = False  # dynamic sampling
    filter_metric: str = "acc"  # a metric of the reward, or `score` for the raw score
    min_spread: float = 0.0  # max - min of the metric in a group must exceed it
    max_num_gen_batches: int = 10  # groups generated for one buffer, in batches, before it is closed short
    max_failed_in_a_row: int = MIN_FAILED_IN_A_ROW  # groups; then the run ends with the last reason
    failed_group_retries: int = 0  # times a failed group is offered again before it counts as failed
    sampling: SamplingParams = SamplingParams()
    val_n: int = 1
    val_sampling: SamplingParams = SamplingParams(temperature=0.0)

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        num_rows: int,
        stop_token_ids: tuple[int, ...],
        epoch: Epoch = Epoch(0),
        initial_version: Version = Version(0),
    ) -> "ControlSettings":
        """`num_rows`: prompts of the training set after filters. `stop_token_ids`: what ends a response."""
        rollout = config.gen_actor_rollout_ref.rollout
        validation = config.train_actor_rollout_ref.rollout.val_kwargs
        batch_size = config.data.train_batch_size
        return cls(
            total_steps=initial_version if config.trainer.val_only else total_steps(config, num_rows),
            batch_size=batch_size,
            rollout_n=config.psrl.rollout_n,
            staleness=config.psrl.staleness,
            epoch=epoch,
            initial_version=initial_version,
            filter_enabled=config.psrl.group_post_process.enable
            and config.psrl.group_post_process.name == "dynamic_sampling_filter",
            filter_metric=config.algorithm.filter_groups.metric,
            min_spread=config.algorithm.min_spread,
            max_num_gen_batches=config.algorithm.filter_groups.max_num_gen_batches,
            max_failed_in_a_row=max(MIN_FAILED_IN_A_ROW, batch_size),
            sampling=SamplingParams(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_new_tokens=config.data.max_response_length,
                stop_token_ids=stop_token_ids,
            ),
            val_n=validation.n,
            val_sampling=SamplingParams(
                temperature=validation.temperature if validation.do_sample else 0.0,
                top_p=validation.top_p if validation.do_sample else 1.0,
                top_k=validation.top_k if validation.do_sample else -1,
                max_new_tokens=config.data.max_response_length,
                stop_token_ids=stop_token_ids,
            ),
        )


def total_steps(config: Config, num_rows: int) -> int:
    """Steps of the run: floor(rows / B) per epoch, at most trainer.total_training_steps."""
    steps = num_rows // config.data.train_batch_size * config.trainer.total_epochs
    limit = config.trainer.total_training_steps
    return steps if limit is None else min(steps, limit)
