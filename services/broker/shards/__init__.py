"""Token shards: the tokens of a run's samples under way, in documents of their own beside the run.

A shard accepts chunks and tells the run, its *core*, what came of them. Which broker owns which shard, and the network
between them, is not known here.
"""
