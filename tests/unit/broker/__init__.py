"""The broker's rules and state without gRPC; `builders.py` makes runs to try them on."""
