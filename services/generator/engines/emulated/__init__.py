"""The emulated engine: scripted tokens at a stated speed.

The interface only; how long steps take and what fits is computed in `services.generator.emulation`.
"""
