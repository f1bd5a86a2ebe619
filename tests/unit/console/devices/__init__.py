"""Which process of a run gets which GPUs."""
