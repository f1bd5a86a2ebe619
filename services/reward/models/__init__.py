"""What can score: the built-in rules, one a file, a user's function, and a model behind gRPC."""
