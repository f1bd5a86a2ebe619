"""Several brokers on one store, in one process, over real gRPC."""
