"""Loading: types by declaration, origins, aliases, and every problem at once."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from psrl.config import load
from psrl.config.aliases import ALIASES, Fate, find, rename
from psrl.config.dump import to_yaml
from psrl.config.keys import all_paths, lookup, nearest
from psrl.config.loader import shipped
from psrl.config.schema import Config, Data, Model, TrainActorRolloutRef
from psrl.config.yamlfile import read_yaml
from psrl.errors import ConfigError

BASE = Path(__file__).parents[3] / "psrl/config/yaml/base.yaml"
T, G = "train_actor_rollout_ref", "gen_actor_rollout_ref"


def problems(*overrides: str, name: str = "quickstart") -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(name, overrides)
    return caught.value.problems


def value(override: str, key: str) -> Any:
    node: Any = load("quickstart", [override]).config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def test_base_yaml_holds_the_defaults_of_the_schema() -> None:
    defaults = Config(
        data=Data(train_files="???", val_files="???"),
        train_actor_rollout_ref=TrainActorRolloutRef(model=Model(path="???")),
    )
    written = OmegaConf.create(read_yaml(BASE).tree)
    actor = written.train_actor_rollout_ref.actor
    actor.clip_ratio_low, actor.clip_ratio_high = actor.clip_ratio_low, actor.clip_ratio_high  # resolve these two
    assert msgspec.json.encode(OmegaConf.to_container(written)) == msgspec.json.encode(defaults)


@pytest.mark.parametrize("name", [name for name in shipped() if name not in ("base", "dapo_trainer")])
def test_shipped_configs_load(name: str) -> None:
    load(name)


def test_dapo_trainer_asks_for_what_a_user_must_say() -> None:
    assert [text.split(":")[0] for text in problems(name="dapo_trainer")] == [
        "data.train_files", "data.val_files", f"{T}.model.path"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"), [("1e-6", 1e-6), ("5e-5", 5e-5), ("1E-3", 1e-3), ("'1e-4'", 1e-4), ("1", 1.0), (".5", 0.5)]
)
def test_floats_from_command_line_and_file(tmp_path: Path, text: str, expected: float) -> None:
    key = f"{T}.actor.optim.lr"
    assert value(f"{key}={text}", key) == expected
    file = tmp_path / "my.yaml"
    file.write_text(f"defaults: [quickstart]\n{T}: {{actor: {{optim: {{lr: {text}}}}}}}\n")
    assert load(file).config.train_actor_rollout_ref.actor.optim.lr == expected


@pytest.mark.parametrize(("text", "expected"), [("3", 3), ("'3'", 3), ("3.0", 3), ("1e1", 10), ("1_0", 10)])
def test_integers_from_command_line_and_file(tmp_path: Path, text: str, expected: int) -> None:
    assert value(f"psrl.staleness={text}", "psrl.staleness") == expected
    (file := tmp_path / "my.yaml").write_text(f"defaults: [quickstart]\npsrl: {{staleness: {text}}}\n")
    assert load(file).config.psrl.staleness == expected


@pytest.mark.parametrize("text", ["3.5", "0o17", "017", "12:30", "true", "[3]", "null", "abc", "inf", "-1", "{a: 1}"])
def test_what_is_no_integer_is_refused_alike(tmp_path: Path, text: str) -> None:
    (problem,) = problems(f"psrl.staleness={text}")
    assert problem.startswith("psrl.staleness: expected an integer")
    (file := tmp_path / "my.yaml").write_text(f"defaults: [quickstart]\npsrl:\n  staleness: {text}\n")
    with pytest.raises(ConfigError, match=r"psrl.staleness.*expected an integer|psrl.staleness.a: unknown key"):
        load(file)


@pytest.mark.parametrize(("text", "expected"), [("yes", True), ("No", False), ("on", True), ("False", False)])
def test_booleans(text: str, expected: bool) -> None:
    assert value(f"trainer.val_before_train={text}", "trainer.val_before_train") is expected


def test_texts_keep_what_was_typed() -> None:
    assert value("trainer.experiment_name=007", "trainer.experiment_name") == "007"
    assert value("trainer.experiment_name=1_000", "trainer.experiment_name") == "1_000"
    assert value("trainer.experiment_name=yes", "trainer.experiment_name") == "yes"


@pytest.mark.parametrize("text", ["[console,wandb]", "'[console,wandb]'", '["console","wandb"]'])
def test_lists_survive_a_shells_quotes(text: str) -> None:
    assert value(f"trainer.logger={text}", "trainer.logger") == ["console", "wandb"]
    assert value("trainer.logger=console", "trainer.logger") == ["console"]


def test_typos_are_refused_everywhere_with_the_right_section(tmp_path: Path) -> None:
    found = problems("psrl.stalenes=2", "+psrl.stalenes=2", "++trainer.save_frq=1", f"{T}.lr=1", "trainer.num-steps=9")
    assert [text.split("did you mean ")[1] for text in found] == [
        "psrl.staleness?", "psrl.staleness?", "trainer.save_freq?", f"{T}.actor.optim.lr?",
        "trainer.total_training_steps?",
    ]  # fmt: skip
    file = tmp_path / "my.yaml"
    file.write_text("defaults: [quickstart]\npsrl:\n  stalenes: 2\nlearning_rate: 1\ndata:\n  train-files: x\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert set(caught.value.problems) == {
        f"psrl.stalenes: unknown key ({file}:3); did you mean psrl.staleness?",
        f"learning_rate: unknown key ({file}:4); did you mean {T}.actor.optim.lr?",
        f"data.train-files: unknown key ({file}:6); did you mean data.train_files?",
    }


def test_unknown_keys_inside_lists_are_found() -> None:
    (problem,) = problems("data.reward_model_dicts=[{reward_loop_type: dapo, reward_cof: 2}]")
    assert "data.reward_model_dicts.0.reward_cof: unknown key" in problem
    assert "did you mean data.reward_model_dicts.0.reward_coef?" in problem


def test_free_form_sections_take_anything_with_a_plus() -> None:
    loaded = load("quickstart", [f"+{T}.model.override_config.max_position_embeddings=32768",
                                 "+data.apply_chat_template_kwargs={enable_thinking: false}"])  # fmt: skip
    assert loaded.config.train_actor_rollout_ref.model.override_config == {"max_position_embeddings": 32768}
    assert loaded.config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    (problem,) = problems(f"{T}.model.override_config.x=1")
    assert "+train_actor_rollout_ref.model.override_config.x" in problem


def test_everything_wrong_is_said_at_once() -> None:
    found = "\n".join(problems(
        "psrl.stalenes=2", "psrl.rollout_n=3.5", "trainer.save_freq=0", "trainer.experiment_name=${nope}",
        "critic.lr=1", "n=a,b", "data.seed", f"{T}.actor.ppo_mini_batch_size=48", "~data.val_files",
        "data.train_batch_size=30", "psrl.staleness_buffer_entries=64",
    ))  # fmt: skip
    for expected in (
        "psrl.stalenes: unknown key", "psrl.rollout_n: expected an integer ≥ 1, got 3.5", "trainer.save_freq=0",
        "trainer.experiment_name: cannot be resolved: Interpolation key 'nope' not found", "the critic is not built",
        "gives several values", "override data.seed", "ppo_mini_batch_size=48 is more than data.train_batch_size=30",
        "data.val_files: must be set", "staleness_buffer_entries=64 must equal data.train_batch_size=30",
    ):  # fmt: skip
        assert expected in found
    assert "too few" not in found  # psrl.rollout_n is wrong already


def test_interpolations() -> None:
    loaded = load("quickstart", ["data.seed=${psrl.staleness}", f"{T}.actor.clip_ratio_low=${{.clip_ratio_high}}",
                                 "trainer.experiment_name=s${actor_rollout_ref.actor.clip_ratio}"])  # fmt: skip
    assert loaded.config.data.seed == 3
    assert loaded.config.train_actor_rollout_ref.actor.clip_ratio_low == 0.28
    assert loaded.config.trainer.experiment_name == "s0.2"
    (problem,) = problems("data.seed=${trainer.seed}", "trainer.seed=${data.seed}")[:1]
    assert "refers to itself" in problem or "cannot be resolved" in problem


def test_origins_name_file_and_line_or_override() -> None:
    origins = load("quickstart", ["psrl.staleness=1"]).origins
    assert origins.where(("psrl", "staleness")) == "override psrl.staleness=1"
    assert re.fullmatch(r"quickstart.yaml:\d+", origins.where(("psrl", "rollout_n")))
    assert re.fullmatch(r"base.yaml:\d+", origins.where(("data", "reward_model_dicts", 0, "reward_coef")))


def test_resolved_yaml_loads_to_the_same_config(tmp_path: Path) -> None:
    loaded = load("quickstart", [
        "trainer.experiment_name=\"a: '#b'\"", "trainer.project_name=\\${x}", "data.prompt_key='1e-6'",
        f"+{T}.model.override_config={{rope: {{factor: 2.0, on: 'true'}}, l: [1, a]}}",
    ])  # fmt: skip
    (file := tmp_path / "config.yaml").write_text(to_yaml(loaded.config, loaded.origins))
    assert load(file).config == loaded.config
    assert loaded.config.trainer.project_name == "${x}"


def test_config_survives_msgpack() -> None:
    config = load("quickstart").config
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config


def test_user_files_build_on_others_and_may_not_turn_in_circles(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [quickstart]\npsrl: {staleness: 1}\ntrainer:\n")
    (tmp_path / "b.yaml").write_text("defaults: [a.yaml]\npsrl: {rollout_n: 4}\n")
    config = load(tmp_path / "b.yaml").config
    assert (config.psrl.staleness, config.psrl.rollout_n, config.data.train_batch_size) == (1, 4, 32)
    (tmp_path / "a.yaml").write_text("defaults: [b.yaml]\n")
    with pytest.raises(ConfigError, match="lead back"):
        load(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match="no config named quikstart \\(did you mean quickstart"):
        load("quikstart")
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "none.yaml")


# -- the alias table


def test_alias_table_is_consistent() -> None:
    assert len({alias.key for alias in ALIASES}) == len(ALIASES)
    for alias in ALIASES:
        path = tuple("0" if part == "*" else part for part in alias.parts if part != "**")
        assert alias.key.endswith("**") or lookup(path) is None, f"{alias.key} is a key of ours"
        if alias.fate is Fate.MAPPED:
            target = tuple(part for part in alias.text.split(".") if part != "**")
            reached = lookup(target) is not None or any(other.key.startswith(".".join(target)) for other in ALIASES)
            assert reached, f"{alias.key} goes to {alias.text}, which nobody knows"


def test_old_names_are_the_new_ones() -> None:
    loaded = load("quickstart", [
        "actor_rollout_ref.actor.optim.lr=1e-5", "psrl.partial_rollout.enable=False", "actor_rollout_ref.rollout.n=4",
        "psrl.routing_strategy.method=round_robin", "algorithm.filter_groups.enable=True", "trainer.n_gpus_per_node=2",
    ])  # fmt: skip
    config = loaded.config
    assert config.train_actor_rollout_ref.actor.optim.lr == 1e-5
    assert not config.psrl.rollout_coordination.partial_rollout.enable
    assert config.psrl.rollout_coordination.routing_strategy.method == "round_robin"
    assert (config.psrl.rollout_n, config.psrl.deployment.train_ngpus_per_node) == (4, 2)
    assert config.psrl.group_post_process.enable
    notes = {note.key: note.text for note in loaded.notes}
    assert notes["actor_rollout_ref.rollout.n"] == "mapped to psrl.rollout_n"
    assert rename(("actor_rollout_ref", "x")) == (T, "x")


def test_old_names_in_files(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("defaults: [quickstart]\nactor_rollout_ref:\n  actor:\n    use_kl_loss: false\n    grad_clip: 2\n")
    loaded = load(file)
    assert loaded.config.train_actor_rollout_ref.actor.grad_clip == 2.0
    assert loaded.origins.where((T, "actor", "grad_clip")) == f"{file}:5"
    assert f"{T}.actor.use_kl_loss" in {note.key for note in loaded.notes}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{T}.actor.use_kl_loss=True", "the KL loss is not built yet; accepted: false"),
        (f"{G}.rollout.tensor_model_parallel_size=2", "not built yet; accepted: 1"),
        ("psrl.ps_mode=nixl_gpu", "accepted: cpu or cpu_ref or nixl_cpu"),
        ("psrl.log_prob.enable_rollout_engine_log_prob=False", "accepted: true"),
        ("critic.optim.lr=1", "remove it"),
        (f"{T}.actor.strategy=megatron", "megatron is not built yet; choose fsdp2"),
        ("psrl.rollout_coordination.redundant_rollout={enable: true, redundant_rollout_n: 10}", "redundant rollout"),
        ("reward_model.enable=True", "reward models is not built yet; accepted: false"),
        ("psrl.deployment.total_nnodes=2", "not built yet; accepted: 1 or null"),
        (f"{T}.rollout.temperature=0.5", f"the value of {G}.rollout.temperature"),
    ],
)
def test_what_is_not_built_is_refused_by_name(override: str, words: str) -> None:
    (problem,) = problems(override)
    assert problem.startswith(override.split("=")[0])
    assert words in problem


QUICK_START_SCRIPT = f"""
psrl.ps_manager_ip=10.0.0.1 psrl.reward_service_ip=10.0.0.1 psrl.rollout_n=8 psrl.staleness=3
psrl.staleness_buffer_entries=64 psrl.ps_mode=nixl_cpu psrl.profile.disable_attn=False psrl.profile.fix_weight=False
psrl.logging_path=/tmp/logs psrl.log_prob.enable_rollout_engine_log_prob=True psrl.deployment.n_rollout_instances=8
psrl.deployment.rollout_nnodes_per_instance=1 psrl.deployment.rollout_ngpus_per_node_per_instance=1
psrl.deployment.n_validate_instances=8 psrl.deployment.validate_nnodes_per_instance=1
psrl.deployment.validate_ngpus_per_node_per_instance=1 psrl.deployment.train_nnodes=1
psrl.deployment.train_ngpus_per_node=8 psrl.group_post_process.enable=False
psrl.group_post_process.name=dynamic_sampling_filter psrl.rollout_coordination.redundant_rollout.enable=True
psrl.rollout_coordination.redundant_rollout.redundant_global_batch_size=64
psrl.rollout_coordination.redundant_rollout.redundant_rollout_n=8
psrl.rollout_coordination.partial_rollout.enable=True {G}.rollout.gpu_memory_utilization=0.9
{G}.rollout.data_parallel_size=1 {G}.rollout.tensor_model_parallel_size=1 {G}.rollout.pipeline_model_parallel_size=1
{G}.rollout.enable_chunked_prefill=True {G}.rollout.max_num_batched_tokens=10240 {G}.rollout.temperature=1
{G}.rollout.top_p=1 {G}.rollout.top_k=-1 {G}.rollout.disable_log_stats=false {T}.model.path=m
{T}.model.use_remove_padding=True +{T}.model.override_config.max_position_embeddings=32768
{T}.model.enable_gradient_checkpointing=True {T}.rollout.max_num_batched_tokens=10240
{T}.rollout.log_prob_use_dynamic_bsz=True {T}.rollout.log_prob_micro_batch_size_per_gpu=1
{T}.rollout.log_prob_max_token_len_per_gpu=10240 {T}.rollout.val_kwargs.temperature=1
{T}.rollout.val_kwargs.do_sample=True {T}.rollout.val_kwargs.top_p=0.7 {T}.rollout.val_kwargs.top_k=-1
{T}.rollout.val_kwargs.n=1 {T}.rollout.tensor_model_parallel_size=1 {T}.rollout.pipeline_model_parallel_size=1
{T}.rollout.gpu_memory_utilization=0.6 {T}.actor.strategy=fsdp2 {T}.actor.use_kl_loss=False
{T}.actor.kl_loss_coef=0.0 {T}.actor.clip_ratio_low=0.2 {T}.actor.clip_ratio_high=0.28 {T}.actor.clip_ratio_c=10.0
{T}.actor.optim.lr=1e-6 {T}.actor.optim.lr_warmup_steps=10 {T}.actor.optim.weight_decay=0.1
{T}.actor.use_dynamic_bsz=True {T}.actor.ppo_max_token_len_per_gpu=10240 {T}.actor.ppo_mini_batch_size=64
{T}.actor.fsdp_config.param_offload=False {T}.actor.fsdp_config.optimizer_offload=True {T}.actor.entropy_coeff=0
{T}.actor.grad_clip=1.0 {T}.actor.loss_agg_mode=token-mean reward.active_managers=[dapo]
reward.managers.dapo.reward_kwargs.overlong_buffer_cfg.enable=True
reward.managers.dapo.reward_kwargs.overlong_buffer_cfg.len=2048
reward.managers.dapo.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
reward.managers.dapo.reward_kwargs.overlong_buffer_cfg.log=False reward.managers.dapo.reward_kwargs.max_resp_len=4096
data.train_files=a data.val_files=[b,c] data.reward_model_dicts.0.reward_loop_type=dapo
data.reward_model_dicts.0.reward_fn=compute_score data.prompt_key=prompt data.truncation=left
data.max_prompt_length=1024 data.max_response_length=4096 data.train_batch_size=64 algorithm.adv_estimator=grpo
algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 algorithm.filter_groups.metric=acc
trainer.logger=["console","wandb"] trainer.project_name=p trainer.experiment_name=e trainer.default_local_dir=d
trainer.val_before_train=True trainer.test_freq=5 trainer.save_freq=200 trainer.total_epochs=10
trainer.total_training_steps=200
"""


def test_overrides_of_the_reference_script_are_accepted_on_one_node() -> None:
    loaded = load("dapo_trainer", QUICK_START_SCRIPT.split())
    assert loaded.config.train_actor_rollout_ref.actor.optim.lr == 1e-6
    assert {note.key for note in loaded.notes} >= {"psrl.ps_mode", "psrl.logging_path", f"{T}.actor.use_kl_loss"}
    assert all(find(tuple(note.key.split("."))) for note in loaded.notes)


def test_nearest_prefers_the_section_that_was_meant() -> None:
    assert nearest(("psrl", "rollout_cordination", "partial_rollout", "enable")) == (
        "psrl.rollout_coordination.partial_rollout.enable"
    )
    assert nearest(("zzz",)) is None


def test_importing_config_is_light() -> None:
    code = "import sys, psrl.config; print([m for m in ('torch','transformers','hydra','numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=110)
    assert out.stdout.strip() == "[]"
    code = "import sys; from psrl.config import load; load('quickstart'); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=110)
    assert out.stdout.strip() == "False"


def test_two_names_of_one_key_may_not_disagree_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    inner = "{actor: {grad_clip: %d}}"
    file.write_text(f"defaults: [quickstart]\n{T}: {inner % 2}\nactor_rollout_ref: {inner % 3}\n")
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.actor.grad_clip .*my.yaml:3.* are two names of one key"):
        load(file)
    file.write_text(file.read_text().replace("3", "2"))
    assert load(file).config.train_actor_rollout_ref.actor.grad_clip == 2


def test_required_sections_may_not_be_deleted() -> None:
    assert problems("~train_actor_rollout_ref.model") == (f"{T}.model.path: must be set, to a text",)
    assert problems("~data")[0] == "data.train_files: must be set, to a list of texts or a text"


_SOME_PATHS = [
    *(".".join(path).replace("managers.*", "managers.dapo").replace("*", "0") for path in all_paths()),
    *("actor_rollout_ref.actor", "critic", "psrl.ps_mode", "nope", "data.nope", "data.seed.x", "trainer.logger.0"),
    *("reward.managers.new", f"{T}.model.override_config.a.b", "actor_rollout_ref", "data.reward_model_dicts.7"),
]
_SOME_VALUES = [
    *("", "1", "-1", "0", "1.5", "1e-6", "null", "true", "yes", "text", "'x'", "é", "=", "inf", "nan", "???"),
    *("[]", "[1,2]", "[a]", "{}", "{a: 1}", "{a: {b: 1}}", "[{a: 1}]", "'[{a: 1}]'", "'[a'", "a,b"),
    *("${data.seed}", "${nope}", "${data}", "'${'", "[{reward_loop_type: dapo}]", "{reward_fn: [{path: p}]}"),
]
_SOME_OVERRIDES = st.tuples(
    st.sampled_from(["", "+", "++", "~"]), st.sampled_from(_SOME_PATHS), st.sampled_from(_SOME_VALUES)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_SOME_OVERRIDES, min_size=1, max_size=3))
def test_whatever_is_typed_gives_a_config_or_named_problems(typed: list[tuple[str, str, str]]) -> None:
    overrides = [f"{sign}{path}" + (f"={text}" if text or sign != "~" else "") for sign, path, text in typed]
    found: tuple[str, ...] | None = None
    try:
        loaded = load("quickstart", overrides)
    except ConfigError as error:
        found = error.problems
    if found is not None:
        assert found
        assert all(problem.strip() for problem in found)
    else:
        assert msgspec.convert(msgspec.to_builtins(loaded.config), Config) == loaded.config
        assert to_yaml(loaded.config, loaded.origins)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("psrl.=3", "that is no key"),
        ("=", "that is no key"),
        ("３", "an override is KEY=VALUE"),
        ("psrl.staleness==2", "the value cannot be read"),
        ("trainer.default_local_dir=~/x", "trainer.default_local_dir=\"'~/x'\""),
        ("psrl.staleness=1e99", "expected an integer below 2^63"),
        ("psrl.progress_timeout_s=0.5", "expected a number ≥ 1"),
    ],
)
def test_mistakes_are_said_in_words_of_the_user(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", [override])
    (problem,) = refused.value.problems
    assert words in problem
    assert "Lexer" not in problem


def test_a_home_is_found_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load("quickstart", ["trainer.default_local_dir='~/run'", "train_actor_rollout_ref.model.path='~'"]).config
    assert config.trainer.default_local_dir == f"{tmp_path}/run"
    assert config.train_actor_rollout_ref.model.path == str(tmp_path)
