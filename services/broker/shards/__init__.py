"""Token shards: the tokens of a run's samples under way, in documents of their own beside the run.

A shard accepts chunks and reports the results to the run, its *core*. Which broker owns which shard, and the network
between them, is not known here.
"""
