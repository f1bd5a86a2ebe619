"""The life of one run: load, open, publish, evaluate, train, checkpoint and close.

The only folder that talks to the broker. The gRPC service above starts and stops it.
"""
