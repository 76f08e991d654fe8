"""Offloading that only the trainer could refuse is refused before anything starts."""

import pytest

from psrl.config import load
from psrl.launch.plan import _offload_problems

_KEY = "train_actor_rollout_ref.actor.fsdp_config"


@pytest.mark.parametrize(
    ("device", "params", "num_problems"), [("cuda", False, 1), ("cuda", True, 0), ("cpu", False, 0)]
)
def test_optimizer_offload_needs_param_offload_on_a_gpu(device: str, params: bool, num_problems: int) -> None:
    config = load("quickstart", [f"{_KEY}.optimizer_offload=true", f"{_KEY}.param_offload={params}"]).config
    assert len(_offload_problems(config, device)) == num_problems
