"""TransferQueue: rows of ragged arrays, written once where they are made, read as views."""

from psrl.transfer.blocking import BlockingTransferQueue
from psrl.transfer.capacity import QueuePlan
from psrl.transfer.client import TransferQueue
from psrl.transfer.controller import QueueController
from psrl.transfer.jagged import Jagged, as_torch
from psrl.transfer.messages import ReleaseClient
from psrl.transfer.meta import KVBatchMeta
from psrl.transfer.node import QueueNode
from psrl.transfer.samplers import (
    GRPOGroupNSampler,
    RankAwareSampler,
    Sampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    StalenessBufferSampler,
)
from psrl.transfer.segments import NodeSegments, SegmentSource
from psrl.transfer.storage import StorageActor

__all__ = [
    "BlockingTransferQueue",
    "GRPOGroupNSampler",
    "Jagged",
    "KVBatchMeta",
    "NodeSegments",
    "QueueController",
    "QueueNode",
    "QueuePlan",
    "RankAwareSampler",
    "ReleaseClient",
    "Sampler",
    "SegmentSource",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StalenessBufferSampler",
    "StorageActor",
    "TransferQueue",
    "as_torch",
]
