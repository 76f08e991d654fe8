"""Reading prompts: what comes out, and how each fault in a file is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psrl.config.schema import Data
from psrl.data import ChatTokenizer, Counts, PromptDataset, RewardRow
from psrl.data.dataset import truncate
from psrl.errors import ConfigError, DataError
from psrl.types import GroupId

Make = Callable[..., dict[str, Any]]
Write = Callable[..., str]
Settings = Callable[..., Data]


def ids_of(dataset: PromptDataset, row: int) -> list[int]:
    return np.frombuffer(dataset.prompt(row, GroupId(0)).prompt_ids, "<i4").tolist()


def row_of(dataset: PromptDataset, row: int) -> RewardRow:
    return msgspec.msgpack.decode(dataset.prompt(row, GroupId(0)).row, type=RewardRow)


def test_rows_become_prompts(tokenizer: ChatTokenizer, make_row: Make, write: Write, settings: Settings) -> None:
    dataset = PromptDataset.load(write([make_row(), make_row("Ann 3")]), settings(), tokenizer)
    prompt = dataset.prompt(1, GroupId(41))
    assert prompt.group == 41
    assert tokenizer.decode(ids_of(dataset, 1)) == "Ann 3\n"
    assert msgspec.msgpack.decode(prompt.row) == {
        "data_source": "psrl/arithmetic",
        "ground_truth": "5",
        "extra_info": {"split": "train", "index": 0},
    }
    assert dataset.counts == Counts(read=2, kept=2, overlong=0, truncated=0, not_sampled=0)
    assert dataset.data_sources == {"psrl/arithmetic"}


def test_optional_columns(tokenizer: ChatTokenizer, make_row: Make, write: Write, settings: Settings) -> None:
    path = write([make_row(data_source=..., extra_info=..., ability=...)])
    assert row_of(PromptDataset.load(path, settings(), tokenizer), 0) == RewardRow(path, "5", {})
    named = PromptDataset.load(path, settings(data_source_name="openai/gsm8k"), tokenizer)
    assert row_of(named, 0).data_source == "openai/gsm8k"


def test_every_truth_is_checked(tokenizer: ChatTokenizer, make_row: Make, settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    truths = ["5", 5, True]
    path.write_text("\n".join(json.dumps(make_row(reward_model={"ground_truth": truth})) for truth in truths))

    def check(source: str, truth: object) -> str:
        return f"no bool for {source}" if isinstance(truth, bool) else ""

    with pytest.raises(DataError) as caught:
        PromptDataset.load(str(path), settings(), tokenizer, check_truth=check)
    said = "row 2 column reward_model.ground_truth is bool True: no bool for psrl/arithmetic"
    assert str(caught.value) == f"{path} {said}"
    assert len(PromptDataset.load(str(path), settings(), tokenizer)) == 3


@pytest.mark.parametrize("kind", ["jsonl", "array", "lines"])
def test_json_files_say_the_same(
    tokenizer: ChatTokenizer, make_row: Make, write: Write, settings: Settings, tmp_path: Path, kind: str
) -> None:
    rows = [make_row(f"Tom has {number}") for number in range(5)]
    path = tmp_path / ("data.jsonl" if kind == "jsonl" else "data.json")
    path.write_text(json.dumps(rows) if kind == "array" else "\n".join(map(json.dumps, rows)) + "\n")
    one = PromptDataset.load(str(path), settings(), tokenizer)
    other = PromptDataset.load(write(rows), settings(), tokenizer)
    assert one.fingerprint == other.fingerprint


def test_several_files_and_row_groups_keep_their_order(
    tokenizer: ChatTokenizer, make_row: Make, write: Write, settings: Settings
) -> None:
    files = [
        write([make_row(f"{first + number}") for number in range(7)], f"{first}.parquet", row_group_size=3)
        for first in (0, 7)
    ]
    dataset = PromptDataset.load(files, settings(), tokenizer)
    assert [tokenizer.decode(ids_of(dataset, row)).strip() for row in range(14)] == [str(row) for row in range(14)]


def test_large_nested_rows_are_read_in_pieces(
    tokenizer: ChatTokenizer, make_row: Make, write: Write, settings: Settings
) -> None:
    big = "x" * (5 << 20)
    rows = [make_row(f"Tom has {number}", extra_info={"blob": f"{number}{big}"}) for number in range(12)]
    path = write(rows, row_group_size=12, compression="snappy", use_dictionary=False)
    dataset = PromptDataset.load(path, settings(max_prompt_length=16), tokenizer)
    assert len(dataset) == 12
    assert row_of(dataset, 11).extra_info["blob"].startswith("11x")


def test_overlong_prompts(tokenizer: ChatTokenizer, make_row: Make, write: Write, settings: Settings) -> None:
    short, exact, long = "1234", "123456789", "1234567890"  # and a newline each
    path = write([make_row(short), make_row(exact), make_row(long)])
    kept = PromptDataset.load(path, settings(max_prompt_length=10, filter_overlong_prompts=True), tokenizer)
    assert (len(kept), kept.counts.overlong) == (2, 1)
    assert "1 filtered (longer than data.max_prompt_length=10 tokens)" in kept.describe()
    with pytest.raises(DataError) as caught:
        PromptDataset.load(path, settings(max_prompt_length=10), tokenizer)
    for part in (
        f"{path} row 2",
        "11 tokens",
        "data.max_prompt_length is 10",
        "filter_overlong_prompts=true",
        "1 of 3",
    ):
        assert part in str(caught.value)
    cuts = {"left": "234567890\n", "right": "1234567890", "middle": "1234567890\n"[:5] + "1234567890\n"[-5:]}
    for how, text in cuts.items():
        cut = PromptDataset.load(path, settings(max_prompt_length=10, truncation=how), tokenizer)
        assert tokenizer.decode(ids_of(cut, 2))[-10:] == text[-10:]
        assert len(ids_of(cut, 2)) == 10
        assert (len(cut), cut.counts.truncated) == (3, 1)


def test_truncation_keeps_the_stated_end() -> None:
    ids = list(range(9))
    assert truncate(ids, 5, "left") == [4, 5, 6, 7, 8]
    assert truncate(ids, 5, "right") == [0, 1, 2, 3, 4]
    assert truncate(ids, 5, "middle") == [0, 1, 6, 7, 8]
    assert truncate(ids, 9, "left") == ids
    with pytest.raises(ConfigError, match="truncation=top is unknown: use error, left, right, middle"):
        PromptDataset.load([], Data(train_files=[], val_files=[], truncation="top"), None)  # type: ignore[arg-type]


def test_too_few_rows(tokenizer: ChatTokenizer, make_row: Make, write: Write, settings: Settings) -> None:
    path = write([make_row("1"), make_row("2"), make_row("x" * 99)])
    dataset = PromptDataset.load(path, settings(max_prompt_length=50, filter_overlong_prompts=True), tokenizer)
    dataset.require(2)
    with pytest.raises(DataError) as caught:
        dataset.require(64)
    for part in ("3 rows read", path, "1 filtered", "2 prompts", "one batch of 64 prompts", "train_batch_size"):
        assert part in str(caught.value)
    none_left = PromptDataset.load(path, settings(max_prompt_length=1, filter_overlong_prompts=True), tokenizer)
    with pytest.raises(DataError, match=r"all are too long: 3 rows read .*, 3 filtered"):
        none_left.require(1)


def test_samples(tokenizer: ChatTokenizer, make_row: Make, write: Write, settings: Settings) -> None:
    path = write([make_row(str(number)) for number in range(9)])
    first = PromptDataset.load(path, settings(), tokenizer, max_samples=4)
    assert [tokenizer.decode(ids_of(first, row)).strip() for row in range(4)] == ["0", "1", "2", "3"]
    assert (len(first), first.counts.not_sampled) == (4, 5)
    drawn = PromptDataset.load(path, settings(shuffle=True, seed=3), tokenizer, max_samples=4)
    again = PromptDataset.load(path, settings(shuffle=True, seed=3), tokenizer, max_samples=4)
    assert drawn.fingerprint == again.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"prompt": ...},
            ["has no column prompt", "data.prompt_key", "ability, data_source, extra_info, reward_model"],
        ),
        ({"reward_model": ...}, ["has no column reward_model"]),
        ({"prompt": "What is 1+1?"}, ["row 1", "column prompt", "must be a list of {role, content}, is str"]),
        ({"prompt": []}, ["row 1", "column prompt", "must be a list"]),
        ({"prompt": None}, ["row 1", "column prompt", "is null"]),
        ({"prompt": [{"content": "hi"}]}, ["row 1", "column prompt", "must be a list of {role, content}"]),
        (
            {"prompt": [{"role": "user", "content": 5}]},
            ["row 1", "column prompt", "content must be a string, is int 5"],
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, ["row 1", "content in parts"]),
        ({"reward_model": {"style": "rule"}}, ["row 1", "column reward_model.ground_truth", "is missing"]),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, ["row 1", "reward_model.ground_truth"]),
        ({"reward_model": None}, ["row 1", "column reward_model", "is null"]),
        ({"images": [{"bytes": "x"}]}, ["row 1", "column images", "images are not supported"]),
        ({"videos": ["x"]}, ["row 1", "column videos"]),
        ({"extra_info": "text"}, ["row 1", "column extra_info", "is str"]),
        ({"data_source": 5}, ["row 1", "column data_source", "is int 5"]),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_faults_are_named(
    tokenizer: ChatTokenizer,
    make_row: Make,
    write: Write,
    settings: Settings,
    tmp_path: Path,
    changes: dict[str, Any],
    said: list[str],
    kind: str,
) -> None:
    rows = [make_row(), make_row(**changes)]
    if kind == "jsonl":
        path = str(tmp_path / "data.jsonl")
        Path(path).write_text("\n".join(map(json.dumps, rows)))
    else:  # a column has one type, so both rows have the fault
        rows = [make_row(**changes)]
        path, said = write(rows), [part.replace("row 1", "row 0") for part in said]
    with pytest.raises(DataError) as caught:
        PromptDataset.load(path, settings(), tokenizer)
    for part in (path, *said):
        assert part in str(caught.value)


def test_files_that_are_not_what_they_should_be(
    tokenizer: ChatTokenizer, make_row: Make, settings: Settings, tmp_path: Path
) -> None:
    schema = pa.Table.from_pylist([make_row()]).schema
    pq.write_table(schema.empty_table(), tmp_path / "empty.parquet")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "text.parquet").write_text("not parquet")
    (tmp_path / "data.csv").write_text("a,b")
    (tmp_path / "broken.jsonl").write_text(json.dumps(make_row()) + "\n{oops\n")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "surrogate.jsonl").write_bytes(json.dumps(make_row("X")).encode().replace(b"X", rb"\ud835"))
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(make_row("X")).encode().replace(b"X", b"\xe9"))
    (tmp_path / "folder.parquet").mkdir()
    for name, said in {
        "absent.parquet": "does not exist",
        "empty.parquet": "has 0 rows",
        "empty.jsonl": "has 0 rows",
        "text.parquet": "is not a readable parquet file",
        "data.csv": "unknown kind of file '.csv'; use one of .parquet, .jsonl, .json",
        "broken.jsonl": "row 1: not valid JSON",
        "list.jsonl": "row 0: not an object but list",
        "surrogate.jsonl": "row 0: not valid JSON",
        "latin.jsonl": "row 0: not valid JSON",
        "folder.parquet": "is not a file",
    }.items():
        with pytest.raises(DataError) as caught:
            PromptDataset.load(str(tmp_path / name), settings(), tokenizer)
        assert said in str(caught.value)
        assert name in str(caught.value)
    with pytest.raises(DataError, match="no data files"):
        PromptDataset.load([], settings(), tokenizer)


def test_invalid_utf8_is_named(tokenizer: ChatTokenizer, make_row: Make, settings: Settings, tmp_path: Path) -> None:
    rows = [make_row(str(number)) for number in range(4)]
    for column in ("data_source", "prompt"):
        table = pa.Table.from_pylist(rows)
        if column == "data_source":
            values = [b"a", b"b", b"\xff\xfe", b"c"]
            array = pa.array(values, pa.binary()).view(pa.string())
        else:
            contents = pa.array([b"1", b"2", b"\xff", b"4"], pa.binary()).view(pa.string())
            messages = pa.StructArray.from_arrays([pa.array(["user"] * 4), contents], ["role", "content"])
            array = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), messages)
        table = table.set_column(table.schema.get_field_index(column), column, array)
        path = tmp_path / f"{column}.parquet"
        pq.write_table(table, path)
        with pytest.raises(DataError) as caught:
            PromptDataset.load(str(path), settings(), tokenizer)
        assert f"{path} row 2 column {column}: not valid UTF-8" in str(caught.value)


def with_template(tokenizer_dir: Path, copy: Path, template: str) -> Path:
    shutil.copytree(tokenizer_dir, copy)
    (copy / "chat_template.jinja").write_text(template)
    return copy


def test_a_template_that_refuses_names_the_row(
    tokenizer_dir: Path, make_row: Make, write: Write, settings: Settings, tmp_path: Path
) -> None:
    strict = with_template(
        tokenizer_dir,
        tmp_path / "strict",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{% endfor %}",
    )
    path = write([make_row(), make_row(prompt=[{"role": "system", "content": "1"}])])
    for filtering in (False, True):
        with pytest.raises(DataError) as caught:
            PromptDataset.load(path, settings(filter_overlong_prompts=filtering), ChatTokenizer.load(strict))
        assert f"{path} row 1 column prompt: the chat template refuses it: no system role" in str(caught.value)


def test_a_prompt_without_tokens_is_refused(
    tokenizer_dir: Path, make_row: Make, write: Write, settings: Settings, tmp_path: Path
) -> None:
    bare = with_template(tokenizer_dir, tmp_path / "bare", "{{ messages[0].content }}")
    with pytest.raises(DataError, match="row 0 column prompt: the prompt has no tokens"):
        PromptDataset.load(write([make_row("")]), settings(), ChatTokenizer.load(bare))
