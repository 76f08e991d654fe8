"""The embedded data set: small word problems as parquet, and as pairs for the warm start. Offline and seeded."""

import random
from itertools import islice
from pathlib import Path
from typing import Protocol

from psrl.data.prepare.problems import SPLITS, Problem, problems
from psrl.data.prepare.rows import Row, write_parquet
from psrl.errors import ConfigError

DATA_SOURCES = {
    "train": "psrl/arithmetic",
    "validation": "psrl/arithmetic_val",
    "test": "psrl/arithmetic_test",
}
"""By split, so that validation and test scores stand apart in the metrics."""
_FILES = {"train": "train.parquet", "validation": "val.parquet", "test": "test.parquet"}


class Tokenizer(Protocol):
    """What `sft_examples` needs; `psrl.data.ChatTokenizer` is one."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_prompt(self, messages: list[dict[str, str]]) -> list[int]: ...


def arithmetic(
    out: Path, seed: int = 0, num_train: int = 4096, num_validation: int = 256, num_test: int = 400
) -> dict[str, int]:
    """Write train.parquet, val.parquet and test.parquet to `out`; returns rows by file name.

    No two rows of a file are the same question, and no two files share arithmetic (see `problems`). Raises
    ConfigError if more rows are wanted than there are questions.
    """
    counts = dict(zip(SPLITS, (num_train, num_validation, num_test)))
    written = {}
    for split, num_rows in counts.items():
        rows = [_row(problem, split, index) for index, problem in enumerate(_unique(split, seed, num_rows))]
        written[_FILES[split]] = write_parquet(rows, out / _FILES[split])
    return written


def sft_examples(num: int, worked_share: float, seed: int, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """`num` pairs (prompt_ids, answer_ids) of training problems for supervised warm-up.

    prompt_ids are the templated question; answer_ids the worked answer with probability `worked_share`, else the
    direct one, ended by the tokenizer's end token: that is what the loss is on. Equal arguments give equal pairs, so
    a schedule asks once per step with the step's own seed.
    """
    rng = random.Random(f"style/{seed}")
    pairs = []
    for problem, _ in zip(problems("train", seed), range(num)):
        answer = problem.worked if rng.random() < worked_share else problem.direct
        prompt_ids = tokenizer.encode_prompt([{"role": "user", "content": problem.question}])
        pairs.append((prompt_ids, [*tokenizer.encode(answer), tokenizer.eos_ids[0]]))
    return pairs


def _unique(split: str, seed: int, count: int) -> list[Problem]:
    """The first `count` different problems of a stream."""
    unique: dict[str, Problem] = {}
    for problem in islice(problems(split, seed), 20 * count):
        unique.setdefault(problem.question, problem)
        if len(unique) == count:
            return list(unique.values())
    raise ConfigError(f"the {split} split has fewer than {count} different questions: ask for at most {len(unique)}")


def _row(problem: Problem, split: str, index: int) -> Row:
    numbers = problem.arithmetic
    extra_info = {
        "split": split,
        "index": index,
        "question": problem.question,
        "answer": problem.worked,
        "template": numbers.template,
        "numbers": [numbers.x, numbers.y, numbers.z],
    }
    return Row(DATA_SOURCES[split], problem.question, problem.answer, "math", extra_info)
