"""Models emulated GPUs: step times, memory capacity and completion lengths.

Pure arithmetic on a virtual clock; no engine, threads or network.
"""
