"""Write rows in veRL's format as parquet."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq


class Row(msgspec.Struct, frozen=True):
    """One prompt with its verifiable answer."""

    data_source: str
    question: str  # the user's message as the model sees it
    ground_truth: str
    ability: str
    extra_info: dict[str, Any]


def write_parquet(rows: Iterable[Row], path: Path) -> int:
    """Write all rows to `path`, replacing it whole at the end. Returns their number."""
    table = pa.Table.from_pylist(
        [
            {
                "data_source": row.data_source,
                "prompt": [{"role": "user", "content": row.question}],
                "ability": row.ability,
                "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
                "extra_info": row.extra_info,
            }
            for row in rows
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    pq.write_table(table, partial, row_group_size=1024)
    partial.replace(path)
    return int(table.num_rows)
