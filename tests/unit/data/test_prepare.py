"""Made data sets: GSM8K as the reference has it, word problems that split cleanly."""

import json
import os
import re
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from psrl.config.schema import Data
from psrl.data import ChatTokenizer, PromptDataset
from psrl.data.prepare import arithmetic, gsm8k, sft_examples
from psrl.data.prepare.arithmetic import DATA_SOURCES
from psrl.data.prepare.problems import SPLITS, Tuple, problems, tuples_of
from psrl.errors import ConfigError, DataError
from psrl.reward import rules


def test_real_gsm8k(tmp_path: Path) -> None:
    source = os.environ.get("PSRL_GSM8K")
    if not source:
        pytest.skip("PSRL_GSM8K is not set")
    assert gsm8k(source, tmp_path) == {"train.parquet": 7473, "test.parquet": 1319}
    train = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert train[0]["prompt"] == [
        {
            "role": "user",
            "content": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
            "How many clips did Natalia sell altogether in April and May? "
            'Let\'s think step by step and output the final answer after "####".',
        }
    ]
    assert train[0]["reward_model"] == {"style": "rule", "ground_truth": "72"}
    assert (train[0]["data_source"], train[0]["ability"]) == ("openai/gsm8k", "math")
    assert train[0]["extra_info"].keys() == {"split", "index", "answer", "question"}
    for split in ("train", "test"):
        for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist():
            truth, answer = row["reward_model"]["ground_truth"], row["extra_info"]["answer"]
            assert re.fullmatch(r"-?[0-9.]+", truth)
            assert rules.score(row["data_source"], answer, truth, {}) == 1.0


def test_gsm8k_says_what_is_wrong_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"train.jsonl does not exist: --source must be a directory"):
        gsm8k(str(tmp_path), tmp_path / "out")
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "q", "answer": "#### 1"}))
    with pytest.raises(DataError, match="train split has 7473 rows, found 1"):
        gsm8k(str(tmp_path), tmp_path / "out")
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "q", "answer": 5}))
    with pytest.raises(DataError, match="row 0 column answer"):
        gsm8k(str(tmp_path), tmp_path / "out")


def test_gsm8k_from_the_hub_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="could not be fetched from the hub"):
        gsm8k("hub", tmp_path / "out")


def test_tuples_split_cleanly() -> None:
    parts = {split: set(tuples_of(split)) for split in SPLITS}
    assert sum(map(len, parts.values())) == 1125
    assert len(set.union(*parts.values())) == 1125
    assert {split: len(part) for split, part in parts.items()} == {"train": 903, "validation": 61, "test": 161}
    for part in parts.values():
        assert {item.template for item in part} == {0, 1, 2, 3}


def test_answers_are_right() -> None:
    formulas = (
        lambda item: item.x + item.y - item.z,
        lambda item: item.x - item.y + item.z,
        lambda item: item.x * item.y + item.z,
        lambda item: item.x + item.z + item.y,
    )
    for split in SPLITS:
        for problem in islice(problems(split, 0), 500):
            item = problem.arithmetic
            assert item.split == split
            assert problem.answer == str(formulas[item.template](item))
            assert {item.x, item.y, item.z} == {int(number) for number in re.findall(r"\d+", problem.question)}
            assert all(step[3] >= 0 for step in item.steps)
            for answer in (problem.worked, problem.direct):
                assert rules.score("psrl/arithmetic", answer, problem.answer, {"finish_reason": "stop"}) == 1.0


def test_the_worked_answer_of_the_recipe() -> None:
    problem = next(p for p in problems("train", 0) if p.arithmetic == Tuple(0, 9, 5, 4))
    assert problem.worked == "9+5=14\n14-4=10\n#### 10"


def test_arithmetic_files(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    counts = {"train.parquet": 300, "val.parquet": 64, "test.parquet": 100}
    assert arithmetic(tmp_path / "a", num_train=300, num_validation=64, num_test=100) == counts
    arithmetic(tmp_path / "b", num_train=300, num_validation=64, num_test=100)
    arithmetic(tmp_path / "c", seed=1, num_train=300, num_validation=64, num_test=100)
    seen: dict[str, set[tuple[int, ...]]] = {}
    for name, count in counts.items():
        rows = pq.read_table(tmp_path / "a" / name).to_pylist()
        assert rows == pq.read_table(tmp_path / "b" / name).to_pylist()
        assert rows != pq.read_table(tmp_path / "c" / name).to_pylist()
        assert len({row["prompt"][0]["content"] for row in rows}) == count
        seen[name] = {(row["extra_info"]["template"], *row["extra_info"]["numbers"]) for row in rows}
        dataset = PromptDataset.load(
            str(tmp_path / "a" / name), Data(train_files=[], val_files=[], max_prompt_length=24), tokenizer
        )
        assert dataset.data_sources == {DATA_SOURCES["validation" if name.startswith("val") else name.split(".")[0]]}
    assert not seen["train.parquet"] & seen["test.parquet"]
    assert not seen["train.parquet"] & seen["val.parquet"]
    assert not seen["val.parquet"] & seen["test.parquet"]


def test_more_questions_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the validation split has fewer than 13000 different questions"):
        arithmetic(tmp_path, num_train=1, num_validation=13000)


def test_warm_up_pairs(tokenizer: ChatTokenizer) -> None:
    pairs = sft_examples(400, 0.3, 5, tokenizer)
    assert pairs == sft_examples(400, 0.3, 5, tokenizer)
    assert pairs[:10] != sft_examples(10, 0.3, 6, tokenizer)
    worked = 0
    for prompt_ids, answer_ids in pairs:
        assert tokenizer.decode(prompt_ids).endswith("?\n")
        assert answer_ids[-1] == tokenizer.eos_ids[0]
        assert len(answer_ids) <= 24
        worked += "=" in tokenizer.decode(answer_ids)
    assert 0.2 < worked / 400 < 0.4
    assert all("=" in tokenizer.decode(answer) for _, answer in sft_examples(50, 1.0, 0, tokenizer))
    assert all(len(answer) <= 4 for _, answer in sft_examples(50, 0.0, 0, tokenizer))
