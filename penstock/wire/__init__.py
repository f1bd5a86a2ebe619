"""Values on the wire: arrays, packed groups, pieces of large groups, sampling parameters, audit documents.

Encoding and checks of messages. No call is made here.
"""
