import math
import random
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from psrl.errors import EngineError, Revoked
from psrl.rollout.engine.base import EngineDelta, EngineLoad, Running
from psrl.rollout.engine.thread import MAX_FAILED_STEPS, EngineThread
from psrl.rollout.engine.torch_engine import TorchEngine, TorchEngineSettings
from psrl.types import FinishReason

LIMIT_S = 90.0


class Collector:
    """The sink of an engine: answers so far, and a way to wait for ends."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self._changed = threading.Condition()

    def __call__(self, deltas: list[EngineDelta]) -> None:
        with self._changed:
            self.answers.take(deltas)
            self._changed.notify_all()

    def wait_ended(self, count: int) -> Any:
        def ended() -> bool:
            return sum(bool(answer.reasons) for answer in self.answers.values()) >= count

        with self._changed:
            assert self._changed.wait_for(ended, LIMIT_S)
            return self.answers

    def wait_tokens(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(a.tokens for a in self.answers.values()), LIMIT_S)


@pytest.fixture
def start(build_model: Any, new_answers: Any) -> Any:
    threads: list[EngineThread] = []

    def make(engine: Any = None) -> tuple[EngineThread, Collector]:
        if engine is None:
            engine = TorchEngine(build_model("llama"), TorchEngineSettings(max_model_len=256, max_num_seqs=16))
        sink = Collector(new_answers())
        thread = EngineThread(engine, sink)
        threads.append(thread)
        thread.start()
        return thread, sink

    yield make
    for thread in threads:
        thread.close(LIMIT_S)


def test_aborts_around_a_pause_give_one_end_each(start: Any, request_of: Any) -> None:
    thread, sink = start()
    rng = random.Random(0)
    for round_ in range(50):
        names = [f"{round_}.{i}" for i in range(20)]
        for i, name in enumerate(names):
            thread.submit(request_of(name, [1, 2, i], max_new_tokens=8 + i, seed=i))
        doomed = rng.sample(names, 10)
        actions = [lambda d=doomed[:3]: thread.abort(d), thread.pause, lambda d=doomed[3:7]: thread.abort(d)]
        if round_ % 3 == 0:
            rng.shuffle(actions)
        for act in actions:
            act()
        assert thread.pause().result(LIMIT_S).failure == ""
        thread.abort(doomed[7:])
        thread.resume().result(LIMIT_S)
    answers = sink.wait_ended(50 * 20)
    assert len(answers) == 1000
    for answer in answers.values():
        assert answer.reasons in ([FinishReason.ABORT], [FinishReason.LENGTH])


def test_nothing_is_made_in_a_pause_but_aborts_are_served(
    start: Any, build_model: Any, paced: Any, request_of: Any
) -> None:
    engine = paced(build_model("llama"), TorchEngineSettings(max_model_len=256, max_num_seqs=16))
    engine.limit = 100
    thread, sink = start(engine)
    for i in range(4):
        thread.submit(request_of(str(i), [1, 2], max_new_tokens=200))
    sink.wait_tokens()
    before = thread.pause().result(LIMIT_S)
    engine.limit = math.inf  # from here on it is the pause alone that holds it
    assert thread.pause().result(LIMIT_S) == before  # again, without harm
    thread.abort(["0"])
    assert sink.wait_ended(1)["0"].reasons == [FinishReason.ABORT]
    after = thread.resume().result(LIMIT_S)
    assert after.num_generated_tokens == before.num_generated_tokens
    assert len(sink.wait_ended(4)["3"].tokens) == 200


def test_thousands_may_wait_in_line(start: Any, request_of: Any) -> None:
    thread, sink = start()
    for i in range(4096):
        thread.submit(request_of(str(i), [i % 100, 2, 3], max_new_tokens=2, seed=i))
    answers = sink.wait_ended(4096)
    assert all(len(answer.tokens) == 2 for answer in answers.values())
    assert thread.pause().result(LIMIT_S).num_waiting == 0


def test_a_lease_that_was_void_leaves_an_engine_that_serves_nothing(
    start: Any, pulled: Any, marked_weights: Any, request_of: Any
) -> None:
    thread, sink = start()

    def revoked() -> None:
        raise Revoked("taken back")

    lease = ExitStack()
    lease.callback(revoked)
    with pytest.raises(Revoked):
        thread.update(pulled(4, marked_weights(4)), lease, Running.RECOMPUTE).result(LIMIT_S)
    thread.submit(request_of("a", [1], max_new_tokens=1))
    assert "taken back" in sink.wait_ended(1)["a"].error
    result = thread.update(pulled(5, marked_weights(5)), ExitStack(), Running.RECOMPUTE).result(LIMIT_S)
    assert (result.load.version, result.load.failure) == (5, "")
    thread.submit(request_of("b", [1], max_new_tokens=3))
    assert sink.wait_ended(2)["b"].tokens == [5, 5, 5]


class Faulty(TorchEngine):
    """Fails the steps that are listed."""

    def __init__(self, *args: Any, failing: set[int]) -> None:
        super().__init__(*args)
        self._failing, self._num_steps = failing, 0

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps in self._failing:
            super()._prefill()
            raise torch.OutOfMemoryError("out of memory")
        super().step()


def test_a_failed_step_ends_what_ran_and_the_engine_lives(start: Any, build_model: Any, request_of: Any) -> None:
    settings = TorchEngineSettings(max_model_len=64, max_num_seqs=2)
    thread, sink = start(Faulty(build_model("llama"), settings, failing={2}))
    thread.pause().result(LIMIT_S)
    for i in range(4):
        thread.submit(request_of(str(i), [1, 2], max_new_tokens=5))
    thread.resume().result(LIMIT_S)
    answers = sink.wait_ended(4)
    assert [answers[str(i)].reasons[0] for i in range(4)] == ["abort", "abort", "length", "length"]
    assert "out of memory" in answers["0"].error


def test_an_engine_that_fails_every_step_says_so_once(build_model: Any, request_of: Any, new_answers: Any) -> None:
    settings = TorchEngineSettings(max_model_len=64, max_num_seqs=2)
    said: list[str] = []
    told = threading.Event()
    sink = Collector(new_answers())
    engine = Faulty(build_model("llama"), settings, failing=set(range(100)))

    def failed(text: str) -> None:
        said.append(text)
        told.set()

    thread = EngineThread(engine, sink, failed)
    thread.start()
    thread.pause().result(LIMIT_S)
    for i in range(2 * MAX_FAILED_STEPS + 1):
        thread.submit(request_of(str(i), [1, 2], max_new_tokens=5))
    thread.resume().result(LIMIT_S)
    assert told.wait(LIMIT_S)
    sink.wait_ended(2 * MAX_FAILED_STEPS + 1)
    thread.close(LIMIT_S)
    assert said == [f"the engine failed {MAX_FAILED_STEPS} steps in a row"]


def test_closing_ends_every_request(start: Any, request_of: Any) -> None:
    thread, sink = start()
    for i in range(20):
        thread.submit(request_of(str(i), [1, 2], max_new_tokens=200))
    sink.wait_tokens()
    thread.close(LIMIT_S)
    assert len(sink.wait_ended(20)) == 20
    with pytest.raises(EngineError, match="closed"):
        thread.submit(request_of("late", [1], max_new_tokens=1))
    thread.abort(["0", "late"])  # a stream that ends after the engine says so too, and nothing runs any more
    assert isinstance(thread.load, EngineLoad)
