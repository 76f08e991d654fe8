import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import psrl
from psrl.errors import ConfigError
from psrl.metrics import ConsoleSink, MetricLogger
from psrl.metrics.wandb_sink import WandbSink, why_offline

STEP = {
    "critic/score/mean": 0.5,
    "response_length/mean": 12.25,
    "staleness/mean": 1.5,
    "timing_s/step": 2.0,
    "perf/throughput": 4321.0,
}


def test_console_without_a_terminal_prints_whole_lines():
    stream = io.StringIO()
    with MetricLogger([ConsoleSink(60, stream=stream)]) as metrics:
        metrics.log(1, STEP)
        metrics.log(1, {"val-core/words/acc/mean@1": 0.25, "val-core/words/acc/best@1/mean": 0.5})
        metrics.log(2, {"timing_s/step": 4.0})
    assert stream.getvalue().splitlines() == [
        "step 1/60: score 0.500, length 12.2, staleness 1.50, 2.00 s, 4,321 tokens/s, 1:58 left",
        "validation at step 1: words/acc/mean@1 0.250",
        "step 2/60: 4.00 s, 2:54 left",
    ]


def test_console_on_an_ascii_stream_never_fails():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleSink(3, stream=stream).say("Grüße")
    stream.flush()
    assert raw.getvalue() == b"Gr??e\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "plain"),
    [
        ({"TERM": "xterm", "LANG": "C.UTF-8"}, False),
        ({"TERM": "xterm", "LANG": "C"}, True),
        ({"TERM": "xterm", "LANG": "C.UTF-8", "LC_ALL": "POSIX"}, True),
        ({"TERM": "dumb", "LANG": "C.UTF-8"}, True),
        ({"TERM": "xterm"}, True),
    ],
)
def test_bar_only_where_the_terminal_can_draw_it(monkeypatch, environment: dict, plain: bool):
    for name in ("TERM", "LANG", "LC_ALL", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    sink = ConsoleSink(4, first_step=1, stream=stream)
    sink.write("training", 2, STEP)
    sink.say("a line of its own [bold]")
    sink.close()
    assert ("2/4" in stream.getvalue()) or plain
    assert ("\x1b[" in stream.getvalue()) != plain
    assert "a line of its own [bold]" in stream.getvalue()


def test_wandb_stays_offline_without_a_key(tmp_path: Path):
    assert why_offline({"HOME": str(tmp_path)}) == "there is no API key"


def test_wandb_stays_offline_without_network():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # not listening
        reason = why_offline({"WANDB_API_KEY": "x", "WANDB_BASE_URL": f"http://127.0.0.1:{unused.getsockname()[1]}"})
    assert reason is not None
    assert "127.0.0.1 cannot be reached" in reason


def test_wandb_goes_online_with_key_and_network(tmp_path: Path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert why_offline({"WANDB_API_KEY": "x", "WANDB_BASE_URL": url}) is None
        (tmp_path / ".netrc").write_text("machine 127.0.0.1\n  login user\n  password x\n")
        (tmp_path / ".netrc").chmod(0o600)
        assert why_offline({"HOME": str(tmp_path), "WANDB_BASE_URL": url}) is None


def test_wandb_that_is_not_installed_is_a_config_error(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"trainer\.logger names wandb"):
        WandbSink("psrl", "test", tmp_path)


def test_wandb_keeps_an_offline_run(tmp_path: Path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    script = (
        "import sys; from pathlib import Path; from psrl.metrics import MetricLogger, WandbSink\n"
        "with MetricLogger([WandbSink('psrl', 'test', Path(sys.argv[1]), {'seed': 0})]) as metrics:\n"
        "    metrics.log(12, {'actor/lr': 1.0})\n"
        "    metrics.log(10, {'val-core/words/acc/mean@1': 0.5})\n"
    )
    unset = {"WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=True, timeout=90)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (record,) = run.glob("run-*.wandb")
    assert b"val-core/words/acc/mean@1" in record.read_bytes()


def test_metrics_import_neither_wandb_nor_matplotlib():
    script = (
        "import sys, psrl.metrics, psrl.metrics.report\n"
        "print(sorted({'wandb', 'matplotlib', 'rich', 'torch'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(psrl.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"
