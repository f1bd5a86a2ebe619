"""The compiled norms that a CPU engine takes, against vLLM's own in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
EPSILON = 1e-6


@pytest.fixture
def kernels() -> Any:
    platforms = pytest.importorskip("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        pytest.skip("for CPU engines")
    from services.generator.engines.vllm import kernels as penstock_kernels

    return penstock_kernels


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_norms_equal_those_of_pytorch_and_are_taken(kernels: Any, dtype: str, tolerance: float) -> None:
    import torch
    from vllm import ir

    torch.manual_seed(0)
    x, residual = (torch.randn(5, 128).to(getattr(torch, dtype)) for _ in range(2))
    weight = torch.rand(128).to(x.dtype)
    for op, tensors in ((ir.ops.rms_norm, (x,)), (ir.ops.fused_add_rms_norm, (x, residual))):
        with op.set_priority(kernels.PRIORITY[op.name]):
            assert op.dispatch(*tensors, weight, EPSILON).provider == kernels.PROVIDER
        expected = op.impls["native"].impl_fn(*(tensor.clone() for tensor in tensors), weight, EPSILON)
        found = op.impls[kernels.PROVIDER].impl_fn(*(tensor.clone() for tensor in tensors), weight, EPSILON)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_what_the_kernels_cannot_take_goes_to_pytorch(kernels: Any) -> None:
    import torch
    from vllm import ir

    whole, weight = torch.randn(4, 128), torch.ones(128)
    cases = {
        "rows apart": (torch.randn(4, 256)[:, :128], weight, EPSILON),
        "not a whole vector": (torch.randn(4, 40), torch.ones(40), EPSILON),
        "another type of weight": (whole, weight.bfloat16(), EPSILON),
        "no weight": (whole, None, EPSILON),
        "variance of a part": (whole, weight, EPSILON, 64),
    }
    with ir.ops.rms_norm.set_priority(kernels.PRIORITY["rms_norm"]):
        assert {name: ir.ops.rms_norm.dispatch(*args).provider for name, args in cases.items()} == dict.fromkeys(
            cases, "native"
        )
