"""What is known about a run and how it is shown: on a terminal, in charts and in the report.

Filled by others; nothing here connects to a service of a run that is under way, except to ask for length forecasts.
"""
