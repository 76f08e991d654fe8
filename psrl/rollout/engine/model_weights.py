"""Copies weights into a live model, in place, after a complete check of their names and shapes.

Names are Hugging Face's. Tied tensors are one: any of their names will do; if several are given they must be equal.

The first copy out of a mapping of tensors is recorded (`psrl.weights.device_copies`); later ones out of the same
mapping are replayed.
"""

import logging
from collections.abc import Mapping

import torch

from psrl.errors import EngineError
from psrl.weights.device_copies import DirectCopies, record

logger = logging.getLogger(__name__)

_SHOWN = 8  # names in a message


class ModelWeights:
    """The parameters of one model by name. Holds the model's own tensors, which stay where they are for its life."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._by_name = dict(model.named_parameters(remove_duplicate=False))
        tied: dict[int, list[str]] = {}
        for name, parameter in self._by_name.items():
            tied.setdefault(id(parameter), []).append(name)
        self._tied = list(tied.values())
        self._source: Mapping[str, torch.Tensor] | None = None  # what was copied last
        self._copies: DirectCopies | None = None  # how, if that can be replayed
        self.full_load = ""
        """Why the last copy could not be by direct copies. Empty if it was, or was the one that is recorded."""

    @torch.inference_mode()
    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """EngineError that names every leftover on either side; nothing has been copied then."""
        if self._copies is not None and tensors is self._source and len(tensors) == len(self._tied):
            return  # names and shapes were checked, and no tied one has two values
        problems = []
        missing = [" = ".join(names) for names in self._tied if not any(name in tensors for name in names)]
        if missing:
            problems.append(f"missing: {_some(missing)}")
        unexpected = [name for name in tensors if name not in self._by_name]
        if unexpected:
            problems.append(f"unexpected: {_some(unexpected)}")
        misshapen = [
            f"{name} is {list(tensor.shape)}, wanted {list(self._by_name[name].shape)}"
            for name, tensor in tensors.items()
            if name in self._by_name and tensor.shape != self._by_name[name].shape
        ]
        if misshapen:
            problems.append(f"other shape: {_some(misshapen)}")
        for names in self._tied:
            given = [tensors[name] for name in names if name in tensors]
            if len({tensor.shape for tensor in given}) == 1 and any(
                not torch.equal(given[0], other) for other in given[1:]
            ):
                problems.append(f"tied but different: {' and '.join(names)}")
        if problems:
            raise EngineError("weights do not fit the model; " + "; ".join(problems))

    @torch.inference_mode()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Copy, casting to the model's dtype; bytes read. Call `check` first. On GPU returns when the copies have
        happened."""
        if self._copies is not None and tensors is self._source:
            self._copies.apply()
            return self._copies.num_bytes
        self._source, self._copies = None, None
        named = ((name, tensors[name]) for name in tensors)
        outcome = record(lambda: self._copy_by_name(tensors), named, self._by_name.items())
        if isinstance(outcome, DirectCopies):
            self._source, self._copies, self.full_load = tensors, outcome, ""
        elif outcome != self.full_load:
            self.full_load = outcome
            logger.warning("weights are loaded by name, not by direct copies: %s", outcome)
        if any(parameter.is_cuda for parameter in self._by_name.values()):
            torch.cuda.synchronize()
        return sum(tensors[name].nbytes for name in tensors)

    def _copy_by_name(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._by_name[name].data.copy_(tensor)


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
