"""`penstock run` and `status` as processes: followed, interrupted, resumed, refused."""
