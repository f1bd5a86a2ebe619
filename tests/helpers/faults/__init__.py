"""A run of the broker under faults: what its processes do, when what breaks, and what must hold at the end."""
