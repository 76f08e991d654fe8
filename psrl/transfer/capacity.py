"""How large the queue's arena must be so that no put can wait for ever. Pure.

A row becomes two records: what generation makes, then its score; the trainer adds one record to each row of the batch
in hand. In the worst case each record alone keeps an extent from being given back (extents are given back whole). So an
arena with one extent for each record that may live, and those that writers hold open, cannot fill up while the ledger
keeps its bound. With extents as large as the largest row, that costs little more than the rows themselves.
"""

import msgspec

from psrl.errors import ConfigError

EXTENTS_PER_GRANT = 4
"""A writer asks for so many at once, and may hold as many open."""

PAGE_BYTES = 4096
MIN_EXTENT_BYTES = 16 * 1024
MAX_CLIENTS = 64

PROMPT_TOKEN_BYTES = 4  # prompts
RESPONSE_TOKEN_BYTES = 4 + 4 + 4 + 4  # responses, rollout_log_probs, rollout_versions; and response_mask, mixed_cache
LATE_TOKEN_BYTES = 5 * 4  # old_log_probs, advantages; and room for ref_log_prob, values, returns
RECORD_BYTES = 2048  # header, description, alignment of a dozen fields, a tag
EXTRA_ROW_BYTES = 2048  # text that rewards or environments add

TABLE_BYTES_PER_EXTENT = 64 + 8 * MAX_CLIENTS
TABLE_BYTES = 4096 + 128 * MAX_CLIENTS + 4096


class QueueLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a run keeps in the queue at most. Lengths in tokens."""

    staleness: int
    prompts_per_step: int
    rollout_n: int
    validation_rows: int
    max_prompt_length: int
    max_response_length: int
    num_writers: int  # agent loop workers, trainer ranks, head

    @property
    def train_rows(self) -> int:
        return (self.staleness + 1) * self.prompts_per_step * self.rollout_n

    @property
    def batch_rows(self) -> int:
        return self.prompts_per_step * self.rollout_n


class QueuePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes for NodeSegments.create_queue. `arena_bytes` holds `num_extents` extents and the tables."""

    arena_bytes: int
    extent_bytes: int
    num_extents: int
    max_clients: int = MAX_CLIENTS

    @classmethod
    def of(cls, num_bytes: int, extent_bytes: int = 1 << 20) -> "QueuePlan":
        """Room for about so many bytes of rows. A row should fit into an extent; each writer holds some open."""
        num_extents = max(EXTENTS_PER_GRANT, num_bytes // extent_bytes)
        arena_bytes = num_extents * (extent_bytes + TABLE_BYTES_PER_EXTENT) + TABLE_BYTES
        return cls(arena_bytes=arena_bytes, extent_bytes=extent_bytes, num_extents=num_extents)


def row_bytes(load: QueueLoad) -> int:
    """The largest record that generation writes."""
    tokens = load.max_prompt_length * PROMPT_TOKEN_BYTES + load.max_response_length * RESPONSE_TOKEN_BYTES
    return tokens + RECORD_BYTES + EXTRA_ROW_BYTES


def late_bytes(load: QueueLoad) -> int:
    """The largest record that the trainer adds to a row."""
    return load.max_response_length * LATE_TOKEN_BYTES + RECORD_BYTES


def default_extent_bytes(load: QueueLoad) -> int:
    """One largest record, in whole pages."""
    largest = max(row_bytes(load), late_bytes(load), MIN_EXTENT_BYTES)
    return -(-largest // PAGE_BYTES) * PAGE_BYTES


def num_extents_needed(load: QueueLoad, extent_bytes: int) -> int:
    """Extents with which no admitted row can be kept waiting by others that wait for it."""
    per_row = _extents(row_bytes(load), extent_bytes) + 1  # the score's record
    rows = (load.train_rows + load.validation_rows) * per_row
    late = load.batch_rows * _extents(late_bytes(load), extent_bytes)
    return rows + late + load.num_writers * EXTENTS_PER_GRANT


def plan_queue(load: QueueLoad, *, arena_bytes: int | None = None, extent_bytes: int | None = None) -> QueuePlan:
    """The sizes to use. Raises ConfigError if the arena asked for holds too little, saying what is needed."""
    extent = default_extent_bytes(load) if extent_bytes is None else extent_bytes
    if extent <= 0 or extent % PAGE_BYTES:
        raise ConfigError(f"transfer_queue.extent_bytes = {extent} must be a positive multiple of {PAGE_BYTES}")
    if load.num_writers > MAX_CLIENTS:
        raise ConfigError(
            f"{load.num_writers} processes write to the queue, which has places for {MAX_CLIENTS}; lower "
            "gen_actor_rollout_ref.rollout.agent.num_workers or psrl.deployment.train_ngpus_per_node"
        )
    num_extents = num_extents_needed(load, extent)
    needed = num_extents * (extent + TABLE_BYTES_PER_EXTENT) + TABLE_BYTES
    if arena_bytes is None:
        return QueuePlan(arena_bytes=needed, extent_bytes=extent, num_extents=num_extents)
    if arena_bytes < needed:
        raise ConfigError(
            f"transfer_queue.arena_bytes = {arena_bytes} is too small: psrl.staleness = {load.staleness} with "
            f"{load.prompts_per_step} prompts of {load.rollout_n} responses a step, {load.validation_rows} validation "
            f"rows and extents of {extent} bytes need {needed}; set it to null, or lower transfer_queue.extent_bytes"
        )
    num_extents = (arena_bytes - TABLE_BYTES) // (extent + TABLE_BYTES_PER_EXTENT)
    return QueuePlan(arena_bytes=arena_bytes, extent_bytes=extent, num_extents=num_extents)


def _extents(num_bytes: int, extent_bytes: int) -> int:
    return -(-num_bytes // extent_bytes)
