"""Training: advantages, losses, packing, the sharded policy, checkpoints, and the loop that joins them."""
