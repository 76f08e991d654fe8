"""From YAML and overrides to one frozen Config, with everything that is wrong said at once.

    base.yaml  <-  files of `defaults:`  <-  the named file  <-  overrides        (untyped, Hydra's rules)
        -> interpolations resolved -> each value by its declared type -> rules between keys

Renamed keys (`aliases.MAPPED`) are renamed on the way in; other keys of the alias table stay in the tree and are judged
when everything is resolved. A value that is wrong is replaced by its default for the rest of the way, so that what else
is wrong is found too; rules that touch it are left out.
"""

import os
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path as FilePath
from typing import Any

import msgspec
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from psrl.config.aliases import find, rename
from psrl.config.build import Builder, Note, Unresolved, unknown_key
from psrl.config.grammar import apply_override, parse_override
from psrl.config.keys import is_free_form, item_type, lookup, nearest_word, struct_of
from psrl.config.origin import Origin, Origins, Path, dotted
from psrl.config.rules import contradictions
from psrl.config.schema import Config
from psrl.config.yamlfile import Document, read_yaml
from psrl.errors import ConfigError

_KEY = re.compile(r"[~+]{0,2}[A-Za-z_][\w-]*(\.[\w-]+)*", re.ASCII)
_FOLDERS = (
    ("trainer", "default_local_dir"),
    ("trainer", "resume_from_path"),
    ("train_actor_rollout_ref", "model", "path"),
)


class Loaded(msgspec.Struct, frozen=True):
    """A config that can run as far as its keys tell, and how it came about."""

    config: Config
    origins: Origins
    notes: tuple[Note, ...]  # keys of the alias table that were used, and what became of them
    source: str


def shipped() -> tuple[str, ...]:
    """Names of the configs that come with PSRL."""
    folder = files("psrl.config") / "yaml"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def load(name_or_yaml: str | FilePath, overrides: Sequence[str] = ()) -> Loaded:
    """Load a shipped config by name or a YAML file by path, with Hydra overrides on top.

    Raises ConfigError whose `problems` are all that is wrong, each naming key, origin and what was expected.
    """
    loading = _Loading()
    for document in _documents(str(name_or_yaml)):
        loading.add_file(document)
    return loading.finish(overrides, str(name_or_yaml))


def _documents(name: str, asking: tuple[FilePath, ...] = ()) -> Iterator[Document]:
    """The files that make up `name`, the lowest layer first."""
    path = _find(name, asking[-1].parent if asking else FilePath())
    if path in asking:
        raise ConfigError(f"{asking[-1]}: defaults lead back to {name}")
    if not asking:
        yield read_yaml(_shipped_path("base"), "base.yaml")
    document = read_yaml(path, path.name if path.parent == _shipped_path("base").parent else str(path))
    defaults = document.tree.pop("defaults", [])
    if not isinstance(defaults, list) or not all(isinstance(item, str) for item in defaults):
        raise ConfigError(f"{document.name}: defaults must be a list of config names, paths and _self_")
    for item in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        if item != "_self_":
            yield from _documents(item, (*asking, path))
        elif path != _shipped_path("base"):
            yield document


def _shipped_path(name: str) -> FilePath:
    return FilePath(str(files("psrl.config") / "yaml" / f"{name}.yaml"))


def _find(name: str, folder: FilePath) -> FilePath:
    if name in shipped():
        return _shipped_path(name)
    path = FilePath(name).expanduser()
    path = path if path.is_absolute() else folder / path
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise ConfigError(f"config file {path} does not exist")
        return path
    meant = nearest_word(name, shipped())
    raise ConfigError(
        f"no config named {name}{f' (did you mean {meant}?)' if meant else ''}; "
        f"there are {', '.join(shipped())}, or give the path of a .yaml file"
    )


class _Loading:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.origins = Origins()
        self.used: dict[Path, str] = {}  # mapped keys as they were typed -> where
        self._plain: dict[str, Any] = {}
        self._tree = DictConfig({})

    # -- layers

    def add_file(self, document: Document) -> None:
        typed_as: dict[Path, tuple[Path, Any]] = {}
        for path, value in _leaves(document.tree):
            origin = document.origins.get(path, Origin(document.name))
            if any("." in str(part) for part in path) and lookup(path) is not Any:
                self.problems.append(f"{dotted(path)} ({origin.where}): keys are nested in YAML, not joined by dots")
                continue
            typed, path = path, self._renamed(path, origin.where)
            if path in typed_as and typed_as[path][1] != value:
                other, _ = typed_as[path]
                self.problems.append(
                    f"{dotted(typed)} ({origin.where}) and {dotted(other)} ({self.origins.where(path)}) are two names "
                    "of one key and say different things"
                )
            typed_as[path] = (typed, value)
            section = struct_of(lookup(path)) if lookup(path) not in (None, Any) else None
            if section and value is None and not _optional(path):
                continue  # a section whose keys are all commented out
            self.origins.set(path, origin)
            for inner in _inner_paths(value):
                self.origins.add((*path, *inner), document.origins.get((*typed, *inner), origin))
            node = self._plain
            for part in path[:-1]:
                child = node.get(str(part))
                if not isinstance(child, dict):
                    child = node[str(part)] = {}
                node = child
            node[str(path[-1])] = value

    def add_override(self, text: str) -> None:
        where = f"override {text}"
        try:
            parsed = parse_override(text)
        except OverrideParseException:
            self.problems.append(f"override {text}: {_grammar_problem(text)}")
            return
        except HydraException as error:
            self.problems.append(f"override {text}: {_first_lines(error)}")
            return
        if not parsed.key_or_group:
            self.problems.append(f"override {text}: {_grammar_problem(text)}")
            return
        path, value = self._parts(parsed.key_or_group), parsed.value()
        raw = text.partition("=")[2].strip() if isinstance(value, bool | int | float) else None
        if parsed.is_delete():
            path = self._renamed(path, where)
            self._apply(OverrideType.DEL, path, value, text)
            self.origins.forget(path)
            return
        for inner, leaf in _leaves(value, path) if _holds_keys(self._renamed(path, where), value) else [(path, value)]:
            self._set(parsed.type, self._renamed(inner, where), leaf, text, raw, whole=inner == path)

    def _set(self, kind: OverrideType, path: Path, value: Any, text: str, raw: str | None, whole: bool) -> None:
        annotation = lookup(path)
        if annotation is None:
            if find(path) is None:
                self.problems.append(unknown_key(path, f"override {text}"))
                return
            kind = OverrideType.FORCE_ADD
        elif kind is OverrideType.CHANGE and annotation is not Any and not self._missing_item(path):
            kind = OverrideType.FORCE_ADD  # it exists: the schema says so
        elif kind is OverrideType.ADD and not whole:
            kind = OverrideType.FORCE_ADD  # a dict merges
        if self._apply(kind, path, value, text):
            self.origins.set(path, Origin(f"override {text}", raw))

    def _apply(self, kind: OverrideType, path: Path, value: Any, text: str) -> bool:
        try:
            apply_override(self._tree, kind, dotted(path), value)
        except (HydraException, OmegaConfBaseException) as error:
            self.problems.append(f"override {text}: {_first_lines(error)}")
            return False
        return True

    def _missing_item(self, path: Path) -> bool:
        """Does the path go through a free name or a list index that is not there?"""
        for length in range(1, len(path) + 1):
            above = lookup(path[: length - 1]) if length > 1 else Config
            listed = item_type(above, list) is not None or item_type(above, dict) is not None
            if listed and OmegaConf.select(self._tree, dotted(path[:length])) is None:
                return True
        return False

    def _parts(self, key: str) -> Path:
        """The key by parts; digits are list indices where the tree has a list."""
        path: Path = ()
        for part in key.split("."):
            holds_list = part.isdigit() and (item_type(lookup(path), list) is not None if path else False)
            path = (*path, int(part) if holds_list else part)
        return path

    def _renamed(self, path: Path, where: str) -> Path:
        if lookup(path) is not None:
            return path
        new = rename(path)
        if new != path:
            self.used[path] = where
        return new

    # -- the rest of the way

    def finish(self, overrides: Sequence[str], source: str) -> Loaded:
        try:
            self._tree = OmegaConf.create(self._plain)
        except OmegaConfBaseException as error:
            raise ConfigError(*self.problems, f"{source}: {_first_lines(error)}") from None
        OmegaConf.set_struct(self._tree, True)
        for text in overrides:
            self.add_override(text)
        with open_dict(self._tree):
            self._tree["actor_rollout_ref"] = "${train_actor_rollout_ref}"  # for interpolations to the old root
        resolved = self._resolve(self._tree, ())
        resolved.pop("actor_rollout_ref", None)
        _expand_homes(resolved)
        builder = Builder(self.origins, resolved)
        config = builder.build()
        self.problems += builder.problems
        for found in contradictions(config):
            if not any(builder.is_faulty(key) for key in found.keys):
                places = dict.fromkeys(self.origins.where(self._parts(key)) for key in found.keys)
                self.problems.append(f"{found.text} ({'; '.join(places)})")
        if self.problems:
            raise ConfigError(*dict.fromkeys(self.problems))
        mapped = tuple(Note(dotted(path), f"mapped to {dotted(rename(path))}", at) for path, at in self.used.items())
        return Loaded(config, self.origins, (*mapped, *builder.notes), source)

    def _resolve(self, node: Any, path: Path) -> Any:
        """Plain containers; what cannot be resolved becomes Unresolved and a problem."""
        if len(path) > 32:
            self.problems.append(f"{dotted(path[:4])}...: an interpolation contains itself")
            return Unresolved()
        if isinstance(node, DictConfig):
            return {str(key): self._item(node, key, (*path, str(key))) for key in node}
        if isinstance(node, ListConfig):
            return [self._item(node, index, (*path, index)) for index in range(len(node))]
        return node

    def _item(self, node: Any, key: Any, path: Path) -> Any:
        if OmegaConf.is_missing(node, key):
            return Unresolved(missing=True)
        try:
            return self._resolve(node[key], path)
        except (OmegaConfBaseException, RecursionError) as error:
            reason = "it refers to itself" if isinstance(error, RecursionError) else _first_lines(error, 1)
            self.problems.append(f"{dotted(path)}: cannot be resolved: {reason} ({self.origins.where(path)})")
            return Unresolved()


def _grammar_problem(text: str) -> str:
    """What to change in an override that Hydra's grammar does not take; its parser speaks of its own tokens."""
    key, equals, value = text.partition("=")
    if not equals and not key.startswith("~"):
        return "an override is KEY=VALUE"
    if not _KEY.fullmatch(key):
        return "that is no key: keys are words of letters, digits, _ and -, joined by dots"
    quoted = f": {key}=\"'{value}'\"" if value.isprintable() and not set(value) & set("'\"\\$`!") else ""
    return f"the value cannot be read; a text with other than plain characters needs quotes that reach PSRL{quoted}"


def _expand_homes(tree: dict[str, Any]) -> None:
    """`~` in the folders that a run reads and writes; names of files are expanded where they are read."""
    for *sections, name in _FOLDERS:
        node: Any = tree
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(folder := node.get(name), str) and folder.startswith("~"):
            node[name] = os.path.expanduser(folder)


def _holds_keys(path: Path, value: Any) -> bool:
    """Is this dict value a section whose keys are to be set one by one?"""
    annotation = lookup(path)
    return (
        bool(value)
        and isinstance(value, dict)
        and (
            annotation in (None, Any)
            or is_free_form(annotation)
            or struct_of(annotation) is not None
            or item_type(annotation, dict) is not None
        )
    )


def _optional(path: Path) -> bool:
    return "None" in str(lookup(path))


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Scalars, lists and empty dicts with their paths."""
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path, value


def _inner_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _inner_paths(inner, (*path, key))


def _first_lines(error: BaseException, count: int = 2) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "hydra.cc" not in line]
    return " ".join(lines[:count])
