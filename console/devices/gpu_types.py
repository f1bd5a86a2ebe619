"""Names GPUs as planning problems and cost models do: H100, A100-80, L4."""

from __future__ import annotations

import re

KNOWN = ("H200", "H100", "H800", "H20", "A100-80", "A100-40", "L40S", "L4", "RTX4090")
"""Names by which cost models know efficiencies (`services.scheduler.problem.problem`)."""
_LARGE_A100_GB = 60


def type_of(product: str, memory_bytes: float) -> str:
    """The GPU type of a product as nvidia-smi names it: H100 for "NVIDIA H100 80GB HBM3"; MIG instances keep theirs."""
    plain = product.removeprefix("NVIDIA ").removeprefix("GeForce ").replace("RTX 4090", "RTX4090")
    # "L40S" is no "L40"; "H100" may be followed by "-" or a space.
    word = re.split(r"[ -]", plain.removeprefix("Tesla "), maxsplit=1)[0]
    if word not in (*KNOWN, "A100") or " MIG " in product:
        return plain
    if word == "A100":
        return "A100-80" if memory_bytes / 1e9 > _LARGE_A100_GB else "A100-40"
    return word
