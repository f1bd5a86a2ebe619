"""Manages run folders: which may be used, which run one contains, and the run that a restarted trainer continues.

Small files of the trainer's own. Checkpoints and weights have folders of their own.
"""
