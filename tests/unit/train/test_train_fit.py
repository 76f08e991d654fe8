"""The loop against scripted surroundings: order of events, skipped steps, metrics, resume."""

import math

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from train_scripted import Calls, Control, make_config, make_fields, make_links
from transformers import AutoModelForCausalLM

from psrl.errors import ConfigError, RunFailed
from psrl.train.checkpoint_dir import CheckpointDir
from psrl.train.fit import fit, is_due
from psrl.train.ranks import Ranks


@pytest.fixture
def run(tiny_model, tmp_path):
    """Run fit() once; gives the links, to look at what it did."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    opened: list[Calls] = []

    def start(total_steps: int, config, *, run_dir=tmp_path, spoil=None, **more):
        links = make_links(run_dir, model, total_steps, **more)
        opened.append(links.calls)
        if spoil:
            spoil(links.queue)
        fit(config, links, Ranks.alone())
        return links

    yield start
    for calls in opened:
        calls.close()


def test_steps_publish_validate_save_and_log_in_order(run, tiny_model, tmp_path) -> None:
    links = run(3, make_config(tiny_model, val_before_train=True, test_freq=2, save_freq=2))
    control, metrics = links.head.control, links.head.metrics
    assert control.published == [(0, False), (1, False), (2, False), (3, False)]
    assert control.validated == [0, 2, 3]
    assert control.finished == "all 3 steps are done"
    assert [step for step, _ in metrics.lines] == [0, 1, 2, 3]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "global_step_2",
        "global_step_3",
        "latest_checkpointed_iteration.txt",
    ]
    assert not torch.equal(*(links.weights.versions[v]["model.embed_tokens.weight"] for v in (0, 1)))
    first = metrics.lines[1][1]
    assert all(math.isfinite(value) for value in first.values())
    names = (
        "actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/grad_norm actor/lr "
        "actor/entropy critic/score/mean critic/rewards/max critic/advantages/min critic/returns/mean "
        "response_length/clip_ratio prompt_length/mean training/global_step "
        "training/rollout_probs_diff_mean training/started_s training/ended_s "
        "training/rollout_actor_probs_pearson_corr staleness/max staleness/hist/0 batch/groups_used "
        "groups/trained perf/throughput perf/mfu/actor perf/total_num_tokens timing_s/step "
        "timing_s/update_actor timing_s/wait_for_gen timing_per_token_ms/update_actor "
        "timing_per_token_ms/gen global_seqlen/mean"
    )
    assert not [name for name in names.split() if name not in first]
    assert first["actor/lr"] == pytest.approx(1e-3 / 3)
    assert metrics.lines[2][1]["val-core/words/acc/mean@1"] == 0.5
    row = links.queue.rows["0_0"]
    assert row["old_log_probs"].dtype == row["advantages"].dtype == np.float32
    assert row["old_log_probs"].shape == row["advantages"].shape == row["responses"].shape


def test_old_log_probs_of_the_rollout_are_taken_as_they_are(run, tiny_model) -> None:
    links = run(1, make_config(tiny_model, bypass=True))
    assert "old_log_probs" not in links.queue.rows["0_0"]
    assert links.head.metrics.lines[-1][1]["actor/entropy"] > 0


def test_a_step_without_groups_publishes_the_same_weights(run, tiny_model) -> None:
    links = run(3, make_config(tiny_model), control=Control(empty=(1,)))
    assert links.head.control.published == [(0, False), (1, False), (2, True), (3, False)]
    versions = links.weights.versions
    assert all(torch.equal(versions[1][name], versions[2][name]) for name in versions[1])
    assert links.head.metrics.lines[1][1]["batch/groups_used"] == 0.0


def test_the_end_of_data_ends_the_run_with_a_last_save_and_validation(run, tiny_model, tmp_path) -> None:
    links = run(9, make_config(tiny_model, save_freq=100, test_freq=100), control=Control(end=2))
    assert links.head.control.finished == "the data ended"
    assert links.head.control.validated == [2]
    assert CheckpointDir(tmp_path / "checkpoints").newest().step == 2


def test_every_pass_over_the_batch_updates(run, tiny_model, tmp_path) -> None:
    """Two steps of two mini-batches each, three times over."""
    config = make_config(tiny_model, save_freq=2)
    roles = config.train_actor_rollout_ref
    actor = msgspec.structs.replace(roles.actor, ppo_epochs=3)
    links = run(2, msgspec.structs.replace(config, train_actor_rollout_ref=msgspec.structs.replace(roles, actor=actor)))
    assert [values["actor/updates"] for _, values in links.head.metrics.lines] == [6, 6]
    (shard,) = (tmp_path / "checkpoints/global_step_2").glob("shard_*")
    assert load_file(shard)["step/model.norm.weight"].item() == 12.0


def test_a_last_validation_that_a_kill_prevented_is_made_up_for(run, tiny_model, tmp_path) -> None:
    run(2, make_config(tiny_model, save_freq=2))
    config = make_config(tiny_model, test_freq=2, save_freq=2)
    links = run(2, config, resume_from=CheckpointDir(tmp_path / "checkpoints").newest().path)
    assert links.head.control.published == [(2, False)]
    assert links.head.control.validated == [2]


def test_validation_only(run, tiny_model) -> None:
    links = run(9, make_config(tiny_model, val_only=True))
    assert links.head.control.published == [(0, False)]
    assert links.head.control.validated == [0]


def spoil_reward(buffer: int):
    """A NaN reward in the first mini-batch of a buffer."""

    def spoil(queue) -> None:
        fields = make_fields(buffer, 0)
        queue.rows[f"{4 * buffer}_0"] = fields | {"reward": np.asarray(np.float32("nan"))}

    return spoil


def test_a_nan_reward_skips_its_update_alone(run, tiny_model) -> None:
    links = run(2, make_config(tiny_model), spoil=spoil_reward(0))
    line = links.head.metrics.lines[0][1]
    assert line["actor/skipped_updates"] == 1
    assert line["actor/updates"] == 1
    assert all(torch.isfinite(t).all() for t in links.weights.versions[2].values())


def test_too_many_skipped_updates_end_the_run_by_name(run, tiny_model) -> None:
    def spoil(queue) -> None:
        for buffer in range(4):
            for group in (0, 2):
                fields = make_fields(buffer, 4 * group)
                queue.rows[f"{4 * buffer + group}_0"] = fields | {"reward": np.asarray(np.float32("inf"))}

    with pytest.raises(RunFailed, match=r"4 updates in a row .* model\.embed_tokens\.weight"):
        run(4, make_config(tiny_model), spoil=spoil)


def test_a_run_cut_in_two_equals_one_in_a_piece(run, tiny_model, tmp_path) -> None:
    config = make_config(tiny_model, save_freq=2)
    whole = run(5, config, run_dir=tmp_path / "whole")
    run(2, config, run_dir=tmp_path / "cut")
    torch.manual_seed(77)
    saved = CheckpointDir(tmp_path / "cut" / "checkpoints").newest()
    assert saved.control_state() == b"control at 2"
    rest = run(5, config, run_dir=tmp_path / "cut", resume_from=saved.path)
    assert rest.head.control.published == [(2, False), (3, False), (4, False), (5, False)]
    assert [step for step, _ in rest.head.metrics.lines] == [3, 4, 5]
    for version in (2, 3, 4, 5):
        ours, theirs = rest.weights.versions[version], whole.weights.versions[version]
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), version
    for (_, ours), (_, theirs) in zip(rest.head.metrics.lines, whole.head.metrics.lines[2:]):
        assert ours["actor/pg_loss"] == theirs["actor/pg_loss"]
        assert ours["actor/lr"] == theirs["actor/lr"]


def test_weights_that_engines_do_not_expect_are_named(tiny_model, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    links = make_links(tmp_path, model, 1)
    specs = links.weights.manifest.tensors
    links.weights.manifest = msgspec.structs.replace(links.weights.manifest, tensors=specs[1:])
    try:
        with pytest.raises(ConfigError, match=rf"1 weights differ .* {specs[0].name}"):
            fit(make_config(tiny_model), links, Ranks.alone())
    finally:
        links.calls.close()


def test_due_steps() -> None:
    assert [step for step in range(1, 8) if is_due(step, 3, 7)] == [3, 6, 7]
    assert not is_due(7, -1, 7)
