"""What clients make of what services say, without gRPC."""
