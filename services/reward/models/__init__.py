"""The reward models: the built-in rules, one per file, a user's function, and a model behind gRPC."""
