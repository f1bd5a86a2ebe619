"""Token shards of a run over real gRPC: their owners, their documents, and a run that is spread over several."""
