"""Writes overrides.json: what hydra.compose itself makes of overrides on one small file.

    python tests/golden/make_overrides.py

Independent of psrl: only hydra-core and omegaconf are used.
"""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import hydra
from hydra.version import __version__
from omegaconf import OmegaConf

BASE = """\
lr: 1e-6
name: run
limit: null
model: {path: m, extra: {}}
sizes: [4, 5]
sources: [{kind: rule, weight: 1.0}]
copy: ${lr}
dir: out/${name}
"""

OVERRIDES = [
    ["lr=3e-4"], ["lr=2", "lr=3"], ["name=a-b_c.d"], ["name=''"], ["name="], ['name="x, y"'], ["name=x,y"],
    ["name=x=y"],
    ["limit=1_000"], ["limit=017"], ["limit=1e3"], ["limit=-.5"], ["limit=-inf"], ["limit=nan"], ["limit=FALSE"],
    ["limit=on"], ["limit=Null"], ["limit=~"], ["+limit=3"], ["+name=x"], ["++name=x"], ["nam=x"], ["+nam=x"],
    ["model.path=/a/b:c"], ["model.extra.rope=2"], ["+model.extra.rope=2"], ["+model.extra={rope: {factor: 2}}"],
    ["model={path: n}"], ["model={pth: n}"], ["~model.extra"], ["~limit"], ["~name=run"], ["~name=other"], ["~nothing"],
    ["sizes=[]"], ["sizes.1=7"], ["sizes.2=7"], ["sizes=[1,[2,{a: b}]]"], ["sources.0.weight=.5"],
    ["sources.0.new=1"], ["+sources.0.new=1"], ["sources.1.kind=x"], ["copy=${name}"], ["copy=${oc.select:no,9}"],
    ["copy=${no.where}"], ["copy=\\${lr}"], ["dir='${name}/${lr}'"], ["name=[a"], ["name={a"], ["name='it\\'s'"],
    ["model.extra=${model.path}"], ["name=été"], ["name='été'"], ["name=a b  c"], ["name=$x@y|z?*%+"],
]  # fmt: skip


def plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


def main() -> None:
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "base.yaml").write_text(BASE)
        with hydra.initialize_config_dir(folder, version_base="1.3"):
            for overrides in OVERRIDES:
                try:
                    composed = hydra.compose("base", overrides=overrides)
                    expect = {"config": plain(OmegaConf.to_container(composed, resolve=True))}
                except Exception as error:
                    expect = {"error": type(error).__name__}
                cases.append({"overrides": overrides, "expect": expect})
    document = {"source": f"hydra-core {__version__}: hydra.compose", "base_yaml": BASE, "cases": cases}
    Path(__file__).with_name("overrides.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
