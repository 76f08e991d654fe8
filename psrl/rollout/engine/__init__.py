"""Inference engines. They live in replica processes only; `base` is what a replica needs of one."""
