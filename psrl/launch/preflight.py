"""What can be known about this machine before anything starts: ports, folders, room, limits.

Each function returns sentences, one a problem, naming the key or limit to change; none of them leaves anything behind.
`psrl.config.rules` has the rules between keys; `psrl.launch.plan` adds what data and model need.
"""

import os
import resource
import shutil
import tempfile
from pathlib import Path

from psrl.actor.unix import MAX_PATH_BYTES
from psrl.config.schema import Config
from psrl.launch.ports import port_problem
from psrl.launch.run_lock import holder_problem

_DEPLOYMENT = "psrl.deployment"
_DIR_KEY = "trainer.default_local_dir"


def machine_problems(config: Config, *, shared_bytes: int | None = None, disk_bytes: int = 1 << 26) -> list[str]:
    """Everything here, all at once. `shared_bytes`: arena and weight slots together, if they are known already;
    `disk_bytes`: what the run directory must take (checkpoints, logs).
    """
    problems = [*port_problems(config), *cpu_problems(config), *descriptor_problems(config)]
    problems += temp_dir_problems()
    folder = run_dir_problems(config)
    problems += folder or disk_problems(config, disk_bytes)
    if shared_bytes is not None:
        problems += memory_problems(shared_bytes, config.transfer_queue.arena_bytes)
    return problems


def port_problems(config: Config) -> list[str]:
    """Ports that the config names and others hold. 0 is picked by the kernel when it is needed."""
    deployment = config.psrl.deployment
    asked = [(f"{_DEPLOYMENT}.master_port", deployment.master_port)] if deployment.master_port else []
    if deployment.rollout_port:
        ports = range(deployment.rollout_port, deployment.rollout_port + deployment.n_rollout_instances)
        asked += [(f"{_DEPLOYMENT}.rollout_port", port) for port in ports]
    return [
        f"{key}: {problem}; choose another, or 0 for a free one"
        for key, port in asked
        if (problem := port_problem(port)) is not None
    ]


def run_dir_problems(config: Config) -> list[str]:
    """Can the run directory be made and written, and is no other run in it?"""
    folder = Path(config.trainer.default_local_dir)
    try:
        above = _existing(folder)
    except OSError as error:  # a name that is too long, say
        return [f"{_DIR_KEY}={folder}: {error.strerror}"]
    if not above.is_dir():
        return [f"{_DIR_KEY}={folder}: {above} is a file, not a folder"]
    try:
        with tempfile.TemporaryFile(dir=above) as probe:
            probe.write(b"x")
    except OSError as error:
        return [f"{_DIR_KEY}={folder}: {above} cannot be written: {error.strerror}"]
    held = holder_problem(folder)
    return [held] if held else []


def temp_dir_problems() -> list[str]:
    """Sockets lie in a private folder there, and the kernel limits their paths."""
    folder, room = tempfile.gettempdir(), MAX_PATH_BYTES - len("/psrl-12345678/replica-999-4194304.sock")
    size = len(os.fsencode(folder))
    if size > room:
        return [f"TMPDIR={folder} has {size} bytes, sockets in it allow {room}; set TMPDIR to a folder like /tmp"]
    return []


def disk_problems(config: Config, needed_bytes: int) -> list[str]:
    """Is there room where the run directory is?"""
    folder = _existing(Path(config.trainer.default_local_dir))
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        return [f"{_DIR_KEY}: {folder} has {_mib(free)} free, the run needs {_mib(needed_bytes)}"]
    return []


def memory_problems(needed_bytes: int, arena_bytes: int | None) -> list[str]:
    """Can this many bytes of shared memory be touched, by free memory and by every memory cgroup above this process?

    `arena_bytes` is the setting; None: derived from the sizes of batch and rows.
    """
    from psrl._core import memory_available

    available = memory_available()
    if available < needed_bytes:
        remedy = (
            "lower data.train_batch_size, psrl.rollout_n, psrl.staleness, data.max_response_length or the rows of "
            "data.val_files (data.val_max_samples)"
            if arena_bytes is None
            else f"lower transfer_queue.arena_bytes={arena_bytes}, or leave it null for what is needed"
        )
        return [f"the run needs {_mib(needed_bytes)} of shared memory and {_mib(available)} can be had; {remedy}"]
    return []


def cpu_problems(config: Config) -> list[str]:
    """More torch threads than CPUs make each process several times slower, not faster."""
    threads, cpus = config.psrl.deployment.threads_per_process, len(os.sched_getaffinity(0))
    if threads > cpus:
        return [f"{_DEPLOYMENT}.threads_per_process={threads} is more than the {cpus} CPUs that this process may use"]
    return []


def descriptor_problems(config: Config) -> list[str]:
    """Sockets, logs and segments of all processes: a rough need against the limit of open files."""
    deployment, agent = config.psrl.deployment, config.gen_actor_rollout_ref.rollout.agent
    num_processes = (
        deployment.n_rollout_instances
        + deployment.train_ngpus_per_node
        + agent.num_workers
        + config.reward.reward_loop_worker.num_workers
    )
    needed, (soft, _) = 64 + 16 * num_processes, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        return [f"the limit of open files is {soft}, {num_processes} processes need about {needed}: ulimit -n {needed}"]
    return []


def _existing(path: Path) -> Path:
    """The nearest part of the path that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
