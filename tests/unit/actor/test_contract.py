"""What a ref promises, the same for every transport."""

import asyncio

import msgspec
import pytest

from psrl.actor import Actor, handler, within
from psrl.errors import CallTimeout, ConfigError, Overloaded, RemoteError


class Add(msgspec.Struct, frozen=True, tag=True):
    amount: int


class Added(msgspec.Struct, frozen=True, tag=True):
    total: int


class TooMuch(msgspec.Struct, frozen=True, tag=True):
    limit: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    pass


class Sleep(msgspec.Struct, frozen=True, tag=True):
    seconds: float


class Break(msgspec.Struct, frozen=True, tag=True):
    how: str


class Counter(Actor):
    def __init__(self) -> None:
        self.total = 0
        self.num_sleeping = 0
        self.num_cancelled = 0
        self.events: list[str] = []

    async def started(self) -> None:
        self.events.append("started")

    async def stopped(self) -> None:
        self.events.append("stopped")

    @handler
    async def add(self, message: Add) -> Added | TooMuch:
        if message.amount > 100:
            return TooMuch(100)
        self.total += message.amount
        return Added(self.total)

    @handler
    async def forget(self, message: Forget) -> None:
        self.total = 0

    @handler
    async def sleep(self, message: Sleep) -> Added:
        self.num_sleeping += 1
        try:
            await asyncio.sleep(message.seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_sleeping -= 1
        return Added(self.total)

    @handler
    async def break_it(self, message: Break) -> Added:
        if message.how == "config":
            raise ConfigError("set `a.b` to 1")
        if message.how == "cancel":
            raise asyncio.CancelledError
        if message.how == "reply":
            return message  # type: ignore[return-value]
        raise ZeroDivisionError(message.how)


async def until(true, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.001)


async def test_a_call_answers_with_one_of_its_replies(reach) -> None:
    async with reach(Counter()) as ref:
        assert await ref.add(Add(1)) == Added(1)
        assert await ref.add(message=Add(2)) == Added(3)
        assert await ref.add(Add(101)) == TooMuch(100)
        assert await ref.forget(Forget()) is None
        assert await ref.add(Add(4)) == Added(4)


async def test_a_ref_has_the_handlers_and_nothing_else(reach) -> None:
    async with reach(Counter()) as ref:
        with pytest.raises(
            AttributeError, match=r"Counter has no handler 'total'; its handlers: add, break_it, forget, sleep"
        ):
            _ = ref.total
        with pytest.raises(AttributeError, match="no handler 'started'"):
            _ = ref.started
        assert "add" in dir(ref)
        assert "Counter" in repr(ref)


async def test_a_wrong_message_is_refused_before_it_is_sent(reach) -> None:
    async with reach(Counter()) as ref:
        with pytest.raises(TypeError, match="add takes Add, not Sleep"):
            await ref.add(Sleep(1))


async def test_what_a_handler_raises_arrives_as_remote_error(reach) -> None:
    async with reach(Counter()) as ref:
        with pytest.raises(RemoteError) as caught:
            await ref.break_it(Break("boom"))
        assert (caught.value.error, caught.value.text) == ("ZeroDivisionError", "boom")
        assert "break_it" in caught.value.remote_traceback
        with pytest.raises(RemoteError) as caught:
            await ref.break_it(Break("config"))
        assert (caught.value.error, caught.value.text) == ("ConfigError", "set `a.b` to 1")
        with pytest.raises(RemoteError) as caught:
            await ref.break_it(Break("cancel"))
        assert caught.value.error == "CancelledError"
        with pytest.raises(RemoteError, match="break_it must return Added, not Break"):
            await ref.break_it(Break("reply"))
        assert await ref.add(Add(1)) == Added(1)


async def test_every_call_has_a_deadline(reach) -> None:
    counter = Counter()
    async with reach(counter) as ref:
        with pytest.raises(CallTimeout, match=r"actor\.sleep"):
            await within(ref, 0.05).sleep(Sleep(60))
        await until(lambda: counter.num_cancelled == 1)
        with pytest.raises(CallTimeout):
            await within(ref, 0.0).sleep(Sleep(60))
        with pytest.raises(CallTimeout):
            await within(ref, -1.0).sleep(Sleep(60))
        assert await within(ref, 30.0).add(Add(1)) == Added(1)


async def test_a_full_mailbox_refuses_at_once(reach) -> None:
    counter = Counter()
    async with reach(counter, mailbox=3) as ref, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ref.sleep(Sleep(60))) for _ in range(3)]
        await until(lambda: counter.num_sleeping == 3)
        with pytest.raises(Overloaded, match="actor already has 3 calls"):
            await ref.add(Add(1))
        tasks[0].cancel()
        await until(lambda: counter.num_sleeping == 2)
        await until(lambda: counter._supervisor.mailbox.num_free == 1)
        assert await ref.add(Add(1)) == Added(1)
        for task in tasks:
            task.cancel()


async def test_cancelling_a_call_cancels_its_handler(reach) -> None:
    counter = Counter()
    async with reach(counter) as ref:
        task = asyncio.create_task(ref.sleep(Sleep(60)))
        await until(lambda: counter.num_sleeping == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: counter.num_cancelled == 1)


async def test_a_thousand_cancelled_calls_leave_no_place_taken(reach) -> None:
    counter = Counter()
    async with reach(counter, mailbox=64) as ref:
        mailbox = counter._supervisor.mailbox
        for count in range(1000):
            task = asyncio.create_task(ref.sleep(Sleep(60)) if count % 2 else ref.add(Add(1)))
            for _ in range(count % 7):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await until(lambda: mailbox.num_free == mailbox.capacity == 64)
        assert not mailbox._running


async def test_4096_calls_at_once(reach) -> None:
    async with reach(Counter(), mailbox=4096) as ref:
        replies = await asyncio.gather(*(ref.add(Add(1)) for _ in range(4096)))
        assert sorted(reply.total for reply in replies) == list(range(1, 4097))


async def test_calls_made_before_the_actor_has_started_wait_for_it(reach) -> None:
    class Slow(Counter):
        async def started(self) -> None:
            await asyncio.sleep(0.02)
            self.total = 10

    async with reach(Slow()) as ref:
        assert await asyncio.gather(ref.add(Add(1)), ref.add(Add(1))) == [Added(11), Added(12)]


async def test_closing_is_orderly(reach) -> None:
    counter = Counter()
    async with reach(counter) as ref:
        task = asyncio.create_task(ref.sleep(Sleep(60)))
        await until(lambda: counter.num_sleeping == 1)
    assert counter.events == ["started", "stopped"]
    assert counter.num_cancelled == 1
    with pytest.raises(Exception, match="closed"):
        await task
    assert len(asyncio.all_tasks()) == 1
