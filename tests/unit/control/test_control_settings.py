"""What of the configuration PSManager uses."""

import msgspec

from psrl.config.schema import Config
from psrl.control import ControlSettings, total_steps
from psrl.types import Epoch, SamplingParams, Version


def config(**trainer) -> Config:
    return msgspec.convert(
        {
            "data": {"train_files": "t", "val_files": "v", "train_batch_size": 4, "max_response_length": 32},
            "train_actor_rollout_ref": {
                "model": {"path": "m"},
                "rollout": {"val_kwargs": {"n": 2, "temperature": 0.7, "top_p": 0.9}},
            },
            "gen_actor_rollout_ref": {"rollout": {"temperature": 0.8}},
            "algorithm": {"filter_groups": {"metric": "score", "max_num_gen_batches": 5}, "min_spread": 0.1},
            "psrl": {"rollout_n": 8, "staleness": 3, "group_post_process": {"enable": True}},
            "trainer": {"total_epochs": 3} | trainer,
        },
        Config,
    )


def test_steps_are_whole_batches_per_epoch_up_to_the_limit() -> None:
    assert total_steps(config(), 11) == 6
    assert total_steps(config(total_training_steps=5), 11) == 5
    assert total_steps(config(total_training_steps=50), 11) == 6


def test_validation_only_offers_nothing_for_training() -> None:
    settings = ControlSettings.from_config(
        config(val_only=True), num_rows=11, stop_token_ids=(), initial_version=Version(4)
    )
    assert settings.total_steps == 4


def test_settings_come_from_their_keys() -> None:
    settings = ControlSettings.from_config(
        config(), num_rows=11, stop_token_ids=(2,), epoch=Epoch(1), initial_version=Version(4)
    )
    assert (settings.total_steps, settings.batch_size, settings.rollout_n, settings.staleness) == (6, 4, 8, 3)
    assert (settings.epoch, settings.initial_version) == (1, 4)
    assert (settings.filter_enabled, settings.filter_metric) == (True, "score")
    assert (settings.max_num_gen_batches, settings.min_spread) == (5, 0.1)
    assert settings.sampling == SamplingParams(temperature=0.8, max_new_tokens=32, stop_token_ids=(2,))


def test_validation_is_greedy_unless_it_samples() -> None:
    greedy = ControlSettings.from_config(config(), num_rows=11, stop_token_ids=())
    assert (greedy.val_n, greedy.val_sampling) == (2, SamplingParams(temperature=0.0, max_new_tokens=32))
    sampled = msgspec.to_builtins(config())
    sampled["train_actor_rollout_ref"]["rollout"]["val_kwargs"]["do_sample"] = True
    settings = ControlSettings.from_config(msgspec.convert(sampled, Config), num_rows=11, stop_token_ids=())
    assert settings.val_sampling == SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=32)
