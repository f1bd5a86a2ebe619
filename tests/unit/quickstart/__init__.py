"""The quick start's task: problems, model and warm start."""
