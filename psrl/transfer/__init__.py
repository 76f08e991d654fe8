"""TransferQueue: rows of ragged arrays, written once where they are made, read as views."""

from psrl.transfer.blocking import BlockingTransferQueue
from psrl.transfer.client import TransferQueue
from psrl.transfer.controller import QueueController
from psrl.transfer.messages import ReleaseClient
from psrl.transfer.meta import KVBatchMeta
from psrl.transfer.storage import StorageActor

__all__ = [
    "BlockingTransferQueue",
    "KVBatchMeta",
    "QueueController",
    "ReleaseClient",
    "StorageActor",
    "TransferQueue",
]
