"""PSManager: versions, staleness ledger and unfinished work; the single authority for admission."""

from psrl.control.control import Control
from psrl.control.effects import Effects, PromptFeed
from psrl.control.log import TrajectoryLog
from psrl.control.manager import PSManager
from psrl.control.settings import ControlSettings, total_steps
from psrl.control.state import ControlState

__all__ = [
    "Control",
    "ControlSettings",
    "ControlState",
    "Effects",
    "PSManager",
    "PromptFeed",
    "TrajectoryLog",
    "total_steps",
]
