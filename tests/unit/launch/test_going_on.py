"""Where the same command would go on after an interrupted or failed run."""

from pathlib import Path

from psrl.config import load
from psrl.launch.wiring import step_to_go_on_from
from psrl.train.checkpoint_dir import CheckpointDir, CheckpointManifest


def test_it_is_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    settings = [f"trainer.default_local_dir={tmp_path}"]
    assert step_to_go_on_from(load("quickstart", settings).config) is None
    folder = CheckpointDir(tmp_path / "checkpoints")
    for step in (5, 10):
        manifest = CheckpointManifest(
            run_id="x", sequence=step, step=step, world_size=1, num_skipped=0, tensors={}, files=()
        )
        folder.commit(folder.begin(step, 0), manifest)
    folder.begin(15, 0)
    assert step_to_go_on_from(load("quickstart", settings).config) == 10
    assert step_to_go_on_from(load("quickstart", [*settings, "trainer.resume_mode=disable"]).config) is None
