"""The other side of bench_queue.py's batch case: the package `transferqueue` with its SimpleStorage.

Started by bench_queue.py --against DIR. Reads `put`, `get`, `one`, `clear`, one a line, and says the seconds of each.
One storage unit, so that there are as many processes that handle the data as on our side: controller, storage, client.
"""

import json
import sys
import time

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

NUM_SAMPLES, NUM_FIELDS, LENGTH = 1024, 9, 8192


def batch(start: int, end: int, columns: list[torch.Tensor]) -> TensorDict:
    fields = {f"field_{i}": column[start:end] for i, column in enumerate(columns)}
    return TensorDict(fields, batch_size=end - start)


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    torch.manual_seed(0)
    columns = [torch.randn(NUM_SAMPLES, LENGTH) for _ in range(NUM_FIELDS)]
    keys = [str(i) for i in range(NUM_SAMPLES)]
    whole = batch(0, NUM_SAMPLES, columns)
    print("ready", flush=True)
    for line in sys.stdin:
        what, got = line.strip(), None
        start = time.perf_counter()
        if what == "put":
            tq.kv_batch_put(keys=keys, partition_id="train", fields=whole)
        elif what == "get":
            got = tq.kv_batch_get(keys=keys, partition_id="train")
        elif what == "one":
            for i in range(20):
                tq.kv_put(key=f"one{i}", partition_id="train", fields=batch(i, i + 1, columns))
                got = tq.kv_batch_get(keys=[f"one{i}"], partition_id="train")
        elif what == "clear":
            tq.kv_clear(keys=keys + [f"one{i}" for i in range(20)], partition_id="train")
        took = time.perf_counter() - start
        if got is not None:
            assert got["field_8"].numel() == LENGTH * len(got), got["field_8"].shape
        print(json.dumps(took / 20 if what == "one" else took), flush=True)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
