"""One trainer in several processes: their group, coordinator, workers and launch, and each rank's backend.

The calls of a backend and how they reach every rank; no broker and no run.
"""
