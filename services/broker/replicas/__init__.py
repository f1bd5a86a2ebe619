"""Keeps copies of versioned documents in memory and changes them by transactions that commit to the store.

Knows the store's commits and conflicts; what a document holds, and who listens to it, belongs to the layers above.
"""
