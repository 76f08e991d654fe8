"""Which rows each task has consumed, and what it may draw next. Pure: values in, values out.

A task is a name; tasks of one row share nothing. A draw has an id, so that whoever asks again after a lost answer, or
shares the draw with others, gets the same rows. It is remembered until its last row is cleared.

The rows that are ready for a task with certain fields are kept as a set that follows each change, so neither a put nor
a question looks at all rows.
"""

from collections.abc import Iterable, Sequence

import msgspec

from psrl.errors import UnknownKey
from psrl.transfer.index import Index
from psrl.transfer.messages import RecordRef
from psrl.transfer.samplers import Candidate, Sampler

OWN = "own "
"""How ids of draws begin that nobody shares."""
NUM_OVER = 10_000

DrawKey = tuple[str, str, str]
"""partition, task, id"""


class Draw(msgspec.Struct, frozen=True, tag=True):
    """What a task drew. Also the text of the note that outlives the controller."""

    partition: str
    task: str
    id: str
    sampled: list[str]
    consumed: list[str]

    @property
    def key(self) -> DrawKey:
        return (self.partition, self.task, self.id)


class _Known(msgspec.Struct):
    draw: Draw
    note: RecordRef | None  # where it is written down
    num_left: int  # rows that are not cleared
    gone: dict[str, None] = {}  # those that are


class Changed(msgspec.Struct):
    """What a change means for notes: these are of no use any more, and these draws are to be noted anew, before."""

    notes: list[RecordRef] = []
    draws: list[Draw] = []


class Tasks:
    """The tasks of all partitions, over `index`, which the caller changes and says so."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._consumed: dict[str, dict[str, dict[str, None]]] = {}  # partition -> task -> keys
        self._ready: dict[str, dict[tuple[str, frozenset[str]], dict[str, None]]] = {}  # by partition
        self._draws: dict[DrawKey, _Known] = {}
        self._of_row: dict[tuple[str, str], dict[DrawKey, None]] = {}
        self._gone: dict[tuple[str, str], dict[DrawKey, None]] = {}  # cleared row -> draws that have others left
        self._over: dict[DrawKey, None] = {}  # shared draws whose rows are all cleared

    def row_put(self, partition: str, key: str) -> Changed:
        """The row has come, or has more fields than before."""
        changed = Changed()
        if self._gone:
            # A row that was drawn and cleared comes anew: the draw was of another row.
            for drawn in list(self._gone.get((partition, key), ())):
                self._shrink(drawn, changed)
        ready = self._ready.get(partition)
        if ready:
            fields = self._index.rows(partition)[key].fields
            for (task, needed), keys in ready.items():
                if needed <= fields and key not in self._consumed.get(partition, {}).get(task, ()):
                    keys[key] = None
        return changed

    def rows_cleared(self, partition: str, keys: Iterable[str]) -> list[RecordRef]:
        """The rows are gone. Returns the notes that nobody needs any more."""
        notes = []
        tasks, views = self._consumed.get(partition, {}).values(), self._ready.get(partition, {}).values()
        for key in keys:
            for group in (*tasks, *views):
                group.pop(key, None)
            for drawn in self._of_row.pop((partition, key), ()):
                known = self._draws[drawn]
                known.num_left -= 1
                known.gone[key] = None
                self._gone.setdefault((partition, key), {})[drawn] = None
                if known.num_left == 0:
                    self._drop(drawn)
                    self._end(known.draw)
                    if known.note is not None:
                        notes.append(known.note)
        if partition not in self._index.partitions():
            self._consumed.pop(partition, None)
            self._ready.pop(partition, None)
        return notes

    def partition_cleared(self, partition: str) -> None:
        """It may begin anew, with the same names of shared draws."""
        self._over = {over: None for over in self._over if over[0] != partition}

    def num_ready(self, partition: str, task: str, fields: frozenset[str]) -> int:
        return len(self._view(partition, task, fields))

    def draw(
        self, partition: str, task: str, fields: frozenset[str], batch_size: int, sampler: Sampler, id: str
    ) -> Draw | None:
        """What the draw `id` (or the one that the sampler names) took, now or before; None: not yet possible.

        Raises UnknownKey for a shared draw whose rows are cleared, and what the sampler raises.
        """
        key = (partition, task, sampler.draw_id or id)
        known = self._draws.get(key)
        if known is not None:
            return known.draw
        if key in self._over:
            raise UnknownKey(f"{key[2]} of task {task!r} in partition {partition!r} was drawn, and is cleared since")
        view = self._view(partition, task, fields)
        if len(view) < batch_size:
            return None
        rows = self._index.rows(partition)
        ready = [Candidate(name, rows[name].index, rows[name].tag) for name in view]
        ready.sort(key=lambda row: row.index)
        sampled, consumed = sampler.sample(ready, batch_size)
        if not sampled:
            return None
        strange = [name for name in (*sampled, *consumed) if name not in view]
        if strange:
            raise UnknownKey(f"{sampler!r} drew {strange[:5]}, which is not among what is ready")
        draw = Draw(partition, task, key[2], list(sampled), list(consumed))
        self.restore(draw, None)
        return draw

    def restore(self, draw: Draw, note: RecordRef | None) -> bool:
        """The draw was made, now or before a restart. False: none of its rows is there."""
        rows = self._index.rows(draw.partition)
        consumed = self._consumed.setdefault(draw.partition, {}).setdefault(draw.task, {})
        present = [name for name in dict.fromkeys((*draw.sampled, *draw.consumed)) if name in rows]
        consumed.update(dict.fromkeys(name for name in draw.consumed if name in rows))
        for (task, _), keys in self._ready.get(draw.partition, {}).items():
            if task == draw.task:
                for name in draw.consumed:
                    keys.pop(name, None)
        for name in present:
            self._of_row.setdefault((draw.partition, name), {})[draw.key] = None
        if present:
            self._draws[draw.key] = _Known(draw, note, len(present), {})
        return bool(present)

    def is_noted(self, key: DrawKey) -> bool:
        """Is the draw written down, or forgotten?"""
        known = self._draws.get(key)
        return known is None or known.note is not None

    def noted(self, key: DrawKey, note: RecordRef) -> bool:
        """The draw is written down. False: it was forgotten meanwhile, the note is not needed."""
        known = self._draws.get(key)
        if known is None:
            return False
        known.note = note
        return True

    def reset(self, partition: str, task: str | None, keys: Sequence[str] | None) -> tuple[int, Changed]:
        """Offer consumed rows again: of one task or all, those keys or all. Returns how many."""
        number, changed = 0, Changed()
        for name, consumed in self._consumed.get(partition, {}).items():
            if task is not None and name != task:
                continue
            again = [key for key in (list(consumed) if keys is None else keys) if key in consumed]
            for key in again:
                del consumed[key]
            number += len(again)
            draws = {
                drawn: None for key in again for drawn in self._of_row.get((partition, key), ()) if drawn[1] == name
            }
            for drawn in draws:
                self._shrink(drawn, changed)
            for key in again:
                self.row_put(partition, key)
        if keys is None:
            self._over = {
                over: None for over in self._over if over[0] != partition or (task is not None and over[1] != task)
            }
        return number, changed

    def undo(self, key: DrawKey) -> list[RecordRef]:
        """The asker never took it: as if it had not been drawn. Returns the notes of no use any more."""
        known = self._draws.get(key)
        return [] if known is None else self.reset(key[0], key[1], known.draw.consumed)[1].notes

    def consumed(self, partition: str, task: str) -> dict[str, bool]:
        """Of every row, whether the task has consumed it."""
        keys = self._consumed.get(partition, {}).get(task, {})
        return {key: key in keys for key in self._index.rows(partition)}

    def unconsumed(self, partition: str, task: str) -> list[str]:
        """Rows that the task has not consumed, ready or not."""
        return [key for key, done in self.consumed(partition, task).items() if not done]

    def _end(self, draw: Draw) -> None:
        """Remember of a shared draw that it is over: who comes late must not get other rows instead."""
        if not draw.id.startswith(OWN):
            self._over[draw.key] = None
            if len(self._over) > NUM_OVER:
                self._over.pop(next(iter(self._over)))

    def _view(self, partition: str, task: str, fields: frozenset[str]) -> dict[str, None]:
        views = self._ready.setdefault(partition, {})
        view = views.get((task, fields))
        if view is None:
            done = self._consumed.get(partition, {}).get(task, {})
            rows = self._index.rows(partition)
            view = {key: None for key, row in rows.items() if fields <= row.fields and key not in done}
            views[task, fields] = view
        return view

    def _shrink(self, drawn: DrawKey, changed: Changed) -> None:
        """Make the draw one of the rows that it still has and that still count as consumed."""
        known = self._drop(drawn)
        if known.note is not None:
            changed.notes.append(known.note)
        draw = known.draw
        consumed = self._consumed.get(draw.partition, {}).get(draw.task, {})
        left = [key for key in draw.consumed if key in consumed and key not in known.gone]
        if left:
            rest = msgspec.structs.replace(draw, sampled=left, consumed=left)
            self.restore(rest, None)
            changed.draws.append(rest)

    def _drop(self, drawn: DrawKey) -> _Known:
        known = self._draws.pop(drawn)
        for key in (*known.draw.sampled, *known.draw.consumed):
            for of_row in (self._of_row, self._gone):
                draws = of_row.get((drawn[0], key), {})
                draws.pop(drawn, None)
                if not draws:
                    of_row.pop((drawn[0], key), None)
        return known
