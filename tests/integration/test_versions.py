"""Recorded versions are true: under these weights every token says which version made it.

A real cluster generates; the test plays the trainer. Version v makes token MARK + v whatever came before, so a row's
tokens and its recorded versions can be compared one by one, and so can the spans of trajectories.jsonl.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from psrl.actor import Runtime, UnixAddress
from psrl.config import load
from psrl.control import PSManager
from psrl.control.messages import Batch, Consume, Finish, NotReady, Publish
from psrl.data.models.tiny import vocabulary, write_tokenizer
from psrl.data.prepare import arithmetic
from psrl.launch.model_files import manifest_of
from psrl.launch.plan import make_plan, make_spec
from psrl.launch.roles import head
from psrl.launch.spec import HEAD, RunSpec
from psrl.launch.wiring import Cluster
from psrl.metrics.report import report
from psrl.transfer.segments import WEIGHTS, SegmentSource
from psrl.types import Purpose, Version
from psrl.weights.manifest import Manifest
from psrl.weights.publish import WeightPublisher
from psrl.weights.store import WeightStore

pytestmark = pytest.mark.timeout(600)

MARK = 20  # the token of version 0
LOADED = MARK - 1  # the token of the weights in the model's directory, which no version has
BATCH, SIBLINGS, LENGTH = 4, 2, 200
START_TIMEOUT_S = 300.0
DEEP = pytest.mark.deep


@dataclass(frozen=True)
class Row:
    """What the queue had of one trajectory, and at which version it was trained."""

    key: str
    trained_at: int
    tokens: list[int]
    versions: list[int]


def wrong_tokens(rows: Sequence[Row]) -> list[str]:
    """Tokens that another version made than the record says."""
    return [
        f"{row.key}[{place}]: token {token} is of version {token - MARK}, recorded is {version}"
        for row in rows
        for place, (token, version) in enumerate(zip(row.tokens, row.versions, strict=True))
        if token != MARK + version
    ]


def wrong_lines(rows: Sequence[Row], lines: Sequence[dict[str, Any]]) -> list[str]:
    """Trained lines that do not say of their row what its tokens say."""
    by_key = {line["key"]: line for line in lines if line["outcome"] == "trained"}
    found = sorted(by_key.keys() ^ {row.key for row in rows})
    for row in rows:
        line = by_key.get(row.key, {"spans": [], "trained_at": None})
        spans = [span["version"] for span in line["spans"] for _ in range(span["num_tokens"])]
        if spans != [token - MARK for token in row.tokens] or line["trained_at"] != row.trained_at:
            found.append(f"{row.key} was trained at {row.trained_at}; its line: {line}")
    return found


def marked(manifest: Manifest, token: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under which any context is followed by `token`, almost surely."""
    for spec in manifest.tensors:
        fill = 1.0 if "norm" in spec.name or "embed_tokens" in spec.name else 0.0
        tensor = torch.full(spec.shape, fill, dtype=getattr(torch, spec.dtype))
        if spec.name == "lm_head.weight":
            tensor[token] = 1.0
        yield spec.name, tensor


@pytest.fixture(scope="module")
def marked_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("marked")
    config = Qwen2Config(
        vocab_size=len(vocabulary()),
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary().index("<eos>"),
        pad_token_id=vocabulary().index("<pad>"),
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    save_file(dict(marked(manifest_of(folder, "float32"), LOADED)), folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("problems")
    arithmetic(folder, num_train=64, num_validation=2, num_test=2)
    return folder


class Player:
    """The test as trainer: publishes marked weights, consumes, and keeps what it was given."""

    def __init__(self, spec: RunSpec, runtime: Runtime) -> None:
        self._spec, self._runtime = spec, runtime
        self.rows: list[Row] = []

    async def connect(self) -> None:
        spec, address = self._spec, UnixAddress(self._spec.head_socket)

        async def ref(kind: Any, name: str) -> Any:
            return await self._runtime.connect(kind, name, address, timeout_s=START_TIMEOUT_S)

        self._manager = await ref(PSManager, head.MANAGER)
        segments = SegmentSource(spec.segments_socket)
        self._queue = await head.connect_queue(self._runtime, spec, "player")
        store = WeightStore.open(segments.fetch(WEIGHTS))
        self._publisher = WeightPublisher(store, Manifest.decode(spec.manifest))

    async def publish(self, version: int) -> None:
        epoch, manifest = self._spec.epoch, self._publisher.manifest
        slot = self._publisher.write(epoch, Version(version), marked(manifest, MARK + version))
        await self._manager.publish(Publish(epoch, Version(version), slot, manifest.hash))

    async def consume(self, buffer: int) -> None:
        answer: Any = NotReady("")
        while isinstance(answer, NotReady):
            answer = await self._manager.consume(Consume(self._spec.epoch, buffer, wait_s=5.0))
        assert isinstance(answer, Batch), answer
        keys = [key for group in answer.groups for key in group.keys]
        for key, fields in zip(keys, await self._queue.kv_batch_get(keys, Purpose.TRAIN.value)):
            self.rows.append(Row(key, buffer, fields["responses"].tolist(), fields["rollout_versions"].tolist()))

    async def play(self, num_steps: int) -> list[Row]:
        await self.publish(0)
        for buffer in range(num_steps):
            await self.consume(buffer)
            await self.publish(buffer + 1)
        await self._manager.finish(Finish(self._spec.epoch, "the test has seen enough"))
        return self.rows


async def play(run_dir: Path, num_steps: int, model: Path, data: Path, *overrides: str) -> list[Row]:
    """Start everything but the trainer, and be the trainer for `num_steps` steps."""
    config = load(
        "quickstart",
        [
            f"train_actor_rollout_ref.model.path={model}",
            f"data.train_files={data}/train.parquet",
            f"data.val_files={data}/val.parquet",
            f"data.train_batch_size={BATCH}",
            f"data.max_response_length={LENGTH}",
            f"train_actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
            f"psrl.rollout_n={SIBLINGS}",
            "psrl.group_post_process.enable=false",  # all answers are equally wrong here
            f"trainer.total_training_steps={num_steps}",
            f"trainer.default_local_dir={run_dir}",
            *overrides,
        ],
    ).config
    plan = make_plan(config)
    run_dir.mkdir()
    spec = make_spec(config, plan, run_dir, Path(mkdtemp(prefix="psrl-")))
    async with Cluster(spec, plan.queue, emit=lambda line: None) as cluster:
        cluster.start(HEAD, *spec.rewards, *spec.replicas, *spec.agents)
        async with Runtime("player") as runtime:
            player = Player(spec, runtime)
            await player.connect()
            return await player.play(num_steps)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_record(rows: Sequence[Row], run_dir: Path, staleness: int, num_steps: int) -> None:
    """What holds whatever the staleness: tokens, versions, spans and bound agree, and nothing was trained twice."""
    assert len({row.key for row in rows}) == len(rows) == num_steps * BATCH * SIBLINGS
    assert all(len(row.tokens) == LENGTH for row in rows)
    assert wrong_tokens(rows) == []
    assert wrong_lines(rows, read_lines(run_dir / "trajectories.jsonl")) == []
    assert all(0 <= row.trained_at - version <= staleness for row in rows for version in row.versions)
    found = report(run_dir, with_curves=False)
    assert found.ok, found.text()


@pytest.mark.parametrize("running", ["recompute", pytest.param("keep", marks=DEEP), pytest.param("abort", marks=DEEP)])
async def test_versions_are_true_at_staleness_3(
    tmp_path: Path, marked_model: Path, problems: Path, running: str
) -> None:
    num_steps, run_dir = 8, tmp_path / "run"
    rows = await play(run_dir, num_steps, marked_model, problems, "psrl.staleness=3", f"psrl.sync.running={running}")
    check_record(rows, run_dir, 3, num_steps)
    assert any(len(set(row.versions)) > 1 for row in rows), "no trajectory spans two versions"
    assert max(row.trained_at - min(row.versions) for row in rows) == 3, "the bound was never reached"

    # A record that is off by one version is found out, in rows as in lines.
    shifted = [replace(row, versions=[version + 1 for version in row.versions]) for row in rows]
    assert len(wrong_tokens(shifted)) == num_steps * BATCH * SIBLINGS * LENGTH
    later = [replace(row, tokens=[token + 1 for token in row.tokens]) for row in rows]
    assert len(wrong_lines(later, read_lines(run_dir / "trajectories.jsonl"))) == len(rows)


@pytest.mark.parametrize("running", ["recompute", pytest.param("keep", marks=DEEP), pytest.param("abort", marks=DEEP)])
async def test_a_synchronous_run_trains_each_version_on_its_own_tokens(
    tmp_path: Path, marked_model: Path, problems: Path, running: str
) -> None:
    num_steps, run_dir = 4, tmp_path / "run"
    rows = await play(run_dir, num_steps, marked_model, problems, "psrl.staleness=0", f"psrl.sync.running={running}")
    check_record(rows, run_dir, 0, num_steps)
    assert all(token == MARK + row.trained_at for row in rows for token in row.tokens)

    published = {
        line["version"]: line["at_s"] for line in read_lines(run_dir / "attempts.jsonl") if line["kind"] == "publish"
    }
    lines = read_lines(run_dir / "trajectories.jsonl")
    assert set(published) == set(range(1, num_steps + 1))
    for line in lines:
        if line["trained_at"]:
            assert line["started_s"] >= published[line["trained_at"]], line
    assert {line["outcome"] for line in lines} == {"trained"}
    assert {line["trained_at"] for line in lines} == set(range(num_steps))
