"""Pure: which tokens a step's prefill computes, and in which forward passes."""

from collections.abc import Sequence

import msgspec


class Part(msgspec.Struct, frozen=True):
    """Compute the next `num_tokens` of the `index`-th candidate."""

    index: int
    num_tokens: int


def plan_prefill(pending: Sequence[int], budget: int) -> list[Part]:
    """Give `budget` tokens to candidates in order of arrival. `pending`: tokens that each still has to compute, all
    > 0. A candidate that does not fit whole gets what is left, and goes on in the next step."""
    parts = []
    for index, num_tokens in enumerate(pending):
        if budget <= 0:
            break
        parts.append(Part(index, min(num_tokens, budget)))
        budget -= parts[-1].num_tokens
    return parts


def split_by_length(parts: Sequence[Part], max_padded: int) -> list[list[Part]]:
    """Group parts of like lengths into forward passes: in each, the shortest has at least half the tokens of the
    longest, and the padded size stays within max_padded (a single part always may exceed it)."""
    groups: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: -part.num_tokens):
        if groups:
            longest = groups[-1][0].num_tokens
            if 2 * part.num_tokens >= longest and longest * (len(groups[-1]) + 1) <= max_padded:
                groups[-1].append(part)
                continue
        groups.append([part])
    return groups
