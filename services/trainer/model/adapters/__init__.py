"""LoRA adapters: added to a base, trained, merged into it."""
