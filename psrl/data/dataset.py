"""Prompts of a data set, tokenised and checked, ready to be drawn.

A row is what veRL writes: `prompt` (list of {role, content}), `reward_model.ground_truth`, and optionally
`data_source` and `extra_info`. Everything is read and checked in `load`, before anything is started; what is wrong is
a DataError that names file, row and column. Kept per row are the ids (int32 little-endian) and the msgpack that
reward workers get, nothing else.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np

from psrl.config.schema import Data
from psrl.control.messages import Prompt
from psrl.data.files import read_rows
from psrl.data.tokenizer import ChatTokenizer
from psrl.errors import ConfigError, DataError
from psrl.types import GroupId

_MULTIMODAL = ("images", "videos", "audios")

CheckTruth = Callable[[str, Any], str]
"""(data source, ground truth) -> what is wrong with it, empty if nothing is."""


class RewardRow(msgspec.Struct, frozen=True):
    """What a reward needs to know of a row. On the wire it is the msgpack of these three, as a map."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = {}


class Counts(msgspec.Struct, frozen=True):
    """How many rows became prompts, and why others did not."""

    read: int
    kept: int
    overlong: int  # left out by data.filter_overlong_prompts
    truncated: int  # shortened as data.truncation says
    not_sampled: int  # beyond the wanted number of samples


class PromptDataset:
    """The prompts of one or more files, in file order. Immutable."""

    def __init__(
        self,
        files: Sequence[Path],
        max_prompt_length: int,
        rows: list[tuple[bytes, bytes]],
        counts: Counts,
        data_sources: frozenset[str],
    ) -> None:
        self.files = tuple(files)
        self.counts = counts
        self.data_sources = data_sources
        """Names that the reward rules must know."""
        self._max_prompt_length = max_prompt_length
        self._rows = rows
        digest = hashlib.blake2b(digest_size=8)
        for prompt_ids, row in rows:
            digest.update(prompt_ids)
            digest.update(row)
        self.fingerprint = digest.hexdigest()
        """Of all prompts in order: equal data gives an equal one."""

    @classmethod
    def load(
        cls,
        files: str | Sequence[str],
        config: Data,
        tokenizer: ChatTokenizer,
        max_samples: int = -1,
        check_truth: CheckTruth = lambda source, truth: "",
    ) -> "PromptDataset":
        """Read, check and tokenise. `max_samples` > 0 keeps so many rows: the first, or drawn by data.seed if
        data.shuffle. `check_truth` is asked of every row.

        Raises DataError for what is wrong in a file, ConfigError for what is wrong in the settings.
        """
        if config.truncation not in _CUTS:
            raise ConfigError(f"data.truncation={config.truncation} is unknown: use {', '.join(_CUTS)}")
        paths = [Path(file).expanduser() for file in ([files] if isinstance(files, str) else files)]
        if not paths:
            raise DataError("no data files are given")
        reader = _Reader(config, tokenizer, check_truth)
        rows = [row for path in paths for row in reader.read(path, str(paths[0]))]
        reader.refuse_overlong()
        kept = _sample(rows, max_samples, config.seed if config.shuffle else None)
        counts = Counts(reader.num_read, len(kept), reader.num_filtered, reader.num_truncated, len(rows) - len(kept))
        return cls(paths, config.max_prompt_length, kept, counts, frozenset(reader.data_sources))

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, row: int, group: GroupId) -> Prompt:
        """Row number `row` of those kept, as group `group`."""
        prompt_ids, reward_row = self._rows[row]
        return Prompt(group, prompt_ids, reward_row)

    def describe(self) -> str:
        """One line for a log: what was read, what was left out and why."""
        counts = self.counts
        parts = [f"{counts.read} rows read from {', '.join(map(str, self.files))}"]
        if counts.overlong:
            parts.append(
                f"{counts.overlong} filtered (longer than data.max_prompt_length={self._max_prompt_length} tokens)"
            )
        if counts.not_sampled:
            parts.append(f"{counts.not_sampled} left out by the limit on samples")
        if counts.truncated:
            parts.append(f"{counts.truncated} truncated")
        return ", ".join(parts) + f"; {counts.kept} prompts"

    def require(self, batch_size: int) -> None:
        """Raise DataError unless there are prompts for at least one batch."""
        if len(self) >= batch_size:
            return
        if self.counts.overlong == self.counts.read:
            problem = "no prompt is left, all are too long"
            remedy = "raise data.max_prompt_length, or set data.filter_overlong_prompts=false and data.truncation=left"
        else:
            problem = f"the data does not fill one batch of {batch_size} prompts"
            remedy = "lower data.train_batch_size, or give more data"
        raise DataError(f"{problem}: {self.describe()}. {remedy[0].upper()}{remedy[1:]}")


class _Reader:
    """Turns rows into (prompt ids, reward row) and counts on the way."""

    def __init__(self, config: Data, tokenizer: ChatTokenizer, check_truth: CheckTruth) -> None:
        self._config = config
        self._check_truth = check_truth
        self._tokenizer = tokenizer
        self._encoder = msgspec.msgpack.Encoder()
        self._first_overlong = ""
        self._num_overlong = 0
        self.num_read = 0
        self.num_filtered = 0
        self.num_truncated = 0
        self.data_sources: set[str] = set()

    def read(self, path: Path, default_source: str) -> Iterator[tuple[bytes, bytes]]:
        required = (self._config.prompt_key, "reward_model")
        optional = ("data_source", "extra_info", *_MULTIMODAL)
        for number, row in read_rows(path, required, optional):
            where = f"{path} row {number}"
            self.num_read += 1
            prompt_ids = self._prompt_ids(where, row)
            reward_row = self._reward_row(where, row, default_source)
            if prompt_ids is not None:
                self.data_sources.add(reward_row.data_source)
                yield prompt_ids, self._encode(where, reward_row)

    def refuse_overlong(self) -> None:
        """Raise DataError if prompts are over the limit and nothing was said about what to do with them."""
        if self._num_overlong:
            raise DataError(
                f"{self._num_overlong} of {self.num_read} prompts are too long, the first: {self._first_overlong}. "
                "Raise data.max_prompt_length, set data.filter_overlong_prompts=true, "
                "or set data.truncation to left, right or middle"
            )

    def _prompt_ids(self, where: str, row: Mapping[str, Any]) -> bytes | None:
        """None if the prompt is left out. Raises DataError."""
        for name in _MULTIMODAL:
            if row.get(name):
                raise DataError(f"{where} column {name}: {name} are not supported, only text prompts are")
        key, limit = self._config.prompt_key, self._config.max_prompt_length
        messages = _messages(f"{where} column {key}", row[key])
        try:
            ids = self._tokenizer.encode_prompt(messages)
        except jinja2.TemplateError as error:
            raise DataError(f"{where} column {key}: the chat template refuses it: {error}") from error
        if not ids:
            raise DataError(f"{where} column {key}: the prompt has no tokens")
        if len(ids) > limit:
            if self._config.filter_overlong_prompts:
                self.num_filtered += 1
                return None
            if self._config.truncation == "error":
                self._num_overlong += 1
                self._first_overlong = (
                    self._first_overlong or f"{where} has {len(ids)} tokens, data.max_prompt_length is {limit}"
                )
                return None
            self.num_truncated += 1
            ids = truncate(ids, limit, self._config.truncation)
        return np.asarray(ids, dtype="<i4").tobytes()

    def _reward_row(self, where: str, row: Mapping[str, Any], default_source: str) -> RewardRow:
        reward_model = row["reward_model"]
        if not isinstance(reward_model, dict):
            raise DataError(
                f"{where} column reward_model: must be a struct with ground_truth, is {_kind(reward_model)}"
            )
        if reward_model.get("ground_truth") is None:
            raise DataError(f"{where} column reward_model.ground_truth: is missing")
        extra_info = row.get("extra_info")
        if extra_info is not None and not isinstance(extra_info, dict):
            raise DataError(f"{where} column extra_info: must be a struct, is {_kind(extra_info)}")
        source = row.get("data_source")
        if source is None:
            source = self._config.data_source_name or default_source
        if not isinstance(source, str):
            raise DataError(f"{where} column data_source: must be a string, is {_kind(source)}")
        truth = reward_model["ground_truth"]
        if problem := self._check_truth(source, truth):
            raise DataError(f"{where} column reward_model.ground_truth is {_kind(truth)}: {problem}")
        return RewardRow(source, truth, extra_info or {})

    def _encode(self, where: str, row: RewardRow) -> bytes:
        try:
            return self._encoder.encode(row)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"{where} column extra_info or reward_model: holds a value that cannot travel: {error}"
            ) from error


def _messages(where: str, value: Any) -> list[dict[str, str]]:
    """Check a prompt: at least one {role, content}, both strings."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: must be a list of {{role, content}}, is {_kind(value)}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: must be a list of {{role, content}}, has {_kind(message)}")
        content = message.get("content")
        if isinstance(content, list):
            raise DataError(f"{where}: content in parts (images, audio) is not supported, only text is")
        if not isinstance(content, str):
            raise DataError(f"{where}: content must be a string, is {_kind(content)}")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _sample(rows: list[tuple[bytes, bytes]], max_samples: int, seed: int | None) -> list[tuple[bytes, bytes]]:
    if not 0 < max_samples < len(rows):
        return rows
    if seed is None:
        return rows[:max_samples]
    return random.Random(seed).sample(rows, max_samples)


def _cut_middle(ids: list[int], limit: int) -> list[int]:
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


_CUTS = {
    "error": None,
    "left": lambda ids, limit: ids[len(ids) - limit :],
    "right": lambda ids, limit: ids[:limit],
    "middle": _cut_middle,
}


def truncate(ids: list[int], limit: int, how: str) -> list[int]:
    """At most `limit` ids: `left` drops from the left, `right` from the right, `middle` keeps both ends."""
    cut = _CUTS[how]
    assert cut is not None
    return ids if len(ids) <= limit else cut(ids, limit)
