"""Implements the emulated engine: scripted tokens at a stated speed.

Only the engine interface; step times and capacity are computed in `services.generator.emulation`.
"""
