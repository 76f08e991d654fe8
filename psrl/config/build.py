"""From the resolved tree to the frozen structs, value by value, collecting what is wrong on the way."""

from typing import Any

import msgspec

from psrl.config.aliases import find
from psrl.config.coerce import Mismatch, as_list, coerce, describe
from psrl.config.keys import fields, is_free_form, item_type, members, nearest, struct_of
from psrl.config.origin import Origins, Path, dotted
from psrl.config.schema import Config


class Note(msgspec.Struct, frozen=True):
    """What became of a key of the alias table, and where it was set."""

    key: str
    text: str
    where: str


class Unresolved(msgspec.Struct, frozen=True):
    """A value that never came: its interpolation failed (told already) or it is mandatory and not set."""

    missing: bool = False


def unknown_key(path: Path, where: str) -> str:
    """The sentence for a key that does not exist."""
    meant = nearest(path)
    return f"{dotted(path)}: unknown key ({where}){f'; did you mean {meant}?' if meant else ''}"


class Builder:
    """Builds one Config. Afterwards `problems` and `notes` are complete."""

    def __init__(self, origins: Origins, resolved: dict[str, Any]) -> None:
        self.problems: list[str] = []
        self.notes: list[Note] = []
        self._origins, self._resolved = origins, resolved
        self._faulty: set[str] = set()

    def build(self) -> Config:
        config = self._section(Config, self._resolved, ())
        assert isinstance(config, Config)
        return config

    def is_faulty(self, key: str) -> bool:
        """Is the value at, around or inside this dotted key a stand-in?"""
        return any(f"{key}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{key}.") for bad in self._faulty)

    def _wrong(self, path: Path, text: str) -> None:
        self._faulty.add(dotted(path))
        self.problems.append(f"{dotted(path)}: {text} ({self._origins.where(path)})")

    def _section(self, section: type[msgspec.Struct], value: Any, path: Path) -> msgspec.Struct:
        if not isinstance(value, dict):
            if isinstance(value, Unresolved):
                self._faulty.add(dotted(path))
            else:
                self._wrong(path, f"expected a section with keys, got {_shown(value)}")
            value = {}
        known = fields(section)
        for key, inner in value.items():
            if key not in known:
                self._foreign((*path, key), inner)
        defaults = {info.name: info for info in msgspec.structs.fields(section)}
        built = {}
        for name, annotation in known.items():
            inner_path = (*path, name)
            if name in value and not isinstance(value[name], Unresolved):
                built[name] = self._value(value[name], annotation, inner_path, defaults[name])
            elif (inner_section := struct_of(annotation)) and defaults[name].required:
                built[name] = self._section(inner_section, value.get(name, {}), inner_path)
            else:
                built[name] = self._absent(value.get(name), annotation, inner_path, defaults[name])
        return section(**built)

    def _absent(self, value: Any, annotation: Any, path: Path, info: msgspec.structs.FieldInfo) -> Any:
        if isinstance(value, Unresolved) and not value.missing:
            self._faulty.add(dotted(path))
        elif info.required:
            self._faulty.add(dotted(path))
            self.problems.append(f"{dotted(path)}: must be set, to {describe(annotation)}")
        return _stand_in(annotation, info)

    def _value(self, value: Any, annotation: Any, path: Path, info: msgspec.structs.FieldInfo | None) -> Any:
        if value is None and type(None) in members(annotation):
            return None
        section = struct_of(annotation)
        if section is not None:
            return self._section(section, value, path)
        item = item_type(annotation, list)
        if item is not None and struct_of(item):
            return self._sections(value, annotation, item, path, info)
        item = item_type(annotation, dict)
        if item is not None and not is_free_form(annotation) and isinstance(value, dict):
            return {key: self._value(inner, item, (*path, key), None) for key, inner in value.items()}
        origin = self._origins.exact(path)
        try:
            return coerce(value, annotation, origin.raw if origin else None)
        except Mismatch as mismatch:
            self._wrong(path, f"expected {mismatch}, got {_shown(value)}")
            return _stand_in(annotation, info)

    def _sections(
        self, value: Any, annotation: Any, item: Any, path: Path, info: msgspec.structs.FieldInfo | None
    ) -> Any:
        try:
            items = as_list(value, annotation)
        except Mismatch as mismatch:
            self._wrong(path, f"expected {mismatch}, got {_shown(value)}")
            return _stand_in(annotation, info)
        return [self._value(inner, item, (*path, index), None) for index, inner in enumerate(items)]

    def _foreign(self, path: Path, value: Any) -> None:
        """A key that is not in the schema: known to the alias table, or unknown."""
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                self._foreign((*path, key), inner)
            return
        alias = find(path)
        if alias is None:
            self.problems.append(unknown_key(path, self._origins.where(path)))
        elif alias.accepted(value, self._get):
            self.notes.append(Note(dotted(path), alias.note(), self._origins.where(path)))
        else:
            self.problems.append(f"{dotted(path)}={alias.refusal(value)} ({self._origins.where(path)})")

    def _get(self, key: str) -> Any:
        node: Any = self._resolved
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node


def _default(info: msgspec.structs.FieldInfo) -> Any:
    return info.default_factory() if info.default_factory is not msgspec.NODEFAULT else info.default


def _stand_in(annotation: Any, info: msgspec.structs.FieldInfo | None) -> Any:
    """The default, or for a required key something of its type; never seen outside loading."""
    if info is not None and not info.required:
        return _default(info)
    arms = members(annotation)
    return "unset" if str in arms else 1 if int in arms else 1.0 if float in arms else None


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
