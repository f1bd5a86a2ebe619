"""Runs inside one broker process: replicas, transactions, expiry, retention, metrics and caches.

Everything with a clock or a background task that is not one client's stream. No decoding of requests.
"""
