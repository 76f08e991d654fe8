"""Hydra's grammar: agreement with the golden cases, and files that mean what the command line means."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from psrl.config.grammar import compose_untyped
from psrl.config.yamlfile import parse_yaml, plain_scalar
from psrl.errors import ConfigError

_VECTORS = os.environ.get("PSRL_VECTORS")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _disagreements(vectors: dict[str, Any]) -> list[Any]:
    found = []
    for case in vectors["cases"]:
        try:
            got: Any = {"config": _plain(compose_untyped(vectors["base_yaml"], case["overrides"]))}
        except Exception as error:
            got = {"error": type(error).__name__}
        if got != case["expect"]:
            found.append((case["overrides"], case["expect"], got))
    return found


def test_overrides_agree_with_hydras_compose() -> None:
    vectors = json.loads((Path(__file__).parents[2] / "golden/overrides.json").read_text())
    assert _disagreements(vectors) == []
    assert len(vectors["cases"]) > 50


@pytest.mark.skipif(not _VECTORS, reason="PSRL_VECTORS names no folder of golden vectors")
def test_overrides_agree_with_the_golden_vectors() -> None:
    vectors = json.loads((Path(_VECTORS or "") / "overrides.json").read_text())
    assert _disagreements(vectors) == []
    assert len(vectors["cases"]) == vectors["count"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("5e-5", 5e-5), ("1E-3", 1e-3), ("1_000", 1000), (".5", 0.5), ("-1", -1), ("1.", 1.0),
        ("0o17", "0o17"), ("017", "017"), ("12:30", "12:30"), ("0x10", "0x10"), ("yes", "yes"), ("off", "off"),
        ("None", "None"), ("NULL", None), ("~", None), ("", None), ("True", True), ("2024-01-01", "2024-01-01"),
    ],
)  # fmt: skip
def test_plain_scalars_of_files_follow_the_command_line(text: str, value: Any) -> None:
    assert parse_yaml(f"a: {text}", "f").tree == {"a": value}


@given(st.text("0123456789_.eE+-xnaifulTrs", min_size=1, max_size=6))
def test_scalar_rules_are_those_of_hydras_parser(text: str) -> None:
    try:
        expected = OverridesParser.create().parse_rule(text, "primitive")
    except Exception:
        return  # not a value there at all
    got = plain_scalar(text)
    assert type(got) is type(expected)
    assert got == expected or (got != got and expected != expected)


def test_yaml_faults_are_named_with_their_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml("a: 1\nb: !thing 2\na: 3\n", "my.yaml")
    assert caught.value.problems == (
        "my.yaml:2: b: tag !thing is not supported",
        "my.yaml:3: a is set twice in this file",
    )
    with pytest.raises(ConfigError, match=r"my.yaml:2: not valid YAML"):
        parse_yaml("a: 1\n b: [", "my.yaml")
    with pytest.raises(ConfigError, match="contains itself"):
        parse_yaml("a: &x {b: *x}", "my.yaml")


def test_anchors_and_merge_keys_work() -> None:
    text = "x: &x {p: 1, q: 2}\ny:\n  <<: *x\n  q: 3\n"
    assert parse_yaml(text, "f").tree["y"] == {"p": 1, "q": 3}
