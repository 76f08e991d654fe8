"""Prompts: data sets read and checked, drawn in a resumable order, tokenised without torch."""

from psrl.data.dataset import Counts, PromptDataset, RewardRow
from psrl.data.feed import PromptFeed
from psrl.data.sampler import Order, Position, Sampler
from psrl.data.tokenizer import ChatTokenizer

__all__ = ["ChatTokenizer", "Counts", "Order", "Position", "PromptDataset", "PromptFeed", "RewardRow", "Sampler"]
