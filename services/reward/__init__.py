"""The reward service: leases finished samples, asks a reward model, returns score and status.

The root holds the process, the worker pool and its settings; what can score is in `models`,
`code` and `judge`; `canaries` tell whether it still scores as it did.
"""
