"""One contract for all engines, and what holds for vLLM alone."""
