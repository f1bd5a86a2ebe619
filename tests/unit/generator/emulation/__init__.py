"""The emulated engine and the GPU that it emulates."""
