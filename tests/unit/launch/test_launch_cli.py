"""psrl-launch from the outside: exit statuses, messages on stderr, no traceback, scripts that get their flags."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import psrl
from psrl.config import load
from psrl.launch.cli import main

ROOT = Path(psrl.__file__).parents[1]


def launch(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "psrl.launch.cli", *arguments],
        capture_output=True, text=True, timeout=110, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_cfg_prints_what_loads_to_the_same(tmp_path: Path) -> None:
    done = launch("--cfg", "quickstart", "psrl.staleness=1", "psrl.ps_mode=cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  # override psrl.staleness=1" in done.stdout
    assert "# psrl.ps_mode: implied: weights go through shared memory" in done.stdout
    (file := tmp_path / "again.yaml").write_text(done.stdout)
    assert load(file).config == load("quickstart", ["psrl.staleness=1"]).config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstart", "psrl.staleness_=2"], ["unknown key", "did you mean psrl.staleness?"]),
        (["quickstart", "psrl.rollout_n=1", "trainer.save_freq=0"], ["2 problems", "psrl.rollout_n=1", "save_freq=0"]),
        (["nothing"], ["no config named nothing", "quickstart"]),
        (["nothing.sh"], ["script nothing.sh does not exist"]),
        (["--ray", "auto", "quickstart"], ["--ray is not built yet"]),
        (["--json", "quickstart"], ["--json is a form of --check"]),
        (["--check", "quickstart", f"trainer.default_local_dir={'a' * 300}"], ["default_local_dir", "name too long"]),
        (["--hostfile", "hosts", "x.sh"], ["--hostfile is not built yet"]),
        (["--no-such-flag", "quickstart"], ["unrecognized arguments"]),
        ([], ["usage"]),
    ],
)
def test_bad_input_ends_with_status_2_and_no_traceback(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as ended:  # argparse
        status = int(str(ended.code))
    error = capsys.readouterr().err
    assert status == 2
    assert "Traceback" not in error
    assert all(word in error for word in words)


def test_check_as_json_has_all_problems(tmp_path: Path) -> None:
    done = launch("--check", "--json", "quickstart", "psrl.staleness_=2", "trainer.save_freq=0", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 2
    assert not report["ok"]
    assert len(report["problems"]) == 2
    assert {"key": "critic.**", "fate": "refused", "becomes": "the critic"} in report["aliases"]


def test_cfg_and_check_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--cfg", "--check", "quickstart"])
    shown = capsys.readouterr().out
    assert "rollout_n: " in shown
    assert "Keys of other systems" in shown


def test_check_says_what_becomes_of_foreign_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "actor_rollout_ref.actor.use_kl_loss=True", "--check"]) == 2
    shown = capsys.readouterr()
    assert "mapped   actor_rollout_ref.**: train_actor_rollout_ref.**" in shown.out
    assert "use_kl_loss=true is refused: the KL loss is not built yet" in shown.err


def test_from_elsewhere_it_says_what_makes_the_files(tmp_path: Path) -> None:
    done = launch("--check", "quickstart", cwd=tmp_path)
    assert done.returncode == 2
    assert f"Paths start from {tmp_path}; in a clone, ./scripts/quickstart makes" in done.stderr


def test_scripts_get_the_flags_and_their_own_arguments(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('set -u\necho "flags: $PSRL_LAUNCH_ARGS | args: $*"\nexit 7\n')
    done = launch("--check", "--json", str(script), "3", "--own-flag", "psrl.rollout_n=2")
    assert done.stdout == "flags: --check --json | args: 3 --own-flag psrl.rollout_n=2\n"
    assert done.returncode == 7


def test_a_script_can_end_in_psrl_launch(tmp_path: Path) -> None:
    (bin_dir := tmp_path / "bin").mkdir()
    (command := bin_dir / "psrl-launch").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m psrl.launch.cli "$@"\n')
    command.chmod(0o755)
    script = tmp_path / "run.sh"
    script.write_text(
        'set -euo pipefail\nstaleness=${1:-3}\nshift || true\n'
        f'export PATH={bin_dir}:$PATH\n'
        'psrl-launch $PSRL_LAUNCH_ARGS quickstart psrl.staleness=$staleness "$@"\n'
    )  # fmt: skip
    done = launch("--cfg", str(script), "1", "trainer.logger=[console,wandb]")
    assert done.returncode == 0, done.stderr
    assert "staleness: 1 " in done.stdout
    assert "logger: [console, wandb]" in done.stdout
