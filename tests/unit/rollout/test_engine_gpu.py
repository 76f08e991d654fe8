"""The torch engine on a CUDA device: log-probs as in transformers, true versions, bfloat16 within its rounding, weights
through staging.
"""

from typing import Any

import numpy as np
import pytest
import torch

from psrl._core import Segment, WeightStore
from psrl.rollout.engine.base import Running
from psrl.rollout.engine.torch_engine import TorchEngine, TorchEngineSettings
from psrl.weights.publish import WeightPublisher, describe
from psrl.weights.stage import Device, HostRegistration
from psrl.weights.subscribe import WeightSubscriber

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.2)])
def test_log_probs_equal_a_full_forward_pass(
    architecture: str,
    dtype: torch.dtype,
    tolerance: float,
    build_model: Any,
    run: Any,
    request_of: Any,
    reference_log_probs: Any,
) -> None:
    model = build_model(architecture)
    engine = TorchEngine(
        build_model(architecture).to("cuda", dtype), TorchEngineSettings(max_model_len=128, max_num_seqs=12)
    )
    prompts = [[(i * 7 + k) % 115 for k in range(3 + i)] for i in range(24)]
    answers = run(
        engine,
        *(
            request_of(str(i), prompt, max_new_tokens=12, seed=i, temperature=0.7 if i % 2 else 0.0, top_p=1.0)
            for i, prompt in enumerate(prompts)
        ),
    )
    gaps = []
    for i, prompt in enumerate(prompts):
        answer = answers[str(i)]
        expected = reference_log_probs(model, prompt + answer.tokens, len(prompt), 0.7 if i % 2 else 1.0)
        gaps += np.abs(np.array(answer.log_probs) - expected).tolist()
    assert len(gaps) == 24 * 12
    assert max(gaps) < tolerance
    assert np.mean(gaps) < tolerance / 10


def test_recorded_versions_are_true(
    build_model: Any, marked_weights: Any, pulled: Any, request_of: Any, new_answers: Any
) -> None:
    engine = TorchEngine(
        build_model("llama").to("cuda", torch.bfloat16), TorchEngineSettings(max_model_len=128, max_num_seqs=8)
    )
    answers = new_answers()
    engine.update(pulled(1, marked_weights(1)), Running.RECOMPUTE)
    for i in range(20):
        engine.submit(request_of(str(i), [5] * (3 + i), max_new_tokens=6 + i % 5, seed=i, top_k=5))
    version, steps = 1, 0
    while engine.has_work():
        engine.step()
        steps += 1
        if steps % 3 == 0:
            version += 1
            engine.update(pulled(version, marked_weights(version)), list(Running)[version % 2])
    answers.take(engine.drain())
    for i in range(20):
        assert answers[str(i)].versions == answers[str(i)].tokens
        assert len(answers[str(i)].tokens) == 6 + i % 5


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_weights_come_through_staging_bit_for_bit(
    architecture: str, build_model: Any, run: Any, request_of: Any
) -> None:
    model = build_model(architecture).to("cuda", torch.bfloat16)
    engine = TorchEngine(model, TorchEngineSettings(max_model_len=128, max_num_seqs=8))
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    manifest = describe(model.named_parameters())
    segment = Segment.create("weights", WeightStore.required_bytes(manifest.total_bytes))
    store = WeightStore.format(segment, manifest.total_bytes)
    publisher = WeightPublisher(store, manifest)
    device = Device("cuda:0")
    registration = HostRegistration(device, segment, pause_s=0)
    subscriber = WeightSubscriber(store, manifest, "r0", device)
    for version in range(1, 5):
        new = build_model(architecture, seed=version).bfloat16()
        store.commit(0, version, publisher.write(0, version, new.named_parameters()))
        engine.submit(request_of(str(version), [1, 2, 3], max_new_tokens=40))
        engine.step()
        with subscriber.pull(version, 30.0) as pulled:
            assert engine.update(pulled, Running.RECOMPUTE) == manifest.payload_bytes
        assert engine.load().full_load == ""
        mine = dict(model.named_parameters())
        assert all(torch.equal(mine[name].cpu(), part) for name, part in new.named_parameters())
        answer = run(engine)[str(version)]
        assert set(answer.versions) == {version - 1, version}
    assert places == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    registration.close()
