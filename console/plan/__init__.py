"""Implements `penstock plan` and `penstock simulate`: their results from a problem file, as text and pictures.

Planning itself is in `services.scheduler`, simulation in `simulator`.
"""
