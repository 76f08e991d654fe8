"""Rows of a data file, one dict each, with bounded memory: .parquet, .jsonl, .json.

Whatever cannot be read is a DataError that names file, row (from 0) and column.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from psrl.errors import DataError

_BATCH_BYTES = 32 << 20
"""Decoded at once. Nested columns of a large row group cannot be read in one piece, and need not be."""


def read_rows(path: Path, required: Collection[str], optional: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number, the columns asked for that the file has). Raises DataError; also for a file without rows."""
    if not path.exists():
        raise DataError(f"{path} does not exist; `psrl data` makes data sets")
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    readers = {".parquet": _parquet, ".jsonl": _json_lines, ".json": _json}
    reader = readers.get(path.suffix)
    if reader is None:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; use one of {', '.join(readers)}")
    row_number = -1
    for row_number, row in enumerate(reader(path, required, optional)):
        yield row_number, row
    if row_number < 0:
        raise DataError(f"{path} is empty: it has 0 rows")


def _missing(path: Path, where: str, missing: list[str], present: Collection[str]) -> DataError:
    hint = " (data.prompt_key names the prompt column)" if "prompt" in missing or len(missing) == 1 else ""
    columns = ", ".join(sorted(present)) or "none"
    return DataError(f"{path}{where} has no column {', '.join(missing)}{hint}; its columns are {columns}")


def _parquet(path: Path, required: Collection[str], optional: Collection[str]) -> Iterator[dict[str, Any]]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    with file:
        present = file.schema_arrow.names
        if missing := [name for name in required if name not in present]:
            raise _missing(path, "", missing, present)
        columns = [name for name in present if name in required or name in optional]
        first = 0
        for group in range(file.num_row_groups):
            meta = file.metadata.row_group(group)
            rows_at_once = max(1, min(1024, _BATCH_BYTES * meta.num_rows // max(meta.total_byte_size, 1)))
            try:
                for batch in file.iter_batches(rows_at_once, row_groups=[group], columns=columns, use_threads=False):
                    yield from _rows_of(path, first, batch)
                    first += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path} is damaged at or after row {first}: {error}") from error


def _rows_of(path: Path, first: int, batch: Any) -> list[dict[str, Any]]:
    try:
        return list(batch.to_pylist())
    except (UnicodeDecodeError, pa.ArrowException):
        for index in range(batch.num_rows):
            for name in batch.schema.names:
                try:
                    batch.column(name)[index].as_py()
                except UnicodeDecodeError as error:
                    raise DataError(f"{path} row {first + index} column {name}: not valid UTF-8 ({error})") from error
        raise


def _json_lines(path: Path, required: Collection[str], optional: Collection[str]) -> Iterator[dict[str, Any]]:
    number = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            yield _select(path, number, _decode(path, f" row {number}", line), required, optional)
            number += 1


def _json(path: Path, required: Collection[str], optional: Collection[str]) -> Iterator[dict[str, Any]]:
    """An array of objects, or one object a line as many tools write it."""
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    if not start.startswith(b"["):
        yield from _json_lines(path, required, optional)
        return
    for number, row in enumerate(_decode(path, "", path.read_bytes())):
        yield _select(path, number, row, required, optional)


def _decode(path: Path, where: str, text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise DataError(f"{path}{where}: not valid JSON ({error})") from error


def _select(path: Path, number: int, row: Any, required: Collection[str], optional: Collection[str]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{path} row {number}: not an object but {type(row).__name__}")
    if missing := [name for name in required if name not in row]:
        raise _missing(path, f" row {number}", missing, row)
    return {name: value for name, value in row.items() if name in required or name in optional}
