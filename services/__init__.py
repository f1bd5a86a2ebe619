"""The five services; each runs alone and none imports another.

What two of them share lives in `penstock`. A service's root holds its entry points and its settings.
"""
