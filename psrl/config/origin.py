"""Where a value was set: a line of a file, or an override of the command line."""

import msgspec

Path = tuple[str | int, ...]
"""A key path by parts; list indices are ints: ("data", "reward_model_dicts", 0, "reward_fn")."""


class Origin(msgspec.Struct, frozen=True):
    """`where` is for people. `raw` is the scalar's own text, for keys declared as text (`007` stays `007`)."""

    where: str
    raw: str | None = None


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


class Origins:
    """The origin of each value that was set; a later setting of a section hides those inside it."""

    def __init__(self) -> None:
        self._by_path: dict[Path, Origin] = {}

    def set(self, path: Path, origin: Origin) -> None:
        self.forget(path)
        self._by_path[path] = origin

    def add(self, path: Path, origin: Origin) -> None:
        """Set the origin of a value inside one that was set just now."""
        self._by_path[path] = origin

    def forget(self, path: Path) -> None:
        for inner in [key for key in self._by_path if key[: len(path)] == path]:
            del self._by_path[inner]

    def exact(self, path: Path) -> Origin | None:
        return self._by_path.get(path)

    def of(self, path: Path) -> Origin | None:
        """The origin of the value at `path`: its own, that of a value around it, or that of one inside it."""
        for length in range(len(path), 0, -1):
            if (origin := self._by_path.get(path[:length])) is not None:
                return origin
        inside = (origin for key, origin in self._by_path.items() if key[: len(path)] == path)
        return next(inside, None)

    def where(self, path: Path) -> str:
        """The place in words, or "not set"."""
        origin = self.of(path)
        return origin.where if origin else "not set"
