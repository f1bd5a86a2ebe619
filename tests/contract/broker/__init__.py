"""BrokerService over real gRPC, on every store; one file a subject."""
