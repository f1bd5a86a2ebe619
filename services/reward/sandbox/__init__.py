"""A process that runs programs for reward workers elsewhere, in the cells of `services.reward.code`."""
