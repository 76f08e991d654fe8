"""`psrl-launch`: run a config, or a script that ends in `psrl-launch $PSRL_LAUNCH_ARGS CONFIG ...`.

Exit status: 0 the run ended well, 1 it failed, 2 it cannot start as it is set up, 130 it was interrupted.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from psrl.config.loader import Loaded, load, shipped
from psrl.errors import ConfigError, PsrlError
from psrl.launch.console import delivered, open_missing
from psrl.launch.doctor import installed
from psrl.launch.interrupt import Interrupted

if TYPE_CHECKING:  # a run needs more than a look at a config
    from psrl.launch.plan import Plan

_MADE_BY_QUICKSTART = "outputs/quickstart/"
_VALUE_FLAGS = ("--hostfile", "--ray")
_UNBUILT = {"hostfile": "--hostfile", "ray": "--ray", "slurm": "--slurm"}

OK, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    open_missing()
    arguments = list(sys.argv[1:] if argv is None else argv)
    return delivered("psrl-launch", lambda: _launch(arguments))


def _launch(arguments: list[str]) -> int:
    flags, rest = _split(arguments)
    try:
        if rest and rest[0].endswith(".sh"):
            _refuse_unbuilt(_parser().parse_args([*flags, rest[0]]))
            return _run_script(flags, rest[0], rest[1:])
        options = _parser().parse_intermixed_args(arguments)
        _refuse_unbuilt(options)
        if options.json and (options.cfg or not options.check):
            raise ConfigError("--json is a form of --check: give the two, without --cfg")
        return _run_config(options)
    except ConfigError as error:
        _complain(error.problems, getattr(error, "__notes__", ()))
        return BAD_CONFIG
    except (KeyboardInterrupt, Interrupted) as error:
        said = f"psrl-launch: {error or 'interrupted'}"
        print("\n".join((said, *getattr(error, "__notes__", ()))), file=sys.stderr)
        return INTERRUPTED
    except PsrlError as error:
        print("\n".join((f"psrl-launch: {error}", *getattr(error, "__notes__", ()))), file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="psrl-launch",
        description="Run a config with overrides in Hydra's grammar, or a script that does.",
        epilog=f"Configs that come with PSRL: {', '.join(shipped())}. Example: psrl-launch quickstart psrl.staleness=0",
    )
    parser.add_argument("config", metavar="NAME_OR_YAML | SCRIPT.sh", help="a config's name or path, or a script")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides; for a script its arguments")
    parser.add_argument("--cfg", action="store_true", help="print the resolved config with the origin of each value")
    parser.add_argument("--check", action="store_true", help="check all that can be checked without starting")
    parser.add_argument("--json", action="store_true", help="with --check: print the result as JSON, and nothing else")
    parser.add_argument("--hostfile", metavar="FILE", help="run on the hosts of a file (not built yet)")
    parser.add_argument("--ray", metavar="ADDRESS", help="run on a Ray cluster (not built yet)")
    parser.add_argument("--slurm", action="store_true", help="run in a Slurm allocation (not built yet)")
    parser.add_argument("--version", action="version", version=f"psrl {installed('psrl')}")
    return parser


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Flags before the first plain word; the word with all that follows, untouched."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        at += 2 if arguments[at] in _VALUE_FLAGS else 1
    return arguments[:at], arguments[at:]


def _refuse_unbuilt(options: argparse.Namespace) -> None:
    asked = [flag for name, flag in _UNBUILT.items() if getattr(options, name)]
    if asked:
        raise ConfigError(*(f"{flag} is not built yet: a run stays on this machine" for flag in asked))


def _run_script(flags: list[str], script: str, arguments: list[str]) -> int:
    """Become the script, with our flags for the `psrl-launch` in it. Does not return."""
    if not Path(script).is_file():
        raise ConfigError(f"script {script} does not exist")
    if spaced := [flag for flag in flags if flag != shlex.quote(flag)]:
        raise ConfigError(f"a script gets flags as words: {spaced[0]!r} holds characters that a shell would split")
    environment = dict(os.environ)
    environment["PSRL_LAUNCH_ARGS"] = " ".join(flags)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    sys.stdout.flush()
    os.execvpe("bash", ["bash", script, *arguments], environment)


def _run_config(options: argparse.Namespace) -> int:
    if options.check and not options.cfg:
        return _check(options)
    loaded = load(options.config, options.overrides)
    if options.cfg:
        sys.stdout.write(describe(loaded))
        return _check(options) if options.check else OK
    from psrl.launch.wiring import run

    return run(loaded, _plan(loaded))


def _plan(loaded: Loaded) -> "Plan":
    """What the run needs. Raises ConfigError, also for a name that the system refuses, too long, say."""
    from psrl.launch.plan import make_plan

    try:
        return make_plan(loaded.config)
    except ConfigError as error:
        model = loaded.config.train_actor_rollout_ref.model.path
        if model.startswith(_MADE_BY_QUICKSTART) and not Path(model).exists():
            error.add_note(
                f"Paths start from {Path.cwd()}; in a clone, ./scripts/quickstart makes what this config reads."
            )
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error


def describe(loaded: Loaded) -> str:
    """The resolved config as YAML; keys of the alias table that were used as comments above it."""
    from psrl.config.dump import to_yaml

    notes = [f"# {note.key}: {note.text} ({note.where})\n" for note in loaded.notes]
    return "".join([f"# {loaded.source}\n", *notes]) + to_yaml(loaded.config, loaded.origins)


def _check(options: argparse.Namespace) -> int:
    """Go through everything without starting anything; say all problems, then what became of foreign keys."""
    from psrl.config.aliases import ALIASES

    loaded, problems = None, []
    advice: list[str] = []
    try:
        loaded = load(options.config, options.overrides)
        _plan(loaded)
    except ConfigError as error:
        problems, advice = list(error.problems), getattr(error, "__notes__", [])
    notes = loaded.notes if loaded else ()
    if options.json:
        report = {
            "ok": not problems,
            "config": options.config,
            "problems": problems,
            "notes": [{"key": note.key, "becomes": note.text, "origin": note.where} for note in notes],
            "aliases": [{"key": alias.key, "fate": alias.fate, "becomes": alias.text} for alias in ALIASES],
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print("Keys of other systems (mapped to ours, implied by how PSRL works, or refused unless off):")
        for alias in ALIASES:
            print(f"  {alias.fate:8} {alias.key}: {alias.text}")
        for note in notes:
            print(f"used here: {note.key}: {note.text} ({note.where})")
        if problems:
            _complain(problems, advice)
        else:
            print(f"{options.config}: all is well")
    return BAD_CONFIG if problems else OK


def _complain(problems: Sequence[str], advice: Sequence[str]) -> None:
    head = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"psrl-launch: {head}; nothing was started", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)
    for line in advice:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
