import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.errors import StorageError
from psrl.weights.topology import Route, cut, missing, plan_routes

_VECTORS = os.environ.get("PSRL_VECTORS")
KINDS = ("chain", "tree", "star")
NODES = [f"n{i}" for i in range(12)]


def depth(route: Route, node: str) -> int:
    above = route.parent(node)
    return 0 if above is None else 1 + depth(route, above)


@pytest.mark.skipif(not _VECTORS, reason="PSRL_VECTORS names no folder of golden vectors")
def test_tree_is_that_of_the_reference() -> None:
    cases = json.loads((Path(_VECTORS) / "broadcast_tree.json").read_text())["cases"]
    assert len(cases) >= 10
    for case in cases:
        size, expect = case["world_size"], case["expect"]
        route = Route.of("tree", [str(i) for i in range(size)])
        children = {str(i): [int(child) for child in route.children(str(i))] for i in range(size)}
        assert children == expect["children"], case["id"]
        senders: list[list[int]] = [[] for _ in range((size - 1).bit_length())]
        for i in range(size):
            if children[str(i)]:
                senders[depth(route, str(i))].append(i)
        assert senders == expect["senders"], case["id"]
        assert len(senders) == expect["num_rounds"], case["id"]


def require_route(route: Route, source: str, nodes: set[str]) -> None:
    """All nodes are reached from the source, each once."""
    assert route.nodes[0] == source
    assert sorted(route.nodes) == sorted(nodes)
    assert all(depth(route, node) < len(nodes) for node in nodes)  # no circle
    assert sorted(child for node in nodes for child in route.children(node)) == sorted(nodes - {source})
    seen = {source}
    for node, parent in route.parents:
        assert parent in seen
        seen.add(node)


@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(0, 8))
def test_every_node_is_reached_on_each_route(kind, num_sources, num_destinations) -> None:
    sources, destinations = NODES[:num_sources], NODES[4 : 4 + num_destinations]
    routes = plan_routes(kind, sources, destinations)
    for source, route in zip(sources, routes, strict=True):
        require_route(route, source, {*sources, *destinations})


def test_chains_of_several_sources_end_at_different_nodes() -> None:
    routes = plan_routes("chain", NODES[:3], NODES[3:9])
    assert all(len(route.children(node)) <= 1 for route in routes for node in route.nodes)
    assert len({route.nodes[1] for route in routes}) == 3
    assert len({route.nodes[-1] for route in routes}) == 3


@given(st.sampled_from(KINDS), st.integers(1, 9), st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=8))
def test_nodes_that_are_passed_by_leave_a_whole_route(kind, num_destinations, passed) -> None:
    route = Route.of(kind, NODES[: num_destinations + 1])
    alive = set(route.nodes)
    for number, dead in passed:
        node = NODES[number]
        above, children = route.parent(node), route.children(node)
        route = route.pass_by(node, dead=dead)
        if dead:
            alive.discard(node)
        require_route(route, NODES[0], alive)
        assert route.children(node) == ()
        assert all(route.parent(child) == above for child in children)


def test_a_chain_stays_one_when_a_relay_is_passed_by() -> None:
    chain = Route.of("chain", NODES[:5])
    assert chain.pass_by("n2", dead=True).nodes == ("n0", "n1", "n3", "n4")
    slow = chain.pass_by("n2", dead=False)
    assert slow.nodes == ("n0", "n1", "n3", "n4", "n2")
    assert all(len(slow.children(node)) <= 1 for node in slow.nodes)
    assert chain.pass_by("n0", dead=True) == chain  # the source


def test_a_node_twice_is_refused() -> None:
    with pytest.raises(StorageError, match="twice"):
        Route.of("star", ["a", "b", "a"])


spans = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=12)


def place(found: list[tuple[bool, int]]) -> list[tuple[int, int]]:
    """Ranges where True, gaps where False."""
    at, ranges = 0, []
    for used, length in found:
        if used:
            ranges.append((at, length))
        at += length
    return ranges


def bytes_of(ranges) -> list[int]:
    return [byte for offset, length in ranges for byte in range(offset, offset + length)]


@given(spans, st.integers(1, 64), st.randoms())
def test_units_hold_each_byte_once_in_order(found, unit_bytes, random) -> None:
    ranges = place(found)
    shuffled = random.sample(ranges, len(ranges))
    units = cut(shuffled, unit_bytes)
    assert bytes_of(one for unit in units for one in unit) == bytes_of(ranges)
    sizes = [sum(length for _, length in unit) for unit in units]
    assert all(size == unit_bytes for size in sizes[:-1])
    assert len(units) == math.ceil(sum(length for _, length in ranges) / unit_bytes)


def test_a_whole_version_is_cut_at_multiples() -> None:
    assert cut([(0, 10)], 4) == (((0, 4),), ((4, 4),), ((8, 2),))
    with pytest.raises(StorageError, match="byte 4"):
        cut([(0, 6), (4, 6)], 4)


@given(spans, st.lists(st.sampled_from(["a", "b", None]), min_size=12, max_size=12))
def test_what_no_source_has_is_told(found, owners) -> None:
    ranges = place(found)
    shares: dict[str, list] = {"a": [], "b": []}
    lost = []
    for one, owner in zip(ranges, owners):
        shares[owner].append(one) if owner else lost.append(one)
    assert bytes_of(missing(shares, ranges)) == bytes_of(lost)


def test_two_sources_for_one_byte_are_refused() -> None:
    with pytest.raises(StorageError, match="two sources"):
        missing({"a": [(0, 4)], "b": [(3, 2)]}, [(0, 5)])
