"""The parameter server of one node: versions of the weights in shared memory.

`manifest` and `store` need no torch, so that the head can commit; `publish` and `subscribe` are the torch ends.
"""
