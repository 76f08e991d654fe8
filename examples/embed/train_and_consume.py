"""Two processes of a plain asyncio + torch program, with PSRL's sample queue and weight transfer between them.

    python train_and_consume.py               both processes, on one node: they share memory
    python train_and_consume.py --nodes 2     both, as two nodes that share nothing but TCP

The consumer acts with a policy and puts what came of it on the queue, rows of different lengths. The trainer draws
batches, makes an optimizer step and publishes the weights; the consumer pulls them into its own model and acts with
those. Nothing else of PSRL is used: the loops, the model and the signals are this program's.

On two hosts, with the same PSRL_CLUSTER_TOKEN (16 bytes or more) in both environments:

    python train_and_consume.py trainer --listen 10.0.0.1:5000
    python train_and_consume.py consumer --trainer 10.0.0.1:5000 --host 10.0.0.2
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import numpy as np
import torch

from psrl._core import LinkEndpoint
from psrl.actor import Runtime, TcpAddress, Token
from psrl.actor.bulk import Bulk
from psrl.errors import PsrlError
from psrl.transfer import NodeSegments, QueueNode, QueuePlan, SegmentSource, TransferQueue, as_torch
from psrl.transfer.messages import LeaveNode
from psrl.transfer.segments import WEIGHTS
from psrl.types import Epoch, Version
from psrl.weights.broadcast import Broadcaster
from psrl.weights.client import WeightClient
from psrl.weights.publish import describe
from psrl.weights.server import ParameterServer

TOKEN = "PSRL_CLUSTER_TOKEN"
ROWS_PER_STEP = 64
NUM_INPUTS, NUM_ACTIONS = 8, 4
FIELDS = ["contexts", "actions", "rewards"]
QUEUE_PLAN = QueuePlan.of(16 << 20, extent_bytes=1 << 16)
PATIENCE_S = 120.0  # for the other process to do its part

T = TypeVar("T")


class Lost(Exception):
    """The other process is gone."""


class Peer:
    """The other process, as long as it is there."""

    def __init__(self) -> None:
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def ended(self, why: str) -> None:
        if not self.gone.done():
            self.gone.set_result(why)

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`. Raises Lost as soon as the peer is gone; an error of the work may be what tells it first."""
        task = asyncio.ensure_future(work)
        both: set[asyncio.Future[Any]] = {task, self.gone}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and task.exception() is None:
            return task.result()
        task.cancel()
        await asyncio.wait(both, timeout=1)
        if self.gone.done():
            raise Lost(self.gone.result())
        return task.result()


def say(what: str) -> None:
    print(what, flush=True)


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(NUM_INPUTS, 32), torch.nn.Tanh(), torch.nn.Linear(32, NUM_ACTIONS))


# The trainer: houses the queue, trains, publishes.


async def be_trainer(listen: TcpAddress, num_steps: int, nodes_to_start: int) -> None:
    torch.manual_seed(0)
    model, consumer, secret = make_model(), Peer(), os.environ[TOKEN].encode()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    manifest = describe(model.state_dict().items())
    with tempfile.TemporaryDirectory(prefix="psrl") as folder, NodeSegments(f"{folder}/segments") as segments:
        segments.create_queue(QUEUE_PLAN)
        segment = segments.create_weights(manifest.total_bytes)
        async with (
            Bulk(LinkEndpoint("tcp", name="trainer", host=listen.host, token=secret)) as bulk,
            Runtime("trainer", listen=listen, token=Token(secret)) as runtime,
        ):
            node = await QueueNode.host(runtime, segments, bulk, on_client_ended=consumer.ended)
            queue = await node.connect("trainer")
            await queue.kv_put("run", "plan", tag={"steps": num_steps})
            weights = WeightClient(segment, manifest, "trainer")
            await weights.publish(Version(0), model.state_dict().items())
            server = runtime.spawn("weights", ParameterServer("trainer", segment, manifest, bulk))
            assert isinstance(runtime.address, TcpAddress)
            say(f"trainer: process {os.getpid()}, listens at {runtime.address.host}:{runtime.address.port}")
            async with started_consumer(runtime.address, folder, nodes_to_start):
                # The consumer says that it is there by a row, whose tag says where its node's weights are served.
                joined = await queue.get_meta([], 1, "members", task_name="trainer", timeout_s=PATIENCE_S)
                (member,) = joined.tags
                if is_far := member["node"] != 0:
                    address = TcpAddress(member["host"], member["port"])
                    there = await runtime.connect(ParameterServer, "weights", address)
                    runtime.watch(there, consumer.ended)
                    broadcaster = Broadcaster({"trainer": server, "consumer": there})
                try:
                    await train(model, optimizer, num_steps, queue, weights, broadcaster if is_far else None, consumer)
                except Lost as lost:
                    newest = weights.store.newest()
                    say(f"trainer: the consumer is gone: {lost}; the last version is {newest and newest.version}")
                    if is_far:
                        rows = await node.controller.leave_node(LeaveNode(member["node"]))
                        say(f"trainer: its node had {rows.num_rows} rows")
                    else:
                        rows_here = (await queue.kv_list("train"))["train"]
                        say(f"trainer: {len(rows_here)} of its rows are here, whole")
                    raise
                await queue.kv_put("end", "plan", tag={"version": num_steps})
                await asyncio.wait_for(consumer.gone, PATIENCE_S)  # in order, after it has read that


async def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    queue: TransferQueue,
    weights: WeightClient,
    broadcaster: Broadcaster | None,
    consumer: Peer,
) -> None:
    for step in range(num_steps + 1):
        if broadcaster is not None:
            await consumer.unless_gone(broadcast(broadcaster, Version(step)))
        if step == num_steps:
            break
        drawing = queue.get_meta(FIELDS, ROWS_PER_STEP, "train", task_name="update", timeout_s=PATIENCE_S)
        batch = await consumer.unless_gone(drawing)
        columns = await consumer.unless_gone(queue.kv_batch_get_by_meta(batch, layout="jagged"))
        tensors = [as_torch(columns[field].values) for field in FIELDS]
        reward = await asyncio.to_thread(update, model, optimizer, *tensors)  # the loop goes on meanwhile
        await queue.kv_clear(batch.keys, "train")
        await weights.publish(Version(step + 1), model.state_dict().items())
        if (step + 1) % 10 == 0 or step + 1 == num_steps:
            age = max(step - tag["version"] for tag in batch.tags)
            say(f"trainer: step {step + 1}, mean reward {reward:.3f}, rows up to {age} versions old")


async def broadcast(broadcaster: Broadcaster, version: Version) -> None:
    """To the other node, which gets it whole or not at all."""
    report = await broadcaster.broadcast("trainer", Epoch(0), version, PATIENCE_S)
    report.require_all()


def update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    contexts: torch.Tensor,
    actions: torch.Tensor,
    rewards: torch.Tensor,
) -> float:
    """One step of REINFORCE. The rows' values come one after the other, without padding."""
    log_probs = model(contexts).log_softmax(-1).gather(1, actions[:, None])[:, 0]
    loss = -((rewards - rewards.mean()) * log_probs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(rewards.mean())


@contextlib.asynccontextmanager
async def started_consumer(trainer: TcpAddress, folder: str, nodes: int) -> AsyncIterator[None]:
    """The consumer's process, on one or two `nodes`; with 0 somebody else starts it."""
    if nodes == 0:
        yield
        return
    shared = ["--segments", folder] if nodes == 1 else []
    where = ["consumer", "--trainer", f"{trainer.host}:{trainer.port}", *shared]
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, *where)
    try:
        yield
        await asyncio.wait_for(process.wait(), PATIENCE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# The consumer: acts with the newest weights, puts what came of it.


async def be_consumer(trainer_at: TcpAddress, folder: str | None, host: str) -> None:
    model, trainer, secret = make_model(), Peer(), os.environ[TOKEN].encode()
    manifest = describe(model.state_dict().items())
    async with contextlib.AsyncExitStack() as stack:
        bulk = await stack.enter_async_context(Bulk(LinkEndpoint("tcp", name="consumer", host=host, token=secret)))
        runtime = await stack.enter_async_context(Runtime("consumer", listen=TcpAddress(host, 0), token=Token(secret)))
        if folder is not None:  # the trainer's node: its memory
            source = SegmentSource(f"{folder}/segments")
            node, segment = await QueueNode.attach(runtime, source, trainer_at), source.fetch(WEIGHTS)
            member: dict[str, Any] = {"node": 0}
        else:  # a node of its own: the same parts once more
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="psrl"))
            segments = stack.enter_context(NodeSegments(f"{own}/segments"))
            segments.create_queue(QUEUE_PLAN)
            segment = segments.create_weights(manifest.total_bytes)
            runtime.spawn("weights", ParameterServer("consumer", segment, manifest, bulk))
            node = await stack.enter_async_context(QueueNode.join(runtime, segments, trainer_at, 1, bulk))
            assert isinstance(runtime.address, TcpAddress)
            member = {"node": 1, "host": host, "port": runtime.address.port}
        runtime.watch(node.controller, trainer.ended)
        queue = await node.connect("consumer")
        weights = WeightClient(segment, manifest, "consumer")
        say(f"consumer: process {os.getpid()}, node {member['node']}")
        try:
            await queue.kv_put("consumer", "members", tag=member)
            await consume(model, queue, weights, trainer)
        except Lost as lost:
            say(f"consumer: the trainer is gone: {lost}; the queue is gone with it")
            newest = weights.store.newest()
            say(f"consumer: the last version here is {newest and newest.version}, whole")
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)  # a socket's name, which a killed trainer leaves
            raise


async def consume(model: torch.nn.Module, queue: TransferQueue, weights: WeightClient, trainer: Peer) -> None:
    """Make a batch for each step, with weights at most one version older than those that it trains."""
    rng, num_steps = np.random.default_rng(0), (await queue.kv_list("plan"))["plan"]["run"]["steps"]
    for number in itertools.count():
        version = await trainer.unless_gone(pull(weights, model, Version(max(0, number - 1))))
        rows = [act(model, rng) for _ in range(ROWS_PER_STEP)]
        if version == num_steps:
            reward = np.concatenate([row["rewards"] for row in rows]).mean()
            say(f"consumer: version {version}, mean reward {reward:.3f}")
            await trainer.unless_gone(queue.kv_batch_get(["end"], "plan", timeout_s=PATIENCE_S))
            return
        keys = [f"{number}-{i}" for i in range(ROWS_PER_STEP)]
        await trainer.unless_gone(queue.kv_batch_put(keys, "train", rows, [{"version": version}] * len(keys)))


async def pull(weights: WeightClient, model: torch.nn.Module, at_least: Version) -> Version:
    """The newest version, into the model."""
    async with weights.pull(at_least, PATIENCE_S) as pulled:
        model.load_state_dict(dict(pulled.tensors))
        return pulled.version


def act(model: torch.nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A row: some contexts, the actions that the policy draws for them, and 1 for each that was right."""
    contexts = rng.standard_normal((rng.integers(4, 33), NUM_INPUTS)).astype(np.float32)
    with torch.no_grad():
        actions = torch.distributions.Categorical(logits=model(torch.from_numpy(contexts))).sample().numpy()
    right = contexts.reshape(len(contexts), NUM_ACTIONS, -1).sum(2).argmax(1)
    return {"contexts": contexts, "actions": actions, "rewards": (actions == right).astype(np.float32)}


def address_of(text: str) -> TcpAddress:
    host, _, port = text.rpartition(":")
    return TcpAddress(host, int(port))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["both", "trainer", "consumer"], default="both")
    parser.add_argument("--nodes", type=int, choices=[1, 2], default=1, help="of both")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--listen", type=address_of, default=TcpAddress("127.0.0.1", 0), help="HOST:PORT of the trainer"
    )
    parser.add_argument("--trainer", type=address_of, help="HOST:PORT, for the consumer")
    parser.add_argument("--host", default="127.0.0.1", help="of the consumer, as the trainer reaches it")
    parser.add_argument("--segments", help="the trainer's folder, for a consumer on its node")
    options = parser.parse_args()
    if options.role == "both":
        os.environ.setdefault(TOKEN, secrets.token_hex(32))
    if TOKEN not in os.environ:
        parser.error(f"both processes need the same {TOKEN} in their environment")
    try:
        if options.role == "consumer":
            asyncio.run(be_consumer(options.trainer, options.segments, options.host))
        else:
            asyncio.run(be_trainer(options.listen, options.steps, options.nodes if options.role == "both" else 0))
    except Lost:
        return 1
    except PsrlError as error:
        say(f"{options.role}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
