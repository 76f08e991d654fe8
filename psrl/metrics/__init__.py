"""Numbers of a run: computed (`data_metrics`, `validation`, `staleness`, `flops`), written (sinks), read (`report`)."""

from psrl.metrics.console import ConsoleSink
from psrl.metrics.jsonl import JsonlReader, JsonlSink
from psrl.metrics.logger import MetricLogger, Sink
from psrl.metrics.wandb_sink import WandbSink

__all__ = ["ConsoleSink", "JsonlReader", "JsonlSink", "MetricLogger", "Sink", "WandbSink"]
