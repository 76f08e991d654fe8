"""The `psrl` command: data and models appear whole or not at all, and refusals have no traceback."""

from pathlib import Path

import pytest

from psrl import ucx
from psrl.cli import main
from psrl.launch.doctor import report


def test_arithmetic_writes_three_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "arithmetic", "--out", str(tmp_path / "d"), "--num-train", "64"]) == 0
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["test.parquet", "train.parquet", "val.parquet"]
    assert "train.parquet: 64 rows" in capsys.readouterr().out


def test_a_tiny_model_is_made_aside_and_not_over_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m"
    assert main(["model", "tiny", "--steps", "2", "--out", str(out)]) == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    assert not (tmp_path / "m.partial").exists()
    assert main(["model", "tiny", "--steps", "2", "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_what_cannot_be_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "gsm8k", "--source", str(tmp_path / "none"), "--out", str(tmp_path)]) in (1, 2)
    assert main(["report", str(tmp_path / "none")]) in (1, 2)
    assert main(["report", __file__]) == 1
    assert main(["data", "arithmetic", "--out", "/proc/x"]) == 1
    assert main(["model", "tiny", "--steps", "0", "--out", "/proc/x"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert all(line.startswith("psrl: ") for line in shown.splitlines())


@pytest.mark.parametrize("asked", [["data", "arithmetic", "--num-train", "0"], ["model", "tiny", "--steps", "-3"]])
def test_numbers_that_mean_nothing_are_refused(asked: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*asked, "--out", str(tmp_path / "x")])
    assert not any(tmp_path.iterdir())


def test_doctor_says_what_a_run_depends_on() -> None:
    text = report()
    for word in ("python:", "torch:", "C++ core:", "UCX:", "RDMA:", "CPUs:", "memory:", "/dev/shm:", "open files:"):
        assert word in text


def test_doctor_warns_of_an_rdma_adapter_that_ucx_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "rdma_devices", lambda: ("mlx5_0",))
    monkeypatch.setattr(ucx, "load", lambda: ucx.Ucx(Path("/nowhere/libucp.so.0"), "1.22.0"))
    assert "RDMA NIC present but this UCX has no ib" in report()
    assert "RDMA:          mlx5_0" in report()
