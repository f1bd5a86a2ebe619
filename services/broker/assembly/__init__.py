"""Stored records and payload, assembled into the messages that leave the broker.

Reading, framing and splitting, with bounded memory. Which groups leave, and when, is decided in `operations`.
"""
