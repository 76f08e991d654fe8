"""Lines: cut whole, filtered for the console, kept in files of bounded size."""

import logging
import sys
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.launch.logs import ConsoleView, LineCutter, LineHandler, LogFile, last_state
from psrl.launch.supervise import RestartPolicy, Restarts, reason


@given(st.lists(st.binary(max_size=20)), st.integers(1, 9))
def test_lines_do_not_depend_on_how_the_bytes_arrive(chunks: list[bytes], limit: int) -> None:
    data = b"".join(chunks)
    cutter, whole = LineCutter(limit), LineCutter(limit)
    in_pieces = [line for chunk in chunks for line in cutter.feed(chunk)] + cutter.rest()
    at_once = whole.feed(data) + whole.rest()
    assert b"".join(in_pieces) == b"".join(at_once) == data.replace(b"\n", b"")
    assert all(len(line) <= limit for line in in_pieces)


def test_short_lines_are_the_lines() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"a\n\nb") == [b"a", b""]
    assert cutter.feed(b"c\nd") == [b"bc"]
    assert cutter.rest() == [b"d"]


def test_console_shows_warnings_tracebacks_and_named_processes() -> None:
    shown: list[str] = []
    view = ConsoleView(shown.append, lambda name: name.startswith("trainer"))
    stamp = "2026-01-02 03:04:05,678"
    for line in (
        f"{stamp} INFO psrl.x: quiet", "  more of it", f"{stamp} WARNING psrl.x: loud", "  more of that",
        f"{stamp} INFO psrl.x: quiet again", "Traceback (most recent call last):", '  File "x"', "ValueError: no",
    ):  # fmt: skip
        view.line("replica-0", line)
    view.line("trainer-0", f"{stamp} INFO psrl.train: step 1")
    view.line("head", "without any stamp")
    assert shown == [
        f"[replica-0] {stamp} WARNING psrl.x: loud", "[replica-0]   more of that",
        "[replica-0] Traceback (most recent call last):", '[replica-0]   File "x"', "[replica-0] ValueError: no",
        f"[trainer-0] {stamp} INFO psrl.train: step 1",
    ]  # fmt: skip


def test_log_files_are_bounded(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "a.log", max_file_bytes=100)
    for _ in range(5):
        log.write([b"x" * 60])
    log.close()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["a.log", "a.log.1"]
    assert (tmp_path / "logs" / "a.log").stat().st_size <= 122


def test_a_full_disk_is_survived_and_counted() -> None:
    log = LogFile(Path("/dev/full"), max_file_bytes=100)
    log.write([b"a", b"b"])
    log.write([b"c"])
    assert log._dropped == 3
    log.close()


def test_restarts_back_off_and_recover() -> None:
    restarts = Restarts(RestartPolicy(max_restarts=5, backoff_s=1, max_backoff_s=3, healthy_after_s=10))
    assert [restarts.after(uptime) for uptime in (0, 0, 0, 20, 0, 0)] == [1, 2, 3, 1, 2, None]
    assert Restarts(RestartPolicy()).after(100) is None


def test_reasons_are_words() -> None:
    assert [reason(code) for code in (0, 2, -9, -60)] == [
        "ended normally", "exit status 2", "killed by signal 9 (SIGKILL)", "killed by signal 60"
    ]  # fmt: skip


def test_of_a_bar_the_last_state_counts() -> None:
    assert last_state("0%|   |\r50%|=  |\r100%|==|\r") == "100%|==|"
    assert last_state("a line") == "a line"


def test_the_launchers_log_goes_above_a_bar_that_took_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = LineHandler()
    monkeypatch.setattr(sys, "stderr", taken := StringIO())
    handler.handle(logging.LogRecord("x", logging.WARNING, "", 0, "%s again", ("once",), None))
    assert taken.getvalue() == "once again\n"
