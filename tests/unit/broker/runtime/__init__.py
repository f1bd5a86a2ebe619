"""Transactions, loading and metrics of a run in one broker process."""
