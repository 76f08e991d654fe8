"""The reward worker with real processes: functions that hang, raise, crash and lie."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from psrl.actor import Runtime, within
from psrl.clock import now
from psrl.config.schema import Data, Reward, RewardFn, RewardKwargs, RewardManager
from psrl.errors import ActorError, CallTimeout, ConfigError
from psrl.reward import RewardPlan, RewardWorker, verify
from psrl.reward.messages import GetRewardStats, RewardStats, Score, Scored, ScoreFailed
from psrl.types import FinishReason, GroupId, TrajectoryId

LIMIT_S = 90.0

FUNCTIONS = """
import asyncio, os, sys, time

def echo(data_source, solution_str, ground_truth, extra_info):
    print("said on stdout")  # must not disturb the answers
    return {"score": float(solution_str), "acc": solution_str == ground_truth, "pred": "text",
            "turns": extra_info["num_turns"], "level": extra_info.get("level", -1)}

async def slow_async(data_source, solution_str, ground_truth, extra_info, bonus):
    await asyncio.sleep(0.01)
    return 1 + bonus

def meet(data_source, solution_str, ground_truth, extra_info):
    open(f"{ground_truth}/{os.getpid()}", "w").close()
    while not os.path.exists(f"{ground_truth}/go"):
        time.sleep(0.01)
    return 1.0

def echo_slowly(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.02)
    return float(solution_str)

def act(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "spin":
        while True:
            pass
    if solution_str == "sleep":
        time.sleep(3600)
    if solution_str == "stuck in C":
        import re
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the GIL, runs for ages
    if solution_str == "ignore signals":
        import signal
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass
    if solution_str == "raise":
        raise LookupError("no such answer \\ud835")
    if solution_str == "exit":
        sys.exit(0)
    if solution_str == "crash":
        os.kill(os.getpid(), 9)
    if solution_str == "nan":
        return float("nan")
    if solution_str == "text":
        return "1.0"
    if solution_str == "none":
        return None
    if solution_str == "no score":
        return {"acc": 1.0}
    if solution_str.startswith("crash once "):
        path = solution_str.removeprefix("crash once ")
        if not os.path.exists(path):
            open(path, "w").close()
            os._exit(3)
    if solution_str.startswith("hang once "):
        path = solution_str.removeprefix("hang once ")
        if not os.path.exists(path):
            open(path, "w").close()
            time.sleep(3600)
    if solution_str == "child":
        import subprocess
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        open(ground_truth, "w").write(str(child.pid))
        time.sleep(3600)
    if solution_str == "daemon":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                open(ground_truth, "w").write(str(os.getpid()))
                time.sleep(3600)
            os._exit(0)
        time.sleep(3600)
    if solution_str.startswith("fork"):
        child = os.fork()
        if child == 0 and solution_str == "fork and raise":
            raise LookupError("in the fork")
        if child == 0 and solution_str == "fork and exit":
            sys.exit(1)
        if child == 0 and solution_str == "fork and return":
            return 0.5
        if child == 0:  # "fork and crash": the fork lives on with whatever it inherited
            time.sleep(3600)
        if solution_str == "fork and crash":
            os.kill(os.getpid(), 9)
        os.waitpid(child, 0)
    return 1.0
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


def data(**kwargs: Any) -> Data:
    return Data(train_files=[], val_files=[], **kwargs)


def plan_of(path: Path, name: str, **kwargs: Any) -> RewardPlan:
    return RewardPlan.of(Reward(custom_reward_function=RewardFn(path=str(path), name=name, kwargs=kwargs)), data())


def score(solution: str, truth: Any = "42", source: str = "mine", index: int = 0, **extra: Any) -> Score:
    row = msgspec.msgpack.encode({"data_source": source, "ground_truth": truth, "extra_info": extra})
    return Score(TrajectoryId(GroupId(0), index), solution, row, 10, FinishReason.STOP, num_turns=2)


@asynccontextmanager
async def worker_of(plan: RewardPlan, **kwargs: Any) -> AsyncIterator[tuple[RewardWorker, RewardWorker]]:
    """(ref, the actor itself)"""
    actor = RewardWorker(plan, **kwargs)
    async with Runtime("test") as runtime:
        yield runtime.spawn("reward", actor), actor


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not check():
            await asyncio.sleep(0.01)


async def stats_of(worker: RewardWorker) -> RewardStats:
    return await worker.get_stats(GetRewardStats())


async def test_built_in_rule_and_answer_in_place() -> None:
    plan = RewardPlan.of(Reward(), data())
    async with worker_of(plan, num_processes=2) as (worker, _):
        solutions = ["#### 137", "", "I don't know.", "#### 5", "#### 137"]
        answers = await asyncio.gather(
            *(worker.score(score(text, "137", "openai/gsm8k", index)) for index, text in enumerate(solutions))
        )
        assert [(answer.trajectory.index, answer.raw_score) for answer in answers] == [
            (0, 1.0),
            (1, 0.0),
            (2, 0.0),
            (3, 0.0),
            (4, 1.0),
        ]
        assert (await stats_of(worker)).scored == 5


@pytest.mark.parametrize(("method", "raw"), [("strict", 0.0), ("flexible", 1.0)])
async def test_how_the_built_in_rule_finds_the_answer_is_a_setting(method: str, raw: float) -> None:
    managers = {"dapo": RewardManager(reward_kwargs=RewardKwargs(gsm8k_method=method))}
    async with worker_of(RewardPlan.of(Reward(managers=managers), data())) as (worker, _):
        scored = await worker.score(score("so it is 137", "137", "openai/gsm8k"))
    assert isinstance(scored, Scored)
    assert scored.raw_score == raw


async def test_custom_function_gets_keywords_and_gives_metrics(functions: Path) -> None:
    async with worker_of(plan_of(functions, "echo")) as (worker, _):
        answer = await worker.score(score("0.5", level=3))
        assert answer == Scored(TrajectoryId(GroupId(0), 0), 0.5, 0.5, {"acc": 0.0, "turns": 2.0, "level": 3.0})


async def test_async_function_with_arguments(functions: Path) -> None:
    async with worker_of(plan_of(functions, "slow_async", bonus=2)) as (worker, _):
        assert (await worker.score(score(""))).raw_score == 3.0


@pytest.mark.parametrize("how", ["spin", "sleep", "stuck in C", "ignore signals"])
async def test_hanging_function_is_killed_counted_and_failed_by_name(functions: Path, how: str) -> None:
    async with worker_of(plan_of(functions, "act"), retry_limit=1) as (worker, actor):
        await worker.score(score("fine"))
        first = actor.pids
        assert len(first) == 1
        actor._timeout_s = 0.3  # for what hangs; too short, now and then, for what does not
        answer = await worker.score(score(how))
        actor._timeout_s = LIMIT_S
        assert isinstance(answer, ScoreFailed)
        assert answer.kind == "timeout"
        assert f"reward.custom_reward_function: reward function act of {functions}" in answer.reason
        assert "no score within reward.reward_loop_worker.timeout_s=0.3 s, 2 times in a row" in answer.reason
        assert await stats_of(worker) == RewardStats(scored=1, timeouts=2, failed=1)
        assert (await worker.score(score("fine"))).raw_score == 1.0
        assert not set(first) & set(actor.pids)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "LookupError: no such answer"),
        ("exit", "SystemExit"),
        ("nan", "must be a finite number, is nan"),
        ("text", "must be a finite number, is str"),
        ("none", "must be a finite number, is NoneType"),
        ("no score", 'without "score"'),
    ],
)
async def test_raising_function_fails_its_sample_once(
    functions: Path, how: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker_of(plan_of(functions, "act")) as (worker, actor):
        await worker.score(score("fine"))
        first = actor.pids
        answer = await worker.score(score(how))
        assert isinstance(answer, ScoreFailed)
        assert answer.kind == "error"
        assert said in answer.reason
        assert ("my_rewards.py, line" in answer.reason) == (how in ("raise", "exit"))
        assert "Traceback" not in answer.reason
        assert "psrl/reward/child.py" not in caplog.text
        assert await worker.score(score(how)) == answer
        assert caplog.text.count(said) == 1, "each error is logged once"
        assert await stats_of(worker) == RewardStats(scored=1, errors=2, failed=2)
        assert actor.pids == first  # the process lives on


async def test_crashing_function_is_tried_again_then_failed(functions: Path, tmp_path: Path) -> None:
    async with worker_of(plan_of(functions, "act"), retry_limit=2) as (worker, _):
        await worker.score(score("fine"))
        answer = await worker.score(score("crash"))
        assert isinstance(answer, ScoreFailed)
        assert answer.kind == "died"
        assert f"reward.custom_reward_function: reward function act of {functions}" in answer.reason
        assert "its process ended (killed by SIGKILL), 3 times in a row" in answer.reason
        once = await worker.score(score(f"crash once {tmp_path / 'mark'}"))
        assert isinstance(once, Scored)
        assert await stats_of(worker) == RewardStats(scored=2, deaths=4, failed=1)


async def test_a_function_that_never_gave_a_score_is_not_tried_again_and_again(functions: Path) -> None:
    async with worker_of(plan_of(functions, "act"), retry_limit=2) as (worker, _):
        for said in ("3 times in a row", "(killed by SIGKILL)"):
            answer = await worker.score(score("crash"))
            assert isinstance(answer, ScoreFailed)
            assert answer.reason.endswith(said)
        assert (await stats_of(worker)).deaths == 3 + 1


async def test_kill_from_outside_scores_again(functions: Path) -> None:
    begun = functions.with_name("begun")
    async with worker_of(plan_of(functions, "act"), timeout_s=LIMIT_S) as (worker, actor):
        answer = asyncio.ensure_future(worker.score(score(f"hang once {begun}")))
        await until(begun.exists)
        os.kill(actor.pids[0], signal.SIGKILL)
        assert (await answer).raw_score == 1.0
        assert (await stats_of(worker)).deaths == 1


async def test_slow_functions_overlap_within_bounds_and_leave_the_loop_free(functions: Path) -> None:
    (folder := functions.with_name("meeting")).mkdir()
    async with worker_of(plan_of(functions, "meet"), timeout_s=LIMIT_S, num_processes=4) as (worker, actor):
        running = asyncio.gather(*(worker.score(score("", str(folder), index=index)) for index in range(8)))
        await until(lambda: len(list(folder.iterdir())) == 4)  # this loop turns while four wait for each other
        (folder / "go").touch()
        assert [answer.raw_score for answer in await running] == [1.0] * 8
        assert {path.name for path in folder.iterdir()} == {"go", *map(str, actor.pids)}
        assert (await stats_of(worker)).deaths == 0


def test_a_worker_needs_no_main_thread(functions: Path) -> None:
    answers: list[Scored | ScoreFailed] = []

    async def main() -> None:
        async with worker_of(plan_of(functions, "act"), timeout_s=LIMIT_S, retry_limit=0) as (worker, actor):
            answers.append(await worker.score(score("fine")))
            actor._timeout_s = 0.3
            answers.append(await worker.score(score("spin")))

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT_S)
    assert [type(answer) for answer in answers] == [Scored, ScoreFailed]


async def test_random_kills_lose_and_double_nothing(functions: Path) -> None:
    rng = random.Random(0)
    async with worker_of(plan_of(functions, "echo_slowly"), num_processes=3, retry_limit=50) as (worker, actor):
        running = asyncio.gather(*(worker.score(score(str(index), index=index)) for index in range(60)))
        for _ in range(10):
            await asyncio.sleep(0.05)
            if actor.pids:
                os.kill(rng.choice(actor.pids), signal.SIGKILL)
        answers = await running
        assert [(answer.trajectory.index, answer.raw_score) for answer in answers] == [(i, float(i)) for i in range(60)]
        stats = await stats_of(worker)
        assert stats.scored == 60
        assert stats.failed == 0


async def test_a_caller_that_gives_up_frees_the_process(functions: Path) -> None:
    async with worker_of(plan_of(functions, "act"), timeout_s=LIMIT_S) as (worker, actor):
        await worker.score(score("fine"))
        busy = actor.pids[0]
        with pytest.raises(CallTimeout):
            await within(worker, 0.2).score(score("spin"))
        assert await gone(busy)
        assert (await worker.score(score("fine"))).raw_score == 1.0


@pytest.mark.parametrize("how", ["child", "daemon"])
async def test_what_a_function_started_ends_with_it(functions: Path, tmp_path: Path, how: str) -> None:
    """Also in a session of its own."""
    note = tmp_path / "pid"
    async with worker_of(plan_of(functions, "act"), timeout_s=LIMIT_S, retry_limit=0) as (worker, _):
        running = asyncio.ensure_future(worker.score(score(how, str(note))))
        await until(lambda: note.exists() and note.read_text())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await gone(int(note.read_text()))


async def test_a_fork_of_a_function_gives_no_answer(functions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with worker_of(plan_of(functions, "act"), timeout_s=LIMIT_S, retry_limit=0) as (worker, _):
        for how in ("fork and return", "fork and raise", "fork and exit", "fork and return"):
            assert (await worker.score(score(how))).raw_score == 1.0
        crashed = await worker.score(score("fork and crash"))
        assert isinstance(crashed, ScoreFailed)
        assert crashed.kind == "died", "the fork does not keep the socket open"
        assert await stats_of(worker) == RewardStats(scored=4, deaths=1, failed=1)
    assert "Traceback" not in capfd.readouterr().err


async def test_processes_end_with_their_worker(functions: Path) -> None:
    async with worker_of(plan_of(functions, "act"), timeout_s=LIMIT_S) as (worker, actor):
        await worker.score(score("fine"))
        waiting = asyncio.ensure_future(worker.score(score("spin")))
        await asyncio.sleep(0.2)
        pids = actor.pids
        assert pids
    assert all([await gone(pid) for pid in pids])
    with pytest.raises(ActorError):
        await waiting


async def test_processes_die_with_a_killed_worker(functions: Path) -> None:
    script = functions.with_name("host.py")
    script.write_text(
        "import asyncio, sys\n"
        "from psrl.reward.plan import Function, RewardPlan, Source\n"
        "from psrl.reward.process import ScoringProcess\n"
        "from psrl.reward.wire import Job\n"
        "async def main():\n"
        f"    process = ScoringProcess(RewardPlan((Source(Function({str(functions)!r}, 'act'), None, 1.0),)))\n"
        "    await process.start()\n"
        "    print(process.pid, flush=True)\n"
        "    await process.judge(Job('spin', 's', '1', {}, 1), 60)\n"
        "asyncio.run(main())\n"
    )
    host = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert host.stdout is not None
    child = int(await asyncio.wait_for(host.stdout.readline(), LIMIT_S))
    await asyncio.sleep(0.2)
    host.kill()
    await host.wait()
    assert await gone(child)


async def gone(pid: int) -> bool:
    """Whether a process ends, however late."""
    deadline = now() + LIMIT_S
    while now() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # ended; whoever inherited it has not asked yet
            return True
        await asyncio.sleep(0.02)
    return False


def test_verify_names_what_cannot_be_loaded(functions: Path, tmp_path: Path) -> None:
    verify(plan_of(functions, "echo"))
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    for path, name, said in [
        (tmp_path / "absent.py", "f", "does not exist"),
        (functions, "absent", "there is no such function; the file has echo"),
        (broken, "f", "cannot be imported: ModuleNotFoundError"),
        (functions, "slow_async", "missing a required argument: 'bonus'"),
    ]:
        with pytest.raises(ConfigError) as caught:
            verify(plan_of(path, name))
        assert said in str(caught.value)
        assert str(path) in str(caught.value)
    dying = tmp_path / "dying.py"
    dying.write_text("import os\nos._exit(7)\n")
    with pytest.raises(ConfigError) as caught:
        verify(plan_of(dying, "f"))
    forking = tmp_path / "forking.py"
    forking.write_text("import os\nif os.fork() == 0: raise SystemExit(1)\ndef f(**kwargs): return 1.0\n")
    verify(plan_of(forking, "f"))
    said = f"reward.custom_reward_function: reward function f of {dying}: loading it ended its process (exit code 7)"
    assert str(caught.value) == said


async def test_row_without_truth_is_a_failure_by_name() -> None:
    async with worker_of(RewardPlan.of(Reward(), data())) as (worker, _):
        bad = Score(TrajectoryId(GroupId(3), 1), "x", msgspec.msgpack.encode({}), 1, FinishReason.STOP)
        answer = await worker.score(bad)
        assert isinstance(answer, ScoreFailed)
        assert "3_1" in answer.reason
        unknown = await worker.score(score("x", source="nobody/knows"))
        assert isinstance(unknown, ScoreFailed)
        assert "no built-in reward for data source 'nobody/knows'" in unknown.reason
