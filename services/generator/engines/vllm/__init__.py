"""Implements the vLLM engine, and the code that runs inside vLLM's own processes.

All code that depends on vLLM is here. vLLM also imports its modules by name, in its own processes.
"""
