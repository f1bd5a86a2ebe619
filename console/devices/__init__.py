"""GPUs of this machine: what `nvidia-smi` reports, which process of a run gets which, and the table that shows it.

`allocation` is pure; only `nvidia_smi` asks the driver, and only `gpu_claims` writes anything.
"""
