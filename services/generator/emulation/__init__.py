"""Emulated GPUs: how long steps take, how much fits, how long completions are.

Pure arithmetic on a virtual clock; no engine, no thread and no network.
"""
