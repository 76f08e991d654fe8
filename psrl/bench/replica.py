"""An engine's end without an engine: pulls versions and overwrites parameters. Started by the process of its node.

    python -m psrl.bench.replica FD NAME DEVICE < lines

The first line is the manifest. Then `pull V` answers with the seconds of staging and of the pause, `memcpy` with those
of a plain copy of as many bytes in this process, `check` with the checksum of each parameter.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

import numpy as np
import torch

from psrl._core import Segment, WeightStore, chunk_checksums
from psrl.bench.rounds import seconds
from psrl.bench.weight_node import PULL_S
from psrl.types import Version
from psrl.weights.device_copies import DirectCopies, record
from psrl.weights.manifest import Manifest
from psrl.weights.stage import Device, HostRegistration
from psrl.weights.subscribe import WeightSubscriber


class Parameters:
    """What an engine would compute with."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes them once, as an engine loads them, and notes the copies."""
        self._own = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

        def load() -> None:
            for name, tensor in tensors.items():
                self._own[name].copy_(tensor)

        copies = record(load, tensors.items(), self._own.items())
        assert isinstance(copies, DirectCopies), copies
        self._copies = copies

    def overwrite(self) -> None:
        self._copies.apply()

    def checksums(self) -> list[int]:
        return checksums(self._own)


def checksums(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Of all their bytes, in order."""
    return [one for tensor in tensors.values() for one in _of(tensor)]


def _of(tensor: torch.Tensor) -> list[int]:
    return chunk_checksums(tensor.cpu().view(-1).view(torch.uint8).numpy())


def _end_with(parent: int) -> None:
    """A pull may wait for minutes, and meanwhile nobody looks whether the input has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the input says it
    fd, name, where = sys.argv[1:]
    torch.set_num_threads(1)
    manifest = Manifest.decode(bytes.fromhex(sys.stdin.readline()))
    segment, device = Segment.attach(int(fd)), Device(where)
    subscriber = WeightSubscriber(WeightStore.open(segment), manifest, name, device)
    registration = HostRegistration(device, segment, pause_s=0)
    source, target = np.ones(manifest.total_bytes, np.uint8), np.zeros(manifest.total_bytes, np.uint8)
    parameters: Parameters | None = None
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        answer: object
        match line.split():
            case ["pull", version]:
                with subscriber.pull(Version(int(version)), PULL_S) as pulled:
                    if parameters is None:
                        parameters = Parameters(pulled.tensors)
                    answer = [pulled.transfer_s, seconds(parameters.overwrite)]
            case ["memcpy"]:
                answer = seconds(lambda: np.copyto(target, source))
            case _:
                assert parameters is not None
                answer = parameters.checksums()
        print(json.dumps(answer), flush=True)
    registration.close()


if __name__ == "__main__":
    main()
