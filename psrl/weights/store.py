"""The three slots of a segment (`csrc/weights`), and who calls what.

    launcher     makes a segment of `required_bytes(manifest.total_bytes)` and formats it
    trainer      begin, put, seal (`psrl.weights.publish`); then tells the head `Publish(version, slot)`
    head         commit as PSManager accepts it; release_client and abandon for processes that died
    replica      acquire, copy and compare, release (`psrl.weights.subscribe`)

A version is visible from its commit on, whole. A push takes the slot that is neither newest nor the one before, so it
waits for no pull: a lease on V - 1 stays good while V + 1 is written, an older one is revoked. A process killed at any
point leaves the version before it whole and newest.
"""

from psrl._core import CommittedWeights, Segment, WeightLease, WeightSlot, WeightStore, WeightTicket

__all__ = ["CommittedWeights", "Segment", "WeightLease", "WeightSlot", "WeightStore", "WeightTicket"]
