"""The generator: leases prompts, decodes them with an engine, streams tokens back, takes new weights in flight."""
