"""Implements `penstock run` and `penstock quickstart`: checks, starts, follows, records, stops and reports a run.

`console.launch` starts the processes, `console.view` shows the run.
"""
