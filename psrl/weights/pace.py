"""Which node is to be passed by, judged from how many units each has. Pure; times are given.

A hop (from a node to its successor) lags when the successor, with work waiting for it, got less in the last `window_s`
than `min_rate` or than a part of what the node itself got before. Who is at fault, the one that sends or the one that
receives? A relay that is passed by hands on no more, so the first guess costs little: the receiver, if it is a relay;
when another receiver then lags behind the same node, it is that node. Each node is passed by once in a transfer.
"""

from collections import deque
from dataclasses import dataclass, field

from psrl.weights.topology import NodeName, Route


@dataclass(frozen=True)
class PaceRule:
    """`min_rate` in bytes a second: a hop with work that moves less is slow whatever the others do. `factor`: how many
    times slower than its predecessor a successor may be. `patience_bytes`: how far it must be behind for that."""

    window_s: float = 1.0
    factor: float = 3.0
    min_rate: float = 64 * 1024
    patience_bytes: int = 16 << 20


@dataclass
class Pace:
    """One route's progress. `look` is called every now and then."""

    rule: PaceRule
    unit_bytes: int
    started_s: float
    _seen: deque[tuple[float, dict[NodeName, int]]] = field(default_factory=deque)
    _lagged: dict[NodeName, set[NodeName]] = field(default_factory=dict)  # behind each node
    _passed: set[NodeName] = field(default_factory=set)
    _moved_s: dict[NodeName, float] = field(default_factory=dict)  # when its predecessor changed

    def look(self, now: float, route: Route, have: dict[NodeName, int], num_units: int) -> NodeName | None:
        """The relay to pass by, if there is one. The caller does so at once."""
        self._seen.append((now, dict(have)))
        while len(self._seen) > 1 and now - self._seen[1][0] >= self.rule.window_s:
            self._seen.popleft()
        then, before = self._seen[0]
        if now - then < self.rule.window_s:
            return None
        for child, parent in route.parents:
            if now - self._moved_s.get(child, self.started_s) < self.rule.window_s:
                continue
            if self._lags(then, now, before, have, parent, child, parent == route.source):
                found = self._at_fault(route, parent, child)
                if found is not None:
                    self._passed.add(found)
                    for moved in (found, *route.children(found)):
                        self._moved_s[moved] = now
                    return found
        return None

    def _lags(
        self,
        then: float,
        now: float,
        before: dict[NodeName, int],
        have: dict[NodeName, int],
        parent: NodeName,
        child: NodeName,
        from_source: bool,
    ) -> bool:
        waiting = before.get(parent, 0) - have.get(child, 0)  # there was work all the time
        if waiting <= 0 or child not in before:
            return False
        rate = (have[child] - before[child]) * self.unit_bytes / (now - then)
        if rate < self.rule.min_rate:
            return True
        if from_source or waiting * self.unit_bytes < self.rule.patience_bytes:
            return False
        fed = before[parent] * self.unit_bytes / max(then - self.started_s, self.rule.window_s)
        return rate * self.rule.factor < fed

    def _at_fault(self, route: Route, parent: NodeName, child: NodeName) -> NodeName | None:
        behind = self._lagged.setdefault(parent, set())
        behind.add(child)
        slow_twice = sum(child in children for children in self._lagged.values()) > 1
        relay = bool(route.children(child)) and child not in self._passed
        sender = parent != route.source and parent not in self._passed
        if relay and (slow_twice or len(behind) == 1 or not sender):
            return child
        return parent if sender and not slow_twice else None
