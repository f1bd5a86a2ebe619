"""Arranges the GPUs of a training pool: in islands, split layers and pipelines, as the trainer can.

Pure functions of a problem and a pool.
"""
