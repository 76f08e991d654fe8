"""The lives of agent loop workers: so that no work is handed to a process that has died.

A worker is known by name; a restarted one has another life. A lost worker may leave a poll behind, parked here or still
in a socket: a parked one is told by the number of losses since it began, a late one by its life.
"""


class Workers:
    """Life 0 means that the worker does not say: then only parked polls can be told."""

    def __init__(self) -> None:
        self._life: dict[str, int] = {}
        self._lost: set[tuple[str, int]] = set()
        self._num_losses: dict[str, int] = {}

    def is_lost(self, worker: str, life: int) -> bool:
        return (worker, life) in self._lost

    def replaces(self, worker: str, life: int) -> bool:
        """Whether this is another life than the one known, which therefore is gone."""
        return self._life.get(worker, life) != life

    def greet(self, worker: str, life: int) -> None:
        """This is the life that bears the name now."""
        self._life[worker] = life

    def lose(self, worker: str) -> None:
        """The process that bore this name has ended."""
        life = self._life.pop(worker, 0)
        if life:
            self._lost.add((worker, life))
        self._num_losses[worker] = self.num_losses(worker) + 1

    def num_losses(self, worker: str) -> int:
        return self._num_losses.get(worker, 0)
