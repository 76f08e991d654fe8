"""Scores: built-in rules and the user's functions, judged in processes that may be killed; raw and shaped apart."""

from psrl.reward.plan import RewardPlan
from psrl.reward.process import verify
from psrl.reward.worker import RewardWorker

__all__ = ["RewardPlan", "RewardWorker", "verify"]
