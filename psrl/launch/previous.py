"""A run that does not go on with the record of its directory: what is there moves to `previous-N/`, whole and readable.

So the record of the new run is of the new run alone, and nothing is deleted: `psrl report RUN_DIR/previous-1` works.
"""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

# Checkpoints first, attempts last: if this is cut short, a start that resumes sees an old record without checkpoints,
# and begins from nothing by itself.
_NAMES = (
    "checkpoints",
    "trajectories.jsonl",
    "metrics.jsonl",
    "curves.png",
    "wandb",
    "logs",
    "config.yaml",
    "attempts.jsonl",
)
_RECORD = ("checkpoints", "trajectories.jsonl", "attempts.jsonl")


def set_aside(run_dir: Path) -> Path | None:
    """Move what earlier starts left, and say so; where it is now, or None when there was no record of a run."""
    if not any((run_dir / name).exists() for name in _RECORD):
        return None
    number = 1
    while (run_dir / f"previous-{number}").exists():
        number += 1
    previous = run_dir / f"previous-{number}"
    previous.mkdir()
    for name in _NAMES:
        if (run_dir / name).exists():
            (run_dir / name).rename(previous / name)
    logger.warning("the run starts anew: what was in %s is in %s now", run_dir, previous)
    return previous
