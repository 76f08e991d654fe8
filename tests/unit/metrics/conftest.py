import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

N, GROUPS = 2, 3  # siblings of a group, groups of a step


@dataclass
class SyntheticRun:
    """A run that keeps all promises, as plain dictionaries to be spoilt."""

    staleness: int
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def start(self, attempt: int, resumed_from: int | None = None) -> None:
        self.attempts.append(
            {"kind": "start", "attempt": attempt, "epoch": attempt, "resumed_from": resumed_from}
            | {"staleness": self.staleness, "rollout_n": N}
        )

    def line(self, attempt: int, group: int, index: int, outcome: str, **more: Any) -> dict[str, Any]:
        line = {
            "key": f"{group}_{index}",
            "group": group,
            "index": index,
            "offer": 0,
            "attempt": attempt,
            "purpose": "train",
            "replicas": ["replica-0"],
            "spans": [],
            "started_s": None,
            "ended_s": None,
            "finish_reason": "stop",
            "num_prompt_tokens": 4,
            "num_response_tokens": 0,
            "raw_score": 1.0,
            "shaped_reward": 0.5,
            "metrics": {"acc": 1.0},
            "outcome": outcome,
            "trained_at": None,
            "reason": None,
            **more,
        }
        self.trajectories.append(line)
        return line

    def train(self, attempt: int, step: int, first_group: int) -> None:
        """Step `step` lasts from 10 * step + 5 to + 9; version step + 1 is out at + 9.5."""
        oldest = max(0, step - self.staleness)
        for group in range(first_group, first_group + GROUPS):
            for index in range(N):
                spans = [{"version": oldest, "num_tokens": 3, "replica": "replica-0"}]
                if step > oldest and index == 0:
                    spans.append({"version": step, "num_tokens": 2, "replica": "replica-1"})
                self.line(
                    attempt,
                    group,
                    index,
                    "trained",
                    trained_at=step,
                    spans=spans,
                    num_response_tokens=sum(span["num_tokens"] for span in spans),
                    started_s=10.0 * oldest,
                    ended_s=10.0 * step + 4,
                )
        self.metrics.append(
            {"step": step + 1, "timing_s/step": 10.0, "perf/total_num_tokens": 100.0}
            | {"training/started_s": 10.0 * step + 5, "training/ended_s": 10.0 * step + 9}
            | {"critic/score/mean": 0.1 * step, "critic/rewards/mean": 0.1 * step - 0.1}
            | {"response_length/mean": 4.0, "response_length/min": 3.0, "response_length/max": 5.0}
        )
        self.attempts.append({"kind": "publish", "attempt": attempt, "version": step + 1, "at_s": 10.0 * step + 9.5})

    def end(self, attempt: int, **counters: int) -> None:
        counts = {"offered": sum(counters.values()), **counters}
        self.attempts.append(
            {"kind": "end", "attempt": attempt, "counters": {"type": "Counters", **counts}, "reason": "all steps done"}
        )

    def validate(self, step: int, score: float) -> None:
        self.metrics.append({"step": step, "val-core/words/acc/mean@1": score, "val-aux/words/reward/mean@1": score})
        self.line(
            0,
            0,
            0,
            "validated",
            purpose="val",
            spans=[{"version": step, "num_tokens": 3, "replica": ""}],
            num_response_tokens=3,
            started_s=1.0,
            ended_s=2.0,
        )

    def write(self, directory: Path) -> Path:
        for name in ("trajectories", "attempts", "metrics"):
            text = "".join(json.dumps(line) + "\n" for line in getattr(self, name))
            (directory / f"{name}.jsonl").write_text(text)
        return directory


@pytest.fixture
def make_run() -> Callable[..., SyntheticRun]:
    """Four steps in one attempt; with `resumed`, a second attempt from version 2 on does two of them again."""

    def make(staleness: int = 3, *, resumed: bool = False) -> SyntheticRun:
        run = SyntheticRun(staleness)
        run.start(0)
        run.validate(0, 0.25)
        for step in range(4):
            run.train(0, step, step * GROUPS)
        for index in range(N):
            run.line(0, 90, index, "filtered", reason="no spread")
            run.line(0, 91, index, "failed", reason="reward")
        if not resumed:
            for index in range(N):
                run.line(0, 92, index, "in_flight")
            run.validate(4, 0.875)
            run.end(0, trained=12, filtered=1, failed=1, in_flight=1)
            return run
        run.start(1, resumed_from=2)
        for step in range(2, 4):
            run.train(1, step, step * GROUPS)
        run.line(1, 93, 0, "stale_aborted")
        run.line(1, 93, 1, "stale_aborted")
        run.validate(4, 0.875)
        run.end(1, trained=12, rolled_back=6, filtered=1, failed=1, stale_aborted=1)
        return run

    return make
