"""Who trains what: sequences over ranks, and a rank's sequences over micro-batches. Pure.

Ranks get about equal work, not equal counts: losses are divided by global counts, so counts don't matter.
A micro-batch never exceeds its token budget, and every rank gets the same number of micro-batches (the surplus
ones empty), because each of them takes part in collectives.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def workload(length: int) -> int:
    """Relative cost of a sequence of `length` tokens: linear layers and attention."""
    return 24576 * length + length * length


def partition(works: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide indices into `num_parts` with nearly equal sums of `works` (largest differencing, Karmarkar-Karp).

    Some parts are empty when there are fewer indices than parts. Each part is sorted; the result is deterministic.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    # A state is num_parts (sum, indices) pairs, largest first; merging joins the largest of one with the smallest
    # of the other. The heap holds the state with the widest spread first; the index breaks ties.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, work in enumerate(works):
        state = [(work, [index])] + [(0, []) for _ in range(num_parts - 1)]
        heap.append((-(state[0][0] - state[-1][0]), index, state))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right))]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (-(merged[0][0] - merged[-1][0]), tie, merged))
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut indices into batches of at most `max_tokens` tokens, of about equal work, largest work first.

    Tries the smallest possible number of batches with balanced parts, then first-fit in decreasing order.
    Raises ValueError if one sequence alone is over the budget.
    """
    if not lengths:
        return []
    if max(lengths) > max_tokens:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens does not fit into actor.ppo_max_token_len_per_gpu={max_tokens}"
        )
    fewest = -(-sum(lengths) // max_tokens)
    fitted = _first_fit(lengths, max_tokens)
    works = [workload(length) for length in lengths]
    for count in range(fewest, len(fitted) + 1):
        parts = [part for part in partition(works, count) if part]
        if all(sum(lengths[i] for i in part) <= max_tokens for part in parts):
            return sorted(parts, key=lambda part: -sum(works[i] for i in part))
    return sorted(fitted, key=lambda part: -sum(works[i] for i in part))


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = next((s for s, free in enumerate(room) if free >= lengths[index]), None)
        if slot is None:
            batches.append([])
            room.append(max_tokens)
            slot = len(room) - 1
        batches[slot].append(index)
        room[slot] -= lengths[index]
    return [sorted(batch) for batch in batches]


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of one mini-batch: `micro[rank][k]` lists row numbers; all ranks have equally many micro-batches."""

    micro: tuple[tuple[tuple[int, ...], ...], ...]

    def rows(self, rank: int) -> list[int]:
        """All rows of a rank, in the order of its micro-batches."""
        return [row for batch in self.micro[rank] for row in batch]


def plan(rows: Sequence[int], lengths: Sequence[int], num_ranks: int, max_tokens: int) -> Plan:
    """Spread `rows` (numbers into the batch; `lengths` by row number) over ranks and micro-batches."""
    shares = partition([workload(lengths[row]) for row in rows], num_ranks)
    cut: list[list[tuple[int, ...]]] = []
    for share in shares:
        mine = [rows[i] for i in share]
        batches = micro_batches([lengths[row] for row in mine], max_tokens)
        cut.append([tuple(mine[i] for i in batch) for batch in batches])
    most = max(len(batches) for batches in cut)
    return Plan(tuple(tuple(batches) + ((),) * (most - len(batches)) for batches in cut))


def balance_metrics(lengths: Sequence[int], shares: Sequence[Sequence[int]]) -> dict[str, float]:
    """global_seqlen/*: tokens per rank, as the batch came (contiguous shares) and as it was balanced."""
    if not lengths:
        return {}
    num_ranks = len(shares)
    size = -(-len(lengths) // num_ranks)
    before = [sum(lengths[r * size : (r + 1) * size]) for r in range(num_ranks)]
    after = [sum(lengths[i] for i in share) for share in shares]
    return {
        "global_seqlen/min": float(min(before)),
        "global_seqlen/max": float(max(before)),
        "global_seqlen/minmax_diff": float(max(before) - min(before)),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": sum(lengths) / num_ranks,
    }
