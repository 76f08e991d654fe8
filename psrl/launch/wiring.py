"""A whole run on one machine: shared memory, processes, and what follows from the end of each.

The launcher is the node agent: it creates the segments and keeps them, starts the processes of the roles, and tells the
head which ones it lost. A replica, agent loop worker or reward worker that ends is started again, within limits; when
head or trainer ends by an error the run ends, by name, and one command resumes it from the last checkpoint.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from psrl.actor import Runtime, UnixAddress
from psrl.actor import run as run_loop
from psrl.clock import now
from psrl.config.dump import to_yaml
from psrl.config.loader import Loaded
from psrl.config.schema import Config
from psrl.control import PSManager
from psrl.control.messages import GetStatus
from psrl.errors import ActorDied, ActorError, ConfigError, PsrlError, RunFailed
from psrl.launch.console import let_fail
from psrl.launch.interrupt import Interrupted, until_interrupted
from psrl.launch.local import Exit, LocalLauncher, ProcessSpec
from psrl.launch.logs import ConsoleView, LineHandler
from psrl.launch.messages import ProcessLost
from psrl.launch.plan import Plan, is_finished, make_spec
from psrl.launch.progress import Progress
from psrl.launch.run_lock import RunLock
from psrl.launch.spec import CHECKPOINTS, HEAD, RunSpec
from psrl.launch.supervise import RestartPolicy
from psrl.train.checkpoint_dir import CheckpointDir
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.segments import NodeSegments
from psrl.weights.manifest import Manifest

logger = logging.getLogger(__name__)

GRACE_S = 6.0  # from SIGTERM to SIGKILL; the whole end stays below ten seconds
NOTICE_TIMEOUT_S = 10.0
WATCH_INTERVAL_S = 5.0
HEAD_END_S = 2.0
DUMP_S = 1.0  # for stacks to be written


def role_of(name: str) -> str:
    return name.rsplit("-", 1)[0]


class Cluster:
    """The processes of a run. Use as `async with`; leaving it ends them all and gives the memory back."""

    def __init__(self, spec: RunSpec, queue: QueuePlan, *, emit: Callable[[str], None] | None = None) -> None:
        self.spec = spec
        self._queue = queue
        view = ConsoleView(emit) if emit is not None else ConsoleView()
        self.launcher = LocalLauncher(view, grace_s=GRACE_S)
        self._stack = AsyncExitStack()
        self._notices: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> "Cluster":
        try:
            segments = self._stack.enter_context(NodeSegments(self.spec.segments_socket))
            segments.create_queue(self._queue)
            segments.create_weights(Manifest.decode(self.spec.manifest).total_bytes)
            self._runtime = await self._stack.enter_async_context(Runtime("launcher"))
            await self._stack.enter_async_context(self.launcher)
            self.launcher.remove_at_end(Path(self.spec.socket_dir))
            self.launcher.on_exit(self._ended)
        except BaseException:  # also when cancelled: without an enter there is no exit
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for notice in self._notices:
            notice.cancel()
        await asyncio.gather(*self._notices, return_exceptions=True)
        await self._stack.aclose()

    def start(self, *names: str) -> None:
        """Start processes of the spec by name, all of them if none is named."""
        spec = self.spec
        path = Path(spec.socket_dir) / "spec.msgpack"
        spec.write(path)
        deployment = spec.config.psrl.deployment
        everything = [HEAD, *spec.rewards, *spec.trainers, *spec.replicas, *spec.agents]
        for name in names or everything:
            restartable = role_of(name) in ("replica", "agent", "reward")
            self.launcher.spawn(
                ProcessSpec(
                    name=name,
                    argv=(
                        sys.executable,
                        "-m",
                        "psrl.launch.child",
                        role_of(name),
                        "--name",
                        name,
                        "--spec",
                        str(path),
                    ),
                    env=self._environment(name),
                    log=Path(spec.run_dir) / "logs" / f"{name}.log",
                    restart=RestartPolicy(max_restarts=deployment.max_restarts if restartable else 0),
                )
            )

    async def wait_trainers(self) -> None:
        """Until all ranks have ended well. RunFailed as soon as something ended that the run needs."""
        ranks = {asyncio.ensure_future(self.launcher.wait(name)) for name in self.spec.trainers}
        try:
            pending: set[asyncio.Future[Any]] = {*ranks, self._failed}
            while ranks & pending and not self._failed.done():
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
        finally:
            for rank in ranks:
                rank.cancel()

    def dump_stacks(self) -> None:
        """Have every process write the stacks of its threads to its log."""
        for name in self.launcher.running:
            pid = self.launcher.pid(name)
            if pid is not None:
                os.kill(pid, signal.SIGUSR1)

    async def manager(self, timeout_s: float) -> PSManager:
        """A ref to PSManager of this run."""
        address = UnixAddress(self.spec.head_socket)
        return await self._runtime.connect(PSManager, "psmanager", address, timeout_s=timeout_s)

    def _environment(self, name: str) -> dict[str, str]:
        deployment = self.spec.config.psrl.deployment
        threads = str(deployment.threads_per_process)
        environment = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' too; in a log they hide what is next to them
            "PYTHONUNBUFFERED": "1",
            "PYTHONUTF8": "1",
            # torch makes this folder when it is imported; without a word from us in the user's TMPDIR, and for good.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get(
                "TORCHINDUCTOR_CACHE_DIR", str(Path(self.spec.socket_dir) / "torchinductor")
            ),
        }
        if role_of(name) == "trainer":
            environment |= {
                "RANK": str(self.spec.trainers.index(name)),
                "LOCAL_RANK": str(self.spec.trainers.index(name)),
                "WORLD_SIZE": str(len(self.spec.trainers)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.spec.master_port),
            }
        return environment

    def _ended(self, ended: Exit) -> None:
        """On the event loop, for each end of a process."""
        if ended.expected:
            return
        if ended.restart_in_s is None:
            if not self._failed.done():
                self._failed.set_exception(RunFailed(str(ended)))
            return
        logger.warning("%s; it is started again", ended)
        notice = asyncio.get_running_loop().create_task(self._tell_head(ended))
        self._notices.add(notice)
        notice.add_done_callback(self._notices.discard)

    async def _tell_head(self, ended: Exit) -> None:
        from psrl.launch.roles.head import NODE
        from psrl.launch.roles.node import Node

        try:
            node = await self._runtime.connect(
                Node, NODE, UnixAddress(self.spec.head_socket), timeout_s=NOTICE_TIMEOUT_S
            )
            await node.process_lost(ProcessLost(ended.name, role_of(ended.name), ended.pid, ended.reason))
        except ActorError as error:
            if not self._failed.done():
                self._failed.set_exception(RunFailed(f"the head could not be told that {ended.name} ended: {error}"))


def run(loaded: Loaded, plan: Plan) -> int:
    """Run to the end; the exit status. Raises RunFailed by name, Interrupted after Ctrl-C."""
    let_fail()
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[LineHandler()]
    )
    try:
        return run_loop(_run(loaded, plan))
    except (PsrlError, Interrupted) as error:
        if not isinstance(error, ConfigError) and (step := step_to_go_on_from(loaded.config)) is not None:
            error.add_note(f"to go on from step {step}, give the same command again")
        raise


def step_to_go_on_from(config: Config) -> int | None:
    """Where the same command would start again, as far as a look at the checkpoints tells; None: not from one."""
    if config.trainer.resume_mode != "auto":
        return None
    complete = CheckpointDir(Path(config.trainer.default_local_dir) / CHECKPOINTS).complete()
    return complete[0].step if complete else None


async def _run(loaded: Loaded, plan: Plan) -> int:
    """Signals are ours from here on, so that whatever exists when one comes is taken down again."""
    clusters: list[Cluster] = []

    def kill_all() -> None:
        for cluster in clusters:
            cluster.launcher.kill_all()

    return await until_interrupted(_run_in(loaded, plan, clusters), kill_all)


async def _run_in(loaded: Loaded, plan: Plan, clusters: list[Cluster]) -> int:
    """The run in its directory; its cluster is appended to `clusters`."""
    run_dir = Path(loaded.config.trainer.default_local_dir).absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    socket_dir = Path(tempfile.mkdtemp(prefix="psrl-"))
    try:
        with RunLock(run_dir):
            spec = make_spec(loaded.config, plan, run_dir, socket_dir)
            (run_dir / "config.yaml").write_text(to_yaml(loaded.config, loaded.origins), encoding="utf-8")
            progress = Progress(run_dir, spec)
            cluster = Cluster(spec, plan.queue, emit=progress.say)
            clusters.append(cluster)
            try:
                if is_finished(spec):
                    progress.say(f"all {spec.total_steps} steps of {run_dir} are done; nothing was started")
                    return 0
                return await _follow(cluster, progress, plan)
            except RunFailed as error:
                report = cluster.launcher.failure_report()
                if report is None:
                    raise
                raise RunFailed(report if str(error) in report else f"{error}\n{report}") from error
            finally:
                progress.close()
    finally:
        shutil.rmtree(socket_dir, ignore_errors=True)


async def _follow(cluster: Cluster, progress: Progress, plan: Plan) -> int:
    """The main line of a run: start, watch, end."""
    spec = cluster.spec
    progress.say(f"run directory: {spec.run_dir}")
    progress.say(f"training data: {plan.dataset}")
    if spec.resume_from is not None:
        progress.say(f"going on from {spec.resume_from}, version {spec.initial_version}")
    async with cluster:
        cluster.start()
        await _first_of(cluster.wait_trainers(), progress.follow(), _watch(cluster))
        progress.poll()
    progress.say(f"the run has ended; psrl report {spec.run_dir} shows what came of it")
    return 0


async def _watch(cluster: Cluster) -> None:
    """The progress watchdog: RunFailed when for too long no token was made, no group ended and nothing was published.

    Before that every process writes its stacks to its log.
    """
    from psrl.launch.roles.head import START_TIMEOUT_S

    limit_s = cluster.spec.config.psrl.progress_timeout_s
    manager = await cluster.manager(timeout_s=START_TIMEOUT_S)
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        try:
            status = await manager.get_status(GetStatus())
        except ActorDied:
            await asyncio.sleep(HEAD_END_S)  # the launcher is about to see the head's end, and says more of it
            raise
        idle_s = now() - status.last_progress_s
        if idle_s > limit_s and not status.finished:
            cluster.dump_stacks()
            await asyncio.sleep(DUMP_S)
            raise RunFailed(
                f"nothing moved for {idle_s:.0f} s (psrl.progress_timeout_s={limit_s:g}): version {status.version}, "
                f"buffers {status.buffers}, groups {status.counters}"
            )


async def _first_of(work: Coroutine[Any, Any, None], *watchers: Coroutine[Any, Any, None]) -> None:
    """Do `work`; an error of a watcher ends it. Nothing is left running."""
    tasks = [asyncio.create_task(coroutine) for coroutine in (work, *watchers)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
