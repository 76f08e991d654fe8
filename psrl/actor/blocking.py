"""A runtime for code that blocks: it lives on a thread of its own, with its own event loop.

The trainer's main thread computes; this thread keeps answering, so a long backward pass delays nobody's call.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from psrl.actor.loop import run
from psrl.actor.runtime import CLOSE_TIMEOUT_S, Failed, Runtime
from psrl.actor.token import Token
from psrl.actor.transport import DEFAULT_HOST_TIMEOUT_S, Address
from psrl.actor.wire import DEFAULT_FRAME_BYTES
from psrl.errors import ActorDied, CallTimeout

T = TypeVar("T")

START_TIMEOUT_S = 30.0


class BlockingRuntime:
    """A Runtime on its own thread. Enter it, then `call` coroutines of its refs from any other thread."""

    def __init__(
        self,
        name: str,
        listen: Address | None = None,
        *,
        token: Token | None = None,
        max_frame_bytes: int = DEFAULT_FRAME_BYTES,
        host_timeout_s: float = DEFAULT_HOST_TIMEOUT_S,
        on_failure: Callable[[Failed], None] | None = None,
    ) -> None:
        self.runtime = Runtime(
            name,
            listen,
            token=token,
            max_frame_bytes=max_frame_bytes,
            host_timeout_s=host_timeout_s,
            on_failure=on_failure,
        )
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=f"runtime {name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._opened.result(START_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `coroutine` on the runtime's loop and wait for it. Raises what it raises, or CallTimeout."""
        if os.getpid() != self._process or not self._thread.is_alive() or self._loop is None:
            coroutine.close()
            raise ActorDied(f"the thread of runtime {self.runtime.name} does not run in this process")
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("call() would wait for its own thread; await the coroutine there")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise ActorDied(f"runtime {self.runtime.name} closed during the call") from None
        except TimeoutError:
            if future.done():
                raise  # the coroutine's own
            future.cancel()
            raise CallTimeout(f"no result on runtime {self.runtime.name} within {timeout_s:g} s") from None
        except BaseException:  # KeyboardInterrupt while waiting: nobody wants the result any more
            future.cancel()
            raise

    def close(self) -> None:
        """Close the runtime and end the thread. Safe to call twice."""
        if self._loop is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_TIMEOUT_S * 2)
        if self._thread.is_alive():
            raise CallTimeout(f"runtime {self.runtime.name} did not close within {CLOSE_TIMEOUT_S * 2:g} s")

    def _run(self) -> None:
        try:
            run(self._main())
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self.runtime:
            self._opened.set_result(None)
            await self._stop.wait()
