"""Prepares samples for the model: decoding, packing, partition between ranks, replay.

Data only: nothing here runs a model or calls the broker.
"""
