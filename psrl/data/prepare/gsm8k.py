"""GSM8K as parquet: grade-school word problems, 7,473 to train on and 1,319 to test with."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from psrl.data.files import read_rows
from psrl.data.prepare.rows import Row, write_parquet
from psrl.errors import ConfigError, DataError

DATA_SOURCE = "openai/gsm8k"
_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_NUM_ROWS = {"train": 7473, "test": 1319}


def gsm8k(source: str, out: Path) -> dict[str, int]:
    """Write train.parquet and test.parquet to `out`; returns rows by file name.

    `source` is a directory with the raw train.jsonl and test.jsonl ({question, answer} a line), or `hub` to fetch the
    data set from the Hugging Face hub. Raises ConfigError if it cannot be had, DataError if it is not the whole data
    set.
    """
    written = {}
    for split, num_rows in _NUM_ROWS.items():
        raw = list(_from_hub(split) if source == "hub" else _from_directory(Path(source).expanduser(), split))
        if len(raw) != num_rows:
            raise DataError(f"{source}: GSM8K's {split} split has {num_rows} rows, found {len(raw)}")
        rows = [_row(example, split, index, source) for index, example in enumerate(raw)]
        written[f"{split}.parquet"] = write_parquet(rows, out / f"{split}.parquet")
    return written


def _row(example: Mapping[str, Any], split: str, index: int, source: str) -> Row:
    question, answer = example["question"], example["answer"]
    found = _ANSWER.search(answer)
    if found is None:
        raise DataError(f"{source}: {split} row {index} column answer: no final answer after ####")
    return Row(
        DATA_SOURCE,
        f"{question} {_INSTRUCTION}",
        found.group(1).replace(",", ""),
        "math",
        {"split": split, "index": index, "answer": answer, "question": question},
    )


def _from_directory(directory: Path, split: str) -> Iterator[Mapping[str, Any]]:
    path = directory / f"{split}.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: --source must be a directory with train.jsonl and test.jsonl, or hub"
        )
    for number, row in read_rows(path, ("question", "answer"), ()):
        for column in ("question", "answer"):
            if not isinstance(row[column], str):
                raise DataError(f"{path} row {number} column {column}: must be a string")
        yield row


def _from_hub(split: str) -> Iterator[Mapping[str, Any]]:
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(DATA_SOURCE, f"main/{split}-00000-of-00001.parquet", repo_type="dataset")
    except Exception as error:  # the hub's client raises errors of several libraries
        raise ConfigError(
            f"GSM8K could not be fetched from the hub ({type(error).__name__}: {str(error).splitlines()[0]}): "
            "check the network, or download train.jsonl and test.jsonl and give their directory as --source"
        ) from error
    for _, row in read_rows(Path(path), ("question", "answer"), ()):
        yield row
