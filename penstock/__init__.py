"""What every Penstock process and every outside client imports: the contract, its stubs, and small shared tools.

Light by rule: importing it must not bring in torch, vllm, transformers, redis or ortools.
"""

__version__ = "0.1.0"
