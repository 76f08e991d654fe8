"""Make data sets in veRL's parquet format."""

from psrl.data.prepare.arithmetic import arithmetic, sft_examples
from psrl.data.prepare.gsm8k import gsm8k

__all__ = ["arithmetic", "gsm8k", "sft_examples"]
