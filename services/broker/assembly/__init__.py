"""Assembles stored records and payload into the messages that the broker sends.

Reading, framing and splitting, with bounded memory. `operations` decides which groups are sent, and when.
"""
