"""The generator: leases prompts, decodes them with an engine, streams tokens back, takes new weights in flight.

The root holds the process, its settings, metrics and gRPC service. `engine` is the interface of everything that
decodes, `engines` are its implementations.
"""
