"""`psrl-bench weight-sync`: from a trainer's tensors to all nodes, and into the parameters of replicas there."""

import argparse
from collections.abc import Sequence
from typing import Any

from psrl.bench.hosts import Host
from psrl.bench.messages import LocalPlan, NodeAt, Outcome, SyncPlan, WeightSetup
from psrl.bench.node import run_nodes, token
from psrl.bench.places import environment_of, hosts_of, receivers_of, settings
from psrl.bench.record import Record, require_possible
from psrl.bench.rounds import Row
from psrl.bench.versions import MODELS, flat_model
from psrl.weights.manifest import Manifest


def weight_sync(options: argparse.Namespace) -> dict[str, Any]:
    models: list[Manifest] = (
        [MODELS[options.model]()] if options.model else [flat_model(int(mib * 2**20)) for mib in options.mib]
    )
    record, rows, transport = Record("weight-sync", settings(options)), list[Row](), ""
    with hosts_of(options) as hosts:
        receivers = receivers_of(options, len(hosts))
        for manifest in models:
            found = _measure(options, hosts, receivers, manifest)
            rows += found.rows
            transport = found.transport
    if options.gbit is not None:
        require_possible(rows, options.gbit)
    return record.finish(rows, transport)


def _measure(options: argparse.Namespace, hosts: Sequence[Host], receivers: list[int], manifest: Manifest) -> Outcome:
    local = options.transport == "shm"
    shared = {
        "token": token(),
        "transport": options.transport,
        "manifest": manifest.encode(),
        "device": options.device,
        "environment": environment_of(options),
    }
    setups = [
        WeightSetup(
            name=host.name,
            host=host.address,
            num_replicas=max(options.replicas, 1) if local else options.replicas * (i > 0),
            **shared,
        )
        for i, host in enumerate(hosts)
    ]

    def plan(peers: tuple[NodeAt, ...]) -> SyncPlan | LocalPlan:
        if local:
            return LocalPlan(lr=options.lr, rounds=options.rounds)
        return SyncPlan(
            peers=peers,
            receivers=tuple(receivers),
            replicas=options.replicas,
            topologies=tuple(options.topology),
            modes=tuple(options.mode),
            lr=options.lr,
            rounds=options.rounds,
        )

    return run_nodes(hosts, setups, plan, python=options.python, timeout_s=options.timeout_s)
