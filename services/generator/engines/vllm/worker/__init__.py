"""Runs inside vLLM's worker processes: loads a version, and reads back what a worker decodes with.

The generator's own process calls it by name through vLLM. What an engine needs outside its workers is one room up.
"""
