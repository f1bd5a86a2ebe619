"""Token shards and how a run reaches them."""
