"""PSRL: asynchronous RL post-training with a strict per-trajectory staleness bound."""
