"""The broker: owns every run's trajectory state in Redis and hands it on, each piece exactly once.

The root holds the process, its settings, the gRPC service and `records.proto`, what a store keeps. Imports run one way:
rules, dispatch, ingest <- records <- state <- operations <- stalls <- fleet <- runtime <- assembly <- streams <- root.
"""
