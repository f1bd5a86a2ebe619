"""Lossless deltas between two versions of a model's weights: `blocks` codes one block, `content` a whole version.

Needs zstandard, which only publishers and receivers of weights install; the rest of `penstock` does not import it.
"""
