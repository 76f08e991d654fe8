"""`psrl-bench`: what this machine and this network give to PSRL's parts, beside their own limits."""
