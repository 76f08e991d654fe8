"""What a type checker says about the public API: each `reveal_type` in a case file is followed by what it must show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import psrl

CASES = sorted((Path(__file__).parent / "cases").glob("*.py"))


@pytest.mark.timeout(600)  # mypy without a cache
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_types(case: Path, tmp_path: Path) -> None:
    """`# R: T` expects a revealed type, `# E: text` an error that has the text; nothing else may be said."""
    expected = {
        (number, kind, text.strip())
        for number, line in enumerate(case.read_text().splitlines(), 1)
        for kind, text in re.findall(r"# ([RE]): (.*)$", line)
    }
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", "--hide-error-context"]
    command += ["--cache-dir", str(tmp_path), "--follow-imports=silent", str(case)]
    checked = subprocess.run(command, cwd=Path(psrl.__file__).parents[1], capture_output=True, text=True, timeout=540)
    assert checked.stderr == ""
    said = re.findall(r"^[^:]+:(\d+): (error|note): (.*)$", checked.stdout, re.M)
    left = set(expected)
    for number, kind, text in said:
        revealed = re.match(r'Revealed type is "(.*)"$', text)
        found = [
            want
            for want in left
            if want[0] == int(number)
            and (want[2] == revealed[1] if revealed and want[1] == "R" else kind == "error" and want[2] in text)
        ]
        assert found, f"unexpected at line {number}: {text}"
        left.difference_update(found)
    assert not left, f"missing: {sorted(left)}"
