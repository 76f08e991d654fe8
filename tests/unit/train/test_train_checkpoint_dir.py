"""The folder of checkpoints: what is complete, what is newest, what may go."""

from pathlib import Path

import pytest

from psrl.errors import CheckpointError, ConfigError
from psrl.train.checkpoint_dir import (
    CONTROL,
    Checkpoint,
    CheckpointDir,
    CheckpointManifest,
    file_entry,
    resume_point,
)


def write(root: Path, step: int, run_id: str = "run") -> Path:
    """A checkpoint with one file."""
    folder = CheckpointDir(root)
    aside = folder.begin(step, 100)
    (aside / CONTROL).write_bytes(b"control %d" % step)
    manifest = CheckpointManifest(
        run_id=run_id,
        sequence=folder.next_sequence(),
        step=step,
        world_size=1,
        num_skipped=0,
        tensors={},
        files=(file_entry(aside, CONTROL),),
    )
    return folder.commit(aside, manifest)


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in root.glob("global_step_*"))


def test_the_newest_is_the_last_written(tmp_path) -> None:
    assert CheckpointDir(tmp_path).newest() is None
    for step in (5000, 900, 1000):  # the first is another run's
        write(tmp_path, step)
    newest = CheckpointDir(tmp_path).newest()
    assert newest is not None
    assert newest.step == 1000
    assert newest.control_state() == b"control 1000"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1000\n"


def test_a_torn_one_is_passed_by_named_and_marked(tmp_path, caplog) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    (tmp_path / "global_step_4" / CONTROL).unlink()
    (tmp_path / "global_step_3" / CONTROL).write_bytes(b"controL 3")  # same size
    CheckpointDir(tmp_path).begin(5, 0)  # killed in the middle
    newest = CheckpointDir(tmp_path).newest()
    assert newest is not None
    assert newest.step == 2
    for name, reason in (("global_step_3", "its checksum differs"), ("global_step_4", "should have 9 bytes")):
        assert any(f"checkpoint {name} is passed over" in line and reason in line for line in caplog.messages)
    assert "checksum" in (tmp_path / "global_step_3" / "TORN").read_text()
    assert CONTROL in (tmp_path / "global_step_4" / "TORN").read_text()
    write(tmp_path, 4)  # replaceable
    newest = CheckpointDir(tmp_path).newest()
    assert newest is not None
    assert newest.step == 4
    assert not list(tmp_path.glob(".tmp*"))


def test_a_run_does_not_start_from_nothing_beside_checkpoints_that_are_all_bad(tmp_path, caplog) -> None:
    for step in (1, 2):
        (write(tmp_path, step) / CONTROL).write_bytes(b"controL %d" % step)  # same size
    (write(tmp_path, 3) / CONTROL).unlink()
    with pytest.raises(ConfigError) as refused:
        resume_point(tmp_path, "auto", None)
    for text in ("global_step_1/", "global_step_2/", "global_step_3/", "differs", "trainer.resume_mode=disable"):
        assert text in str(refused.value)
    assert "passed over" not in caplog.text
    assert resume_point(tmp_path, "disable", None) is None


def test_a_commit_killed_between_its_renames_loses_nothing(tmp_path) -> None:
    write(tmp_path, 7).rename(tmp_path / ".tmp-replaced-global_step_7")
    newest = CheckpointDir(tmp_path).newest()
    assert newest is not None
    assert newest.step == 7


def test_retention_keeps_the_last_written_and_leaves_others_alone(tmp_path) -> None:
    write(tmp_path, 5000, "another run")
    (tmp_path / "notes").mkdir()
    for step in (900, 1000):
        write(tmp_path, step)
    newest = write(tmp_path, 1100)
    gone = CheckpointDir(tmp_path).retain(2, newest, "run")
    assert [path.name for path in gone] == ["global_step_900"]
    assert steps(tmp_path) == [1000, 1100, 5000]
    behind = write(tmp_path, 950)  # after a resume that went back
    CheckpointDir(tmp_path).retain(1, behind, "run")
    assert steps(tmp_path) == [950, 5000]
    assert (tmp_path / "notes").is_dir()


def test_too_little_room_is_said_before_anything_is_written(tmp_path) -> None:
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"step 2 needs .* MiB free"):
        CheckpointDir(tmp_path).begin(2, 1 << 60)
    assert steps(tmp_path) == [1]


def test_where_to_start_from(tmp_path) -> None:
    root = tmp_path / "checkpoints"
    assert resume_point(root, "auto", None) is None
    path = write(root, 3)
    found = resume_point(root, "auto", None)
    assert found is not None
    assert found.path == path
    assert resume_point(root, "disable", None) is None
    assert isinstance(resume_point(tmp_path, "resume_path", str(path)), Checkpoint)
    for mode, given, reason in (
        ("sometimes", None, "is not one of"),
        ("resume_path", None, "needs trainer"),
        ("resume_path", str(tmp_path), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason):
            resume_point(root, mode, given)
