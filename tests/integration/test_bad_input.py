"""Bad input is refused before anything starts: status 2, each problem by key or file and what to do, no traceback."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psrl.launch.cli import main

pytestmark = pytest.mark.timeout(600)

MODEL = "train_actor_rollout_ref.model.path"
OVERRIDE = "train_actor_rollout_ref.model.override_config"
REWARD = "+reward.custom_reward_function"


@dataclass(frozen=True)
class Bad:
    """Inputs made bad, each a small change of good ones. `port` is held by somebody else."""

    folder: Path
    house: Any
    port: int

    def table(self, name: str, change: Callable[[Any], Any]) -> str:
        path = self.folder / f"{name}.parquet"
        pq.write_table(change(pq.read_table(self.house.data / "train.parquet")), path)
        return f"data.train_files={path}"

    def truths(self, truth: Any) -> str:
        def change(table: Any) -> Any:
            rows = table.to_pylist()
            for row in rows:
                row["reward_model"]["ground_truth"] = truth
            return pa.Table.from_pylist(rows)

        return self.table("truths", change)

    def file(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def model(self, *without: str, **changed: bytes) -> str:
        path = self.folder / "model"
        shutil.copytree(self.house.model, path)
        for name in without:
            (path / name).unlink()
        for name, content in changed.items():
            (path / f"{name}.safetensors").write_bytes(content)
        return f"{MODEL}={path}"

    def config(self, **changed: Any) -> str:
        override = self.model()
        path = self.folder / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        return override

    @property
    def weights(self) -> bytes:
        content: bytes = (self.house.model / "model.safetensors").read_bytes()
        return content


@pytest.fixture
def bad(tmp_path: Path, house: Any) -> Iterator[Bad]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (folder := tmp_path / "bad").mkdir()
        yield Bad(folder, house, server.getsockname()[1])


Case = tuple[Callable[[Bad], Sequence[str]], Sequence[str]]

# name: (overrides that make a good run bad, words of which each must be said)
CASES: dict[str, Case] = {
    "misspelt key": (lambda bad: ["psrl.stalenes=2"], ["psrl.stalenes", "unknown key", "did you mean psrl.staleness?"]),
    "wrong type": (
        lambda bad: ["data.train_batch_size=many"],
        ["data.train_batch_size: expected an integer ≥ 1, got 'many'"],
    ),
    "out of range": (lambda bad: ["psrl.staleness=-1"], ["psrl.staleness: expected an integer ≥ 0, got -1"]),
    "missing training file": (
        lambda bad: [f"data.train_files={bad.folder}/none.parquet"],
        ["data.train_files: ", "bad/none.parquet does not exist", "`psrl data`"],
    ),
    "missing validation file": (
        lambda bad: [f"data.val_files={bad.folder}/none.parquet"],
        ["data.val_files: ", "bad/none.parquet does not exist"],
    ),
    "parquet without prompt": (
        lambda bad: [bad.table("unasked", lambda table: table.drop_columns(["prompt"]))],
        ["data.train_files: ", "bad/unasked.parquet has no column prompt", "data.prompt_key", "reward_model"],
    ),
    "empty parquet": (
        lambda bad: [bad.table("empty", lambda table: table.slice(0, 0))],
        ["data.train_files: ", "bad/empty.parquet is empty: it has 0 rows"],
    ),
    "not a parquet file": (
        lambda bad: [f"data.train_files={bad.file('text.parquet', b'PAR1 and then something else')}"],
        ["data.train_files: ", "bad/text.parquet is not a readable parquet file"],
    ),
    "smaller than a batch": (
        lambda bad: [bad.table("small", lambda table: table.slice(0, 3))],
        ["data.train_files: ", "does not fill one batch of 4 prompts: 3 rows read", "Lower data.train_batch_size"],
    ),
    "all prompts overlong, filtered": (
        lambda bad: ["data.max_prompt_length=2", "data.filter_overlong_prompts=true"],
        ["data.train_files: no prompt is left, all are too long", "256 filtered", "Raise data.max_prompt_length"],
    ),
    "prompts overlong, nothing said about them": (
        lambda bad: ["data.max_prompt_length=2"],
        ["256 of 256 prompts are too long", "row 0 has", "data.filter_overlong_prompts=true", "data.truncation"],
    ),
    "groups of one": (
        lambda bad: ["psrl.rollout_n=1"],
        ["psrl.rollout_n=1 is too few for algorithm.adv_estimator=grpo", "at least 2"],
    ),
    "port of a replica in use": (
        lambda bad: [f"psrl.deployment.rollout_port={bad.port}", "psrl.deployment.n_rollout_instances=1"],
        ["psrl.deployment.rollout_port: port ", f"(pid {os.getpid()})", "choose another, or 0"],
    ),
    "port of the trainer in use": (
        lambda bad: [f"psrl.deployment.master_port={bad.port}"],
        ["psrl.deployment.master_port: port ", f"(pid {os.getpid()})", "choose another, or 0"],
    ),
    "no model directory": (
        lambda bad: [f"{MODEL}={bad.folder}/none"],
        [f"{MODEL}=", "bad/none: there is no such directory", "`psrl model`"],
    ),
    "model without tokenizer": (
        lambda bad: [bad.model("tokenizer.json")],
        ["bad/model has no tokenizer: tokenizer.json is missing", "AutoTokenizer"],
    ),
    "model without chat template": (
        lambda bad: [bad.model("chat_template.jinja")],
        ["bad/model has no chat template", "chat_template.jinja"],
    ),
    "model without weights": (
        lambda bad: [bad.model("model.safetensors")],
        [f"{MODEL}=", "it has no model.safetensors", "save_pretrained"],
    ),
    "weights cut short": (
        lambda bad: [bad.model(model=bad.weights[:-100])],
        [f"{MODEL}: ", "model.safetensors is not a whole safetensors file", "was it copied whole?"],
    ),
    "weights cut in the first bytes": (
        lambda bad: [bad.model(model=b"\x08\x00")],
        ["not a whole safetensors file: it ends after 2 bytes"],
    ),
    "weights that are something else": (
        lambda bad: [bad.model(model=b"\xff" * 100)],
        ["not a whole safetensors file: its header claims 18446744073709551615 bytes, the file has 100"],
    ),
    "weights that were not fetched": (
        lambda bad: [bad.model(model=b"version https://git-lfs.github.com/spec/v1\nsize 1\n")],
        ["not a whole safetensors file: it is the pointer of a Git LFS file", "git lfs pull"],
    ),
    "a config that is not of the weights": (
        lambda bad: [bad.config(vocab_size=99, num_hidden_layers=3)],
        ["config.json has vocab_size=99, but the weights have ", "config.json has num_hidden_layers=3, but"],
    ),
    "overrides that do not fit the weights": (
        lambda bad: [f"+{OVERRIDE}.intermediate_size=5", f"+{OVERRIDE}.num_attention_heads=4"],
        [f"{OVERRIDE}.intermediate_size=5, but the weights have 192", "num_key_value_heads=2, but the weights have 4"],
    ),
    "no heads": (
        lambda bad: [f"+{OVERRIDE}.num_attention_heads=0"],
        [f"{OVERRIDE}.num_attention_heads=0: must be a whole number from 1 on"],
    ),
    "a model that is no language model": (
        lambda bad: [bad.config(architectures=["BertForMaskedLM"])],
        ["config.json has architectures=['BertForMaskedLM']: it is no causal language model"],
    ),
    "another type of model": (
        lambda bad: [bad.config(model_type="bert")],
        ["architectures=['Qwen2ForCausalLM'], but model_type=bert means BertLMHeadModel"],
    ),
    "an arena larger than memory": (
        lambda bad: [f"transfer_queue.arena_bytes={1 << 50}"],
        ["of shared memory and", "can be had", f"lower transfer_queue.arena_bytes={1 << 50}"],
    ),
    "an arena too small for the batches": (
        lambda bad: ["transfer_queue.arena_bytes=4096"],
        ["transfer_queue.arena_bytes = 4096 is too small", "set it to null"],
    ),
    "batches larger than memory": (
        lambda bad: [
            "psrl.rollout_n=100000000",
            "psrl.rollout_coordination.routing_strategy.max_concurrent_seqs_per_instance=100000000",
        ],
        ["of shared memory and", "can be had", "lower data.train_batch_size, psrl.rollout_n, psrl.staleness"],
    ),
    "more tokens than the model takes": (
        lambda bad: ["data.max_response_length=2000"],
        ["data.max_response_length=2000", "the model takes 1024 (max_position_embeddings)", "lower them"],
    ),
    "no reward file": (
        lambda bad: [f"{REWARD}.path={bad.folder}/none.py"],
        ["reward function compute_score of ", "bad/none.py: the file does not exist"],
    ),
    "a reward file without the function": (
        lambda bad: [f"{REWARD}.path={bad.file('other.py', b'def judge(**kwargs): return 1.0')}"],
        ["reward function compute_score of ", "there is no such function; the file has judge"],
    ),
    "a reward file that cannot be imported": (
        lambda bad: [f"{REWARD}.path={bad.file('broken.py', b'import no_such_package')}"],
        ["bad/broken.py: the file cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"],
    ),
    "a reward file that ends its process": (
        lambda bad: [f"{REWARD}.path={bad.file('ending.py', b'import os; os._exit(7)')}"],
        ["reward.custom_reward_function: reward function compute_score of ", "bad/ending.py: loading it", "code 7"],
    ),
    "truths that are not text": (
        lambda bad: [bad.truths(1.5)],
        [
            "data.train_files: ",
            "row 0 column reward_model.ground_truth is float 1.5: the built-in rule of psrl/",
            "text",
        ],
    ),
    "truths that are bytes": (
        lambda bad: [bad.truths(b"7")],
        ["row 0 column reward_model.ground_truth is bytes b'7'", "give reward.custom_reward_function.path"],
    ),
    "a filter by what no reward reports": (
        lambda bad: ["psrl.group_post_process.enable=true", "algorithm.filter_groups.metric=nosuch"],
        ["algorithm.filter_groups.metric=nosuch is not a metric of the built-in rewards: use acc or score"],
    ),
    "no checkpoint to go on from": (
        lambda bad: ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={bad.folder}/none"],
        ["trainer.resume_from_path=", "bad/none is not there", "checkpoints/global_step_20"],
    ),
    "a run directory below a file": (
        lambda bad: [f"trainer.default_local_dir={bad.file('file', b'')}/run"],
        ["trainer.default_local_dir=", "bad/file is a file, not a folder"],
    ),
    "several settings": (
        lambda bad: ["psrl.stalenes=1", "psrl.rollout_n=1", "data.seed=x", "trainer.save_freq=0"],
        ["4 problems", "psrl.stalenes:", "psrl.rollout_n=1", "data.seed:", "trainer.save_freq=0"],
    ),
    "several things of the machine": (
        lambda bad: [
            f"{MODEL}={bad.folder}/no-model",
            f"data.train_files={bad.folder}/no-train.parquet",
            f"data.val_files=[{bad.folder}/no-val.parquet]",
            f"{REWARD}.path={bad.folder}/no-reward.py",
            f"psrl.deployment.master_port={bad.port}",
        ],
        ["5 problems", "bad/no-model", "bad/no-train", "bad/no-val", "bad/no-reward", "psrl.deployment.master_port"],
    ),
    "several files": (
        lambda bad: [
            bad.table("short", lambda table: table.slice(0, 1)),
            f"data.val_files={bad.folder}/no-val.parquet",
            f"{REWARD}.path={bad.folder}/no-reward.py",
            bad.model(model=b""),
        ],
        ["4 problems", "bad/short.parquet", "bad/no-val", "bad/no-reward", "it ends after 0 bytes"],
    ),
}


def arguments(bad: Bad, run_dir: Path, overrides: Sequence[str]) -> list[str]:
    budget = "train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192"
    return ["quickstart", f"trainer.default_local_dir={run_dir}", budget, *bad.house.overrides(), *overrides]


def is_refused(said: str, words: Sequence[str]) -> bool:
    first, *problems = said.splitlines()
    assert first.startswith("psrl-launch: "), said
    assert first.endswith("; nothing was started"), said
    assert first == f"psrl-launch: {len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was started"
    assert all(line.startswith("  - ") for line in problems), said
    assert "Traceback" not in said
    missing = [word for word in words if word not in said]
    assert not missing, f"not said: {missing}\n{said}"
    return True


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused(name: str, bad: Bad, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = CASES[name]
    run_dir = tmp_path / "run"
    overrides = make(bad)
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments(bad, run_dir, overrides)) == 2
    shown = capsys.readouterr()
    assert is_refused(shown.err, words)
    assert shown.out == ""
    assert sorted(tmp_path.rglob("*")) == before, "something was left behind"


@pytest.mark.parametrize("name", ["several settings", "several things of the machine", "weights cut short"])
def test_bad_input_is_refused_from_a_shell(name: str, bad: Bad, tmp_path: Path) -> None:
    make, words = CASES[name]
    command = [sys.executable, "-m", "psrl.launch.cli", *arguments(bad, tmp_path / "run", make(bad))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert is_refused(done.stderr, words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["several things of the machine", "groups of one"])
def test_check_says_the_same(name: str, bad: Bad, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = CASES[name][0](bad)
    assert main(["--check", "--json", *arguments(bad, tmp_path / "run", overrides)]) == 2
    found = json.loads(capsys.readouterr().out)["problems"]
    assert main(arguments(bad, tmp_path / "run", overrides)) == 2
    assert [f"  - {problem}" for problem in found] == capsys.readouterr().err.splitlines()[1:]


def test_the_same_inputs_unharmed_are_accepted(bad: Bad, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control: none of the refusals above comes from what all cases share."""
    whole = [bad.model(), bad.table("whole", lambda table: table)]
    assert main(["--check", *arguments(bad, tmp_path / "run", whole)]) == 0, capsys.readouterr().err
    assert not (tmp_path / "run").exists()
