"""A critic's own process: its calls, its folder and its past."""
