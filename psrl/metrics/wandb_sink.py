"""Metrics to Weights & Biases, offline by itself where there is no key or no network.

The package is imported when a sink is made, and only then. Each axis is a metric of its own that its families are drawn
over, so values that come late keep their step and nothing is dropped.
"""

import logging
import netrc
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from psrl.errors import ConfigError
from psrl.metrics.logger import TRAINING, VALIDATION

logger = logging.getLogger(__name__)

_CLOUD = "https://api.wandb.ai"
_CONNECT_TIMEOUT_S = 3.0


def why_offline(environment: Mapping[str, str]) -> str | None:
    """A reason to keep the run on this machine; None when it can be sent."""
    address = urlsplit(environment.get("WANDB_BASE_URL", _CLOUD))
    host = address.hostname or ""
    if not environment.get("WANDB_API_KEY") and not _has_login(host, environment):
        return "there is no API key"
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return f"{host} cannot be reached: {error}"
    return None


def _has_login(host: str, environment: Mapping[str, str]) -> bool:
    """Whether `wandb login` left a key; only that it is there, not what it is."""
    path = Path(environment.get("NETRC", str(Path(environment.get("HOME", "~")).expanduser() / ".netrc")))
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbSink:
    """One W&B run in `directory`. WANDB_MODE, when set, is obeyed. Raises ConfigError when wandb is not installed."""

    def __init__(self, project: str, name: str, directory: Path, config: Mapping[str, Any] | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "trainer.logger names wandb, which is not installed: `pip install wandb`, or take it out of the list"
            ) from error
        mode: Any = os.environ.get("WANDB_MODE")
        if not mode:
            reason = why_offline(os.environ)
            mode = "offline" if reason else "online"
            if reason:
                logger.warning("W&B runs offline, because %s; send it later with `wandb sync`", reason)
        self._run = wandb.init(
            project=project, name=name, dir=str(directory), config=dict(config or {}), mode=mode, reinit="create_new"
        )
        self._run.define_metric("*", step_metric=f"{TRAINING}/global_step")
        for family in ("val-core/*", "val-aux/*"):
            self._run.define_metric(family, step_metric=f"{VALIDATION}/global_step")

    def write(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, f"{axis}/global_step": float(step)})

    def close(self) -> None:
        self._run.finish()
