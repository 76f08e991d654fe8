"""A run that starts anew in a directory that was used: what is there moves to `previous-N/`, whole and readable.

So the record of the new run is of the new run alone, and nothing is deleted: `psrl report RUN_DIR/previous-1` works.
"""

from pathlib import Path

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
    """Move what earlier starts left; the folder that it is in now, or None when there was no record of a run."""
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
    return previous
