"""Folders of runs: which may be used, which run one holds, and the run that a restarted trainer goes on with.

Small files of the trainer's own. Checkpoints and weights have folders of their own.
"""
