"""The loading of weights as a list of copies that was noted once.

An engine's own loading knows where each tensor goes: into which rows of a fused projection, under which names, in
which dtype. `record` lets it run once over tensors that stay where they are (`psrl.weights.stage`) and notes every copy
from them. If those copies are all that loading did, replaying them is loading again: in one pass over the memory, on a
GPU as one graph launch.

That they are all is checked: each goes to a contiguous part of a parameter or buffer, no two to the same bytes, every
byte of every parameter is reached, nothing else wrote there, and nothing moved.
"""

import bisect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

_SHOWN = 4  # problems in a message

Copy = tuple[torch.Tensor, torch.Tensor]
"""Destination, source."""


class DirectCopies:
    """Copies from fixed places to fixed places. `apply` does them all."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        # Lists of one kind each: a mixed list is copied one tensor at a time.
        kinds: dict[tuple[object, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for into, source in copies:
            kind = (into.dtype, source.dtype, into.device, source.device, source.is_contiguous())
            destinations, sources = kinds.setdefault(kind, ([], []))
            destinations.append(into)
            sources.append(source)
        self._lists = list(kinds.values())
        self.num_copies = len(copies)
        self.num_bytes = sum(source.nbytes for _, source in copies)
        devices = {tensor.device for pair in copies for tensor in pair}
        self._device = next((device for device in devices if device.type == "cuda"), None)
        self._graph = self._capture() if devices == {self._device} else None

    @property
    def is_graph(self) -> bool:
        """Whether `apply` is one launch."""
        return self._graph is not None

    @torch.inference_mode()
    def apply(self) -> None:
        """Copy; all have happened when it returns."""
        if self._device is None:
            self._copy()
            return
        with torch.cuda.device(self._device):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._copy()
            torch.cuda.current_stream().synchronize()

    def _copy(self) -> None:
        for destinations, sources in self._lists:
            torch._foreach_copy_(destinations, sources)

    @torch.inference_mode()
    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """The copies as a graph, launched once: first uses are slow, and this is not yet the moment that counts."""
        try:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                with torch.cuda.stream(stream):
                    self._copy()
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self._copy()
                graph.replay()
                torch.cuda.synchronize()
        except RuntimeError as error:
            logger.warning("weights are copied without a CUDA graph: %s", error)
            return None
        return graph


def record(
    load: Callable[[], object],
    sources: Iterable[tuple[str, torch.Tensor]],
    parameters: Iterable[tuple[str, torch.Tensor]],
    buffers: Iterable[tuple[str, torch.Tensor]] = (),
) -> DirectCopies | str:
    """Run `load`, which fills `parameters` (and maybe `buffers`) from `sources`.

    Returns what does it again, or in words why it cannot be done so. Either way the weights are loaded then; what
    `load` raises passes.
    """
    parameters = list(parameters)
    targets = _Places([*parameters, *buffers])
    recorder = _Recorder(_Places(sources), targets)
    before = [(name, tensor, tensor.data_ptr()) for name, tensor in parameters]
    with recorder:
        load()
    problems = recorder.problems
    problems += [f"{name} was moved" for name, tensor, place in before if tensor.data_ptr() != place]
    copies = recorder.copies()
    problems += _faults(copies, parameters, targets)
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        return "; ".join(problems[:_SHOWN]) + more
    return DirectCopies(copies)


class _Places:
    """Which of some named tensors a piece of memory belongs to."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = [(name, tensor) for name, tensor in named if tensor.numel()]
        self._storages = {tensor.untyped_storage().data_ptr() for _, tensor in held}
        by_place: dict[int, str] = {}
        for name, tensor in held:
            by_place.setdefault(tensor.data_ptr(), name)
        self._starts = sorted(by_place)
        self._names = [by_place[start] for start in self._starts]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._storages

    def name(self, address: int) -> str:
        return self._names[max(bisect.bisect_right(self._starts, address) - 1, 0)]


class _Cast(NamedTuple):
    source: torch.Tensor
    dtype: torch.dtype
    layout: tuple[object, tuple[int, ...], int]


def _layout(tensor: torch.Tensor) -> tuple[object, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    """Equal for tensors that share memory, and for none that came to stand there later."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies from sources to targets, and what else happens to targets."""

    def __init__(self, sources: _Places, targets: _Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources, self._targets = sources, targets
        self._copies: dict[tuple[int, int], Copy] = {}
        self._casts: dict[StorageWeakRef, _Cast] = {}  # by the memory of the result, as long as it lives
        self.problems: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's own hook. Skipping would import torch's compiler first, for seconds, while an engine stands still."""
        return False

    def copies(self) -> list[Copy]:
        return list(self._copies.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func is aten.copy_.default:
            self._note(args[0], args[1])
        elif func is aten._foreach_copy_.default:
            for into, source in zip(args[0], args[1], strict=True):
                self._note(into, source)
        elif func in (aten._to_copy.default, aten.clone.default) and args[0] in self._sources:
            self._casts[_memory(result)] = _Cast(args[0], result.dtype, _layout(result))
        else:
            for written in _written(func, args, kwargs or {}):
                if written in self._targets:
                    self._reject(f"{self._targets.name(written.data_ptr())} is written by {func}")
                self._forget(written)
        return result

    def _note(self, into: torch.Tensor, source: torch.Tensor) -> None:
        if into.numel() == 0:
            return
        direct = self._origin(source, into.dtype)
        if into not in self._targets:
            if direct is not None:
                self._reject(f"{self._sources.name(direct.data_ptr())} goes to what is no parameter or buffer")
            self._forget(into)
            return
        name = self._targets.name(into.data_ptr())
        if direct is None:
            self._reject(f"{name} is filled from a tensor that was computed")
        elif not into.is_contiguous():
            self._reject(f"a part of {name} that is filled is not contiguous")
        else:
            # Said twice (both names of tied weights, say), the later one holds.
            self._copies.pop((into.data_ptr(), into.nbytes), None)
            self._copies[into.data_ptr(), into.nbytes] = (into, direct.expand(into.shape))

    def _origin(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """`tensor` as a view of a source, looking through a cast to `dtype`, which a copy does by itself."""
        if tensor in self._sources:
            return tensor
        cast = self._casts.get(_memory(tensor))
        if cast is None or cast.dtype != dtype:
            return None
        if _layout(tensor) == cast.layout:
            return cast.source
        _, stride, offset = cast.layout
        if stride != cast.source.stride():
            return None
        moved = int(tensor.storage_offset()) - offset + int(cast.source.storage_offset())
        return cast.source.as_strided(tensor.shape, tensor.stride(), moved)

    def _forget(self, written: torch.Tensor) -> None:
        """It is no mere cast any more."""
        self._casts.pop(_memory(written), None)

    def _reject(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors that an operator changes in place."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _faults(copies: Sequence[Copy], parameters: Iterable[tuple[str, torch.Tensor]], targets: _Places) -> list[str]:
    """Where copies overlap, and which parameters are not wholly covered."""
    intervals = sorted((into.data_ptr(), into.data_ptr() + into.nbytes) for into, _ in copies)
    covered: list[list[int]] = []
    faults = []
    for start, stop in intervals:
        if covered and start < covered[-1][1]:
            faults.append(f"copies overlap in {targets.name(start)}")
        if covered and start <= covered[-1][1]:
            covered[-1][1] = max(stop, covered[-1][1])
        else:
            covered.append([start, stop])
    starts = [start for start, _ in covered]
    for name, parameter in parameters:
        if parameter.numel() == 0:
            continue
        if not parameter.is_contiguous():
            faults.append(f"{name} is not contiguous")
            continue
        first = parameter.data_ptr()
        at = bisect.bisect_right(starts, first) - 1
        if at < 0 or first + parameter.nbytes > covered[at][1]:
            faults.append(f"{name} is not filled as a whole")
    return faults
