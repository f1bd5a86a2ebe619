"""Keeps the state of a run and shows it: on a terminal, in charts and in the report.

Other packages fill in the state; nothing here connects to a service of a run, except to ask for length forecasts.
"""
