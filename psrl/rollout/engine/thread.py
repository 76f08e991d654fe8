"""Drives an engine on a thread of its own; the face that any other thread may use.

The thread waits on a condition while there is nothing to do (no polling), else: commands, one step, deltas. Deltas
of finished requests go out after each step, those of requests that go on every FLUSH_S, so that a message carries
many tokens. The sink is called on the engine's thread and must only hand over.

A step that raises (out of memory, a broken kernel) ends the running requests with `abort` and the exception's text;
after MAX_FAILED_STEPS in a row the engine is taken for broken, everything is ended, and `failed` is called once.
"""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TypeVar

import msgspec

from psrl.errors import EngineError
from psrl.rollout.engine.base import Engine, EngineDelta, EngineLoad, EngineRequest, PulledWeights, Running

logger = logging.getLogger(__name__)

FLUSH_S = 0.02
MAX_FAILED_STEPS = 3

Sink = Callable[[list[EngineDelta]], None]
T = TypeVar("T")


class UpdateResult(msgspec.Struct, frozen=True):
    load: EngineLoad
    num_bytes: int
    pause_s: float  # how long no token could be made
    transfer_s: float  # how long bytes moved: on their way here, while tokens were made, and in the pause


class EngineThread:
    """Owns the engine from `start` to `close`. All methods are thread-safe; those that answer return a Future."""

    def __init__(self, engine: Engine, sink: Sink, failed: Callable[[str], None] | None = None) -> None:
        self._engine, self._sink, self._failed = engine, sink, failed
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._paused = False
        self._load = engine.load()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends after the current step; every request has its last delta. EngineError if a step does not end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineError(f"the engine's step did not end within {timeout_s} s")

    @property
    def load(self) -> EngineLoad:
        """As of the last step; what was submitted since is not counted."""
        return self._load

    @property
    def paused(self) -> bool:
        return self._paused

    def submit(self, request: EngineRequest) -> None:
        self._send(lambda: self._engine.submit(request))

    def abort(self, request_ids: Sequence[str], reason: str = "") -> None:
        """Unknown ids are ignored, and so is everything once the engine is closed: then nothing runs any more."""
        with self._changed:
            if not self._closing:
                self._commands.append(lambda: self._engine.abort(request_ids, reason))
                self._changed.notify()

    def pause(self) -> "Future[EngineLoad]":
        """Done when no step is running and none will, until `resume`. Running requests stay; aborts are still
        served."""
        return self._ask(lambda: self._set_paused(True))

    def resume(self) -> "Future[EngineLoad]":
        return self._ask(lambda: self._set_paused(False))

    def update(self, pulled: PulledWeights, lease: ExitStack, running: Running) -> "Future[UpdateResult]":
        """Between two steps: copy `pulled`, then close `lease`; if that raises, what was copied is distrusted."""
        return self._ask(lambda: self._update(pulled, lease, running))

    # --- the thread ---

    def _send(self, command: Callable[[], None]) -> None:
        with self._changed:
            if self._closing:
                raise EngineError("the engine is closed")
            self._commands.append(command)
            self._changed.notify()

    def _ask(self, command: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = command()
            except BaseException as error:
                self._load = self._engine.load()
                future.set_exception(error)
            else:
                self._load = self._engine.load()  # before the answer: whoever gets it sees its effect
                future.set_result(result)

        self._send(answer)
        return future

    def _run(self) -> None:
        try:
            self._drive()
        except BaseException as error:  # a bug of ours: nobody may wait for a thread that is gone
            logger.exception("the engine's thread failed")
            with self._changed:
                self._closing = True
            self._give_up(f"the engine's thread failed: {type(error).__name__}: {error}")

    def _drive(self) -> None:
        flushed = time.perf_counter()
        failed_steps = 0
        while True:
            with self._changed:
                while not (self._commands or self._closing or self._can_step()):
                    self._changed.wait()
                commands, self._commands = self._commands, deque()
                closing = self._closing
            for command in commands:
                command()
            if closing:
                self._engine.abort_all("the replica is closing")
            elif self._can_step():
                failed_steps = 0 if self._step() else failed_steps + 1
            now = time.perf_counter()
            due = now - flushed >= FLUSH_S or not self._can_step()
            flushed = now if due else flushed
            deltas = self._engine.drain(finished_only=not due)
            self._load = self._engine.load()
            if deltas:
                self._sink(deltas)
            if closing:
                return
            if failed_steps >= MAX_FAILED_STEPS:
                self._give_up(f"the engine failed {MAX_FAILED_STEPS} steps in a row")
                failed_steps = 0

    def _can_step(self) -> bool:
        return not self._paused and self._engine.has_work()

    def _step(self) -> bool:
        try:
            self._engine.step()
        except Exception as error:
            logger.exception("a step of the engine failed")
            self._engine.abort_all(f"engine step failed: {type(error).__name__}: {error}", running_only=True)
            return False
        return True

    def _give_up(self, text: str) -> None:
        self._engine.distrust_weights(text)
        self._load = self._engine.load()
        self._sink(self._engine.drain())
        if self._failed is not None:
            self._failed(text)

    def _set_paused(self, paused: bool) -> EngineLoad:
        self._paused = paused
        return self._engine.load()

    def _update(self, pulled: PulledWeights, lease: ExitStack, running: Running) -> UpdateResult:
        started = time.perf_counter()
        try:
            num_bytes = self._engine.update(pulled, running)
        except BaseException:  # whatever it is goes to the caller; the lease goes back
            lease.close()
            raise
        try:
            lease.close()
        except BaseException as error:  # Revoked, or a bug: either way nobody vouches for what was copied
            self._engine.distrust_weights(f"weights of version {pulled.version} are void: {error}")
            logger.error("what was copied is void:\n%s", traceback.format_exc())
            raise
        elapsed = time.perf_counter() - started
        return UpdateResult(self._engine.load(), num_bytes, elapsed, pulled.transfer_s + elapsed)
