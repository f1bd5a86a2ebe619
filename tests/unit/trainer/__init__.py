"""The trainer without services; `builders.py` makes samples, groups and backends."""
