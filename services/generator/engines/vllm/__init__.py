"""The vLLM engine, and what runs inside vLLM's own processes.

All knowledge of vLLM is here. Its modules are also imported by vLLM by name, from its own processes.
"""
