"""What a ref promises, the same for every transport."""

import asyncio
from typing import Any

import pytest
from actors_under_test import Add, Added, Break, Counter, Fall, Forget, Sleep, TooMuch, until

from psrl.actor import Failed, within
from psrl.errors import ActorDied, CallTimeout, Overloaded, RemoteError


async def test_a_call_answers_with_one_of_its_replies(reach) -> None:
    async with reach(Counter()) as ref:
        assert await ref.add(Add(1)) == Added(1)
        assert await ref.add(message=Add(2)) == Added(3)
        assert await ref.add(Add(101)) == TooMuch(100)
        assert await ref.forget(Forget()) is None
        assert await ref.add(Add(4)) == Added(4)


async def test_a_ref_has_the_handlers_and_nothing_else(reach) -> None:
    async with reach(Counter()) as ref:
        with pytest.raises(AttributeError, match=r"Counter has no handler 'total'; its handlers: add, .*sleep"):
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


async def test_an_error_whose_text_no_wire_can_carry_arrives_all_the_same(reach) -> None:
    async with reach(Counter()) as ref:
        with pytest.raises(RemoteError) as caught:
            await ref.break_it(Break("surrogate"))
        assert caught.value.text.startswith("half a pair: ")
        assert await ref.add(Add(1)) == Added(1)


async def test_who_calls_in_a_loop_lets_others_run(reach) -> None:
    async with reach(Counter()) as ref:
        others_ran = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, others_ran.set)
        async with asyncio.timeout(10):
            while not others_ran.is_set():
                await ref.add(Add(0))


async def test_every_call_has_a_deadline(reach) -> None:
    counter = Counter()
    async with reach(counter) as ref:
        with pytest.raises(CallTimeout, match=r"actor\.sleep"):
            await within(ref, 0.05).sleep(Sleep(60))
        await until(lambda: counter.num_sleeping == 0)  # not: cancelled, as it may be over before it began
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
        patient = within(ref, 100.0)
        replies = await asyncio.gather(*(patient.add(Add(1)) for _ in range(4096)))
        assert sorted(reply.total for reply in replies) == list(range(1, 4097))


async def test_calls_made_before_the_actor_has_started_wait_for_it(reach) -> None:
    class Slow(Counter):
        async def started(self) -> None:
            await self.release.wait()
            self.total = 10

    slow = Slow()
    async with reach(slow) as ref:
        calls = asyncio.gather(ref.add(Add(1)), ref.add(Add(1)))
        mailbox = slow._supervisor.mailbox
        await until(lambda: mailbox.num_free == mailbox.capacity - 2)
        slow.release.set()
        assert await calls == [Added(11), Added(12)]


async def test_closing_is_orderly(reach) -> None:
    counter = Counter()
    async with reach(counter) as ref:
        task = asyncio.create_task(ref.sleep(Sleep(60)))
        await until(lambda: counter.num_sleeping == 1)
    assert counter.events == ["started", "stopped"]
    assert counter.num_cancelled == 1
    with pytest.raises(ActorDied, match="closed"):
        await task
    assert len(asyncio.all_tasks()) == 1


async def test_an_error_in_an_owned_task_ends_the_actor_by_name(reach) -> None:
    failures: list[Failed] = []
    reasons: list[str] = []
    counter = Counter()
    async with reach(counter, runtime={"on_failure": failures.append}) as ref:
        runtime_of(ref).watch(ref, reasons.append)
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(outcome(ref.sleep(Sleep(60)))) for _ in range(3)]
            await until(lambda: counter.num_sleeping == 3)
            with pytest.raises(ActorDied, match="actor ended: its task falling raised ZeroDivisionError: the floor"):
                await ref.fall(Fall())
        assert all(isinstance(task.result(), ActorDied) for task in waiting)
        with pytest.raises(ActorDied, match="the floor"):
            await ref.add(Add(1))
        failed = await asyncio.wait_for(counter.runtime.wait_failed(), 30)
        assert failures == [failed]
        assert failed.actor == "actor"
        assert isinstance(failed.error, ZeroDivisionError)
        await until(lambda: len(reasons) == 1)
        assert "the floor" in reasons[0]
        late: list[str] = []
        runtime_of(ref).watch(ref, late.append)
        await until(lambda: len(late) == 1)
        await until(lambda: counter.events == ["started", "stopped"])


async def test_an_error_in_started_ends_the_actor_by_name(reach) -> None:
    class Broken(Counter):
        async def started(self) -> None:
            await self.release.wait()
            raise OSError("no room")

    broken = Broken()
    async with reach(broken) as ref:
        call = asyncio.create_task(ref.add(Add(1)))
        mailbox = broken._supervisor.mailbox
        await until(lambda: mailbox.num_free < mailbox.capacity)
        broken.release.set()
        with pytest.raises(ActorDied, match="its task started raised OSError: no room"):
            await call
    assert broken.events == []


def runtime_of(ref: Any) -> Any:
    return ref._channel._runtime


async def outcome(call: Any) -> Any:
    try:
        return await call
    except Exception as error:
        return error
