"""Generation: engines in replica processes, the gateway that feeds them, the coordinator that syncs them, agent
loops.
"""
