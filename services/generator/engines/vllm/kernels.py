"""Registers vLLM's own compiled kernels for the norms of a CPU engine.

vLLM compiles `rms_norm` and `fused_add_rms_norm` for CPUs too, but does not let CPU engines use them: since nothing
else compiles the norms (`process_setup.cpu_environment`), each is seven PyTorch operations. The kernels are registered
as the first provider of these operations; inputs that they do not support still go to PyTorch.

Imports vLLM, so import this only once the engine starts, in its process and in the one that configures it.
"""

from __future__ import annotations

import torch
from vllm import ir
from vllm.platforms import current_platform

PROVIDER = "penstock"
PRIORITY = {"rms_norm": [PROVIDER, "native"], "fused_add_rms_norm": [PROVIDER, "native"]}
"""vLLM's setting `ir_op_priority` for a CPU engine."""
_MULTIPLE = 32
"""The kernels work on whole vectors; the longest, of bfloat16 on AVX-512, has this many elements."""

current_platform.import_kernels()
_IS_THERE = current_platform.is_cpu() and hasattr(torch.ops._C, "fused_add_rms_norm")


def _takes(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.shape[-1] % _MULTIPLE == 0
        and x.is_contiguous()
    )


def _takes_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _takes(x, weight, variance_size)


def _takes_fused(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _takes(x, weight, variance_size) and x_residual.dtype == x.dtype and x_residual.is_contiguous()


# Names, types and defaults below are vLLM's, which compares them.
@ir.ops.rms_norm.register_impl(PROVIDER, supported=_IS_THERE, supports_args=_takes_norm)  # type: ignore[untyped-decorator]
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """The norm of each row of x, [..., hidden], times the weight, [hidden]."""
    output = torch.empty_like(x)
    torch.ops._C.rms_norm.default(output, x, weight, epsilon)
    return output


@ir.ops.fused_add_rms_norm.register_impl(  # type: ignore[untyped-decorator]
    PROVIDER, supported=_IS_THERE, supports_args=_takes_fused, inplace=True
)
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + x_residual, in place of x, and that sum, in place of x_residual; both [..., hidden]."""
    torch.ops._C.fused_add_rms_norm.default(x, x_residual, weight, epsilon)
    return x, x_residual
