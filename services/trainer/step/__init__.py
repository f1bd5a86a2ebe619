"""One step of a run: advantages, gradient passes as groups arrive, optimiser steps.

No network, no files and no publication: `run` drives it.
"""
