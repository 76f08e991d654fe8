"""Which row comes next: ordered, endless or bounded, and resumable to the exact row. Pure.

An epoch is a pass over floor(rows / batch) * batch rows: in file order, or in an order drawn from (seed, epoch) when
shuffled. The rows that don't fill a batch are left out of that pass (of another order's tail in each epoch, if
shuffled). Epochs follow each other without a seam. Without refills step s trains draws [s * batch, (s + 1) * batch),
so an epoch has floor(rows / batch) steps. Refills of dynamic sampling draw on in the same sequence: steps are then
fewer than epochs would say, and a refill at the end of an epoch takes the first rows of the next one. How many steps
a run has is therefore decided by the trainer, not here.
"""

import msgspec
import numpy as np

from psrl.errors import ConfigError


class Order(msgspec.Struct, frozen=True):
    """What fixes the sequence. A position is only good for the order that it was taken in."""

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int
    fingerprint: str = ""  # of the rows themselves

    @property
    def draws_per_epoch(self) -> int:
        return self.num_rows // self.batch_size * self.batch_size


class Position(msgspec.Struct, frozen=True):
    """The next draw is number `index` of epoch `epoch`, 0 <= index < draws_per_epoch."""

    epoch: int
    index: int
    order: Order


class Sampler:
    """Draws row numbers. `num_epochs` None is endless."""

    def __init__(self, order: Order, num_epochs: int | None = None) -> None:
        if order.draws_per_epoch == 0:
            raise ConfigError(f"{order.num_rows} rows do not fill one batch of {order.batch_size}")
        self.order = order
        self._num_epochs = num_epochs
        self._epoch = 0
        self._index = 0
        self._rows = self._rows_of(0)

    @property
    def steps_per_epoch(self) -> int:
        return self.order.num_rows // self.order.batch_size

    @property
    def position(self) -> Position:
        return Position(self._epoch, self._index, self.order)

    @property
    def num_drawn(self) -> int:
        """Draws since the first one of the run."""
        return self._epoch * self.order.draws_per_epoch + self._index

    def next(self) -> int | None:
        """The next row, in [0, num_rows); None after the last epoch."""
        if self._num_epochs is not None and self._epoch >= self._num_epochs:
            return None
        row = int(self._rows[self._index])
        self._index += 1
        if self._index == self.order.draws_per_epoch:
            self._seek(self._epoch + 1, 0)
        return row

    def restore(self, position: Position) -> None:
        """Go on from a position. Raises ConfigError if it was taken in another order, and says what differs."""
        differing = [
            f"{name} was {old}, is {new}"
            for name in Order.__struct_fields__
            if (old := getattr(position.order, name)) != (new := getattr(self.order, name))
        ]
        if differing:
            raise ConfigError(
                f"the data is not what the checkpoint was made with ({'; '.join(differing)}): restore it, "
                "or start anew with trainer.resume_mode=disable"
            )
        if position.epoch < 0 or not 0 <= position.index < self.order.draws_per_epoch:
            raise ConfigError(
                f"the checkpoint's data position is damaged: epoch {position.epoch}, index {position.index}"
            )
        self._seek(position.epoch, position.index)

    def _seek(self, epoch: int, index: int) -> None:
        if epoch != self._epoch:
            self._rows = self._rows_of(epoch)
        self._epoch, self._index = epoch, index

    def _rows_of(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        rows = np.arange(self.order.num_rows, dtype=np.int64)
        if self.order.shuffle:
            np.random.default_rng((self.order.seed, epoch)).shuffle(rows)
        return rows[: self.order.draws_per_epoch]
