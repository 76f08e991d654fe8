"""A run as one picture: does it learn, does it stay within the bound, do generation and training overlap?"""

from pathlib import Path
from typing import Any

import numpy as np

from psrl.metrics.intervals import Intervals
from psrl.metrics.run_files import TRAINED, RunFiles
from psrl.metrics.summary import generation, overlap, training
from psrl.types import Purpose

_BLUE, _ORANGE, _GREY = "#2a6f97", "#e07a1f", "#8d99ae"
_NUM_BINS = 400


def draw(run: RunFiles, path: Path) -> None:
    """Write the picture to `path` (PNG)."""
    figure(run).savefig(path, dpi=120)


def figure(run: RunFiles) -> Any:
    """The picture as matplotlib's Figure. What the run does not have stays an empty panel that says so."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 8.5), layout="constrained")
    FigureCanvasAgg(drawn)
    grid = drawn.add_gridspec(3, 2, height_ratios=(3, 3, 2))
    _accuracy(drawn.add_subplot(grid[0, 0]), run)
    _reward(drawn.add_subplot(grid[0, 1]), run)
    _length(drawn.add_subplot(grid[1, 0]), run)
    _staleness(drawn.add_subplot(grid[1, 1]), run)
    _overlap(drawn.add_subplot(grid[2, :]), run)
    return drawn


def _accuracy(axes: Any, run: RunFiles) -> None:
    _panel(axes, "validation", "accuracy")
    keys = [key for key in run.keys("val-core/") if "/mean@" in key]
    for key, colour in zip(keys, (_BLUE, _ORANGE, _GREY) * len(keys), strict=False):
        steps, values = run.series(key)
        axes.plot(steps, values, color=colour, marker="o", markersize=4, label=key.removeprefix("val-core/"))
    if keys:
        axes.set_ylim(-0.02, 1.02)
        axes.legend(frameon=False, fontsize=8)
    else:
        _nothing(axes)


def _reward(axes: Any, run: RunFiles) -> None:
    _panel(axes, "training", "per trajectory, mean")
    pairs = (("critic/score/mean", "raw score", _BLUE, "-"), ("critic/rewards/mean", "shaped reward", _ORANGE, "--"))
    for key, label, colour, style in pairs:
        steps, values = run.series(key)
        axes.plot(steps, values, style, color=colour, label=label)
    axes.legend(frameon=False, fontsize=8)
    if not run.series("critic/score/mean")[0]:
        _nothing(axes)


def _length(axes: Any, run: RunFiles) -> None:
    _panel(axes, "response length", "tokens")
    steps, mean = run.series("response_length/mean")
    if not steps:
        _nothing(axes)
        return
    axes.plot(steps, mean, color=_BLUE, label="mean")
    low, high = run.series("response_length/min"), run.series("response_length/max")
    if low[0] == high[0] == steps:
        axes.fill_between(steps, low[1], high[1], color=_BLUE, alpha=0.15, linewidth=0, label="min to max")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _staleness(axes: Any, run: RunFiles) -> None:
    """Share of each step's trajectories by staleness, from the record of trajectories. Step v + 1 trains version v."""
    _panel(axes, "staleness", "share of trajectories")
    points = [
        (line.trained_at + 1, line.trained_at - line.oldest)
        for line in run.lines
        if line.outcome == TRAINED
        and line.trained_at is not None
        and line.oldest is not None
        and not run.is_rolled_back(line)
    ]
    if not points:
        _nothing(axes)
        return
    steps = sorted({step for step, _ in points})
    place = {step: i for i, step in enumerate(steps)}
    largest = max(0, *(stale for _, stale in points))
    counts = np.zeros((largest + 1, len(steps)))
    for step, stale in points:
        counts[max(stale, 0), place[step]] += 1
    shares = counts / counts.sum(axis=0)
    below = np.zeros(len(steps))
    for stale, share in enumerate(shares):
        shade = 0.15 + 0.75 * (stale / max(largest, 1))
        axes.bar(steps, share, bottom=below, width=1.0, color=_BLUE, alpha=shade, linewidth=0, label=str(stale))
        below += share
    bound = max((start.staleness for start in run.starts), default=0)
    axes.set_title(f"staleness (bound {bound})", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8, ncols=min(largest + 1, 8), loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _overlap(axes: Any, run: RunFiles) -> None:
    """How many trajectories ran at each moment, over the times in which a training step ran."""
    _panel(axes, "generation and training", "trajectories running", "seconds")
    spans = [
        (line.started_s, line.ended_s)
        for line in run.lines
        if line.purpose is Purpose.TRAIN and line.started_s is not None and line.ended_s is not None
    ]
    steps = training(run)
    if not spans:
        _nothing(axes)
        return
    origin = min(start for start, _ in [*spans, *steps])
    last = max(end for _, end in [*spans, *steps])
    edges = np.linspace(origin, max(last, origin + 1e-9), _NUM_BINS + 1)
    centres = (edges[:-1] + edges[1:]) / 2
    starts, ends = np.sort([start for start, _ in spans]), np.sort([end for _, end in spans])
    running = np.searchsorted(starts, centres, "right") - np.searchsorted(ends, centres, "right")
    axes.fill_between(centres - origin, running, color=_BLUE, alpha=0.6, linewidth=0, step="mid", label="generation")
    top = max(1, int(running.max()))
    axes.broken_barh(_bars(steps, origin), (-0.18 * top, 0.14 * top), color=_ORANGE, label="training step")
    axes.set_ylim(-0.2 * top, 1.05 * top)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])  # the bars below 0 count nothing
    share = overlap(generation(run), steps)
    if steps and share is not None:
        axes.set_title(f"generation and training, both running {share:.0%} of the time", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)


def _bars(intervals: Intervals, origin: float) -> list[tuple[float, float]]:
    return [(start - origin, end - start) for start, end in intervals]


def _panel(axes: Any, title: str, y: str, x: str = "step") -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel(y, fontsize=9)
    axes.set_xlabel(x, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _nothing(axes: Any) -> None:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=_GREY)
