"""The engine interface, and what every engine shares: model files, LoRA checks, progress of an installation.

No engine is implemented here (see `engines`), and no broker is known.
"""
