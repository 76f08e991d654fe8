"""Model directories that need no download. torch is imported inside the functions only."""

from psrl.data.models.smollm2 import smollm2
from psrl.data.models.tiny import tiny

__all__ = ["smollm2", "tiny"]
