"""BrokerService over real gRPC, on every store, with streams that show signs of life often."""
