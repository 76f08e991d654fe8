"""A run's segments: made and kept by the node agent, fetched by name by every other process.

    with NodeSegments(path) as segments:            # launcher
        segments.create_queue(plan)
        segments.create_weights(manifest.total_bytes)
    source = SegmentSource(path)                    # any process, also before the launcher is ready
    segment = source.fetch(QUEUE)

The memory ends with the last process that has it, however it ends.
"""

from types import TracebackType
from typing import Protocol, Self

from psrl._core import QueueArena, Segment, SegmentServer, WeightStore, fetch_segment
from psrl.transfer.capacity import QueuePlan

QUEUE, WEIGHTS = "queue", "weights"


class Segments(Protocol):
    """Where segments come from."""

    def fetch(self, name: str, *, read_only: bool = False) -> Segment:
        """The segment. Raises UnknownKey, naming those there are, or StorageError. May block."""


class NodeSegments:
    """Creates segments, keeps them, and serves their descriptors at a Unix socket path."""

    def __init__(self, socket_path: str) -> None:
        """`socket_path` (at most 107 bytes) must not exist; it is removed by close()."""
        self.socket_path = socket_path
        self._server = SegmentServer(socket_path)
        self._segments: dict[str, Segment] = {}

    def create_queue(self, plan: QueuePlan, name: str = QUEUE) -> Segment:
        """Memory for a queue, laid out, so that a StorageActor can open it (again)."""
        segment = Segment.create(name, plan.arena_bytes, "transfer_queue.arena_bytes")
        QueueArena.format(segment, plan.extent_bytes, plan.max_clients)
        self._serve(segment)
        return segment

    def create_weights(self, version_bytes: int, name: str = WEIGHTS) -> Segment:
        """Memory for versions of the weights (psrl.weights.store) of so many bytes each, laid out."""
        num_bytes = WeightStore.required_bytes(version_bytes)
        segment = Segment.create(name, num_bytes, "train_actor_rollout_ref.model.path")
        WeightStore.format(segment, version_bytes)
        self._serve(segment)
        return segment

    def fetch(self, name: str, *, read_only: bool = False) -> Segment:
        """A mapping of its own, as another process would get it."""
        return fetch_segment(self.socket_path, name, 10.0, read_only)

    def close(self) -> None:
        """Stop serving and let go. Processes that have the memory keep it. Idempotent."""
        self._server.close()
        self._segments.clear()

    def _serve(self, segment: Segment) -> None:
        if segment.name in self._segments:
            raise ValueError(f"segment {segment.name} exists")
        self._segments[segment.name] = segment
        self._server.add(segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SegmentSource:
    """Fetches segments from the node agent at `socket_path`, waiting for it up to `timeout_s`. Maps each once."""

    def __init__(self, socket_path: str, timeout_s: float = 30.0) -> None:
        self.socket_path = socket_path
        self._timeout_s = timeout_s
        self._fetched: dict[tuple[str, bool], Segment] = {}

    def fetch(self, name: str, *, read_only: bool = False) -> Segment:
        """The segment. Raises UnknownKey or StorageError. Blocks until the node agent answers."""
        segment = self._fetched.get((name, read_only))
        if segment is None:
            segment = fetch_segment(self.socket_path, name, self._timeout_s, read_only)
            self._fetched[name, read_only] = segment
        return segment
