"""What each process of a run does: one module per role, with `async def run(spec, name)` (the trainer: plain `run`).

A role builds its own part of the system from the spec and returns when it is done or told to stop. Heavy imports stay
in its module, so that only replicas and trainer load torch.
"""
