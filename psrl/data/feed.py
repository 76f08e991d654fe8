"""Prompts in the order of the sampler, numbered over the run: what PSManager draws from.

The number of a prompt is its draw: group g of a run is always the same row, before and after a resume.
"""

from psrl.control.messages import Prompt
from psrl.data.dataset import PromptDataset
from psrl.data.sampler import Order, Position, Sampler
from psrl.types import GroupId


class PromptFeed:
    """A data set read through a sampler. `next` neither waits nor does I/O."""

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1,
        num_epochs: int | None = None,
    ) -> None:
        """Raises DataError, with the counts and the remedy, if the data does not fill one batch."""
        dataset.require(batch_size)
        self._dataset = dataset
        self._sampler = Sampler(Order(len(dataset), batch_size, shuffle, seed, dataset.fingerprint), num_epochs)

    @property
    def steps_per_epoch(self) -> int:
        return self._sampler.steps_per_epoch

    @property
    def position(self) -> Position:
        """Where the next draw is; a msgspec struct, for the checkpoint."""
        return self._sampler.position

    def restore(self, position: Position) -> None:
        """Go on from there. Raises ConfigError if the data or its order is another one."""
        self._sampler.restore(position)

    def next(self) -> Prompt | None:
        """The next prompt with its group id; None at the end of the last epoch."""
        group = GroupId(self._sampler.num_drawn)
        row = self._sampler.next()
        return None if row is None else self._dataset.prompt(row, group)
