"""The generators and reward workers of a run as dispatch sees them, and work stealing between generators.

Hints that may be lost. The policies themselves are in `dispatch`; decisions are kept in the run's records.
"""
