"""Muon in float32 takes the steps of PyTorch's, but for that one's precision."""

import pytest
import torch

from quickstart.muon import Float32Muon

SETTINGS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01}


@pytest.mark.parametrize("shape", [(64, 64), (48, 192), (192, 48)])
def test_each_step_is_that_of_pytorch(shape):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = [Float32Muon([ours], **SETTINGS), torch.optim.Muon([theirs], **SETTINGS)]
    for _ in range(5):
        before = ours.detach().clone()
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        # bfloat16 has eight bits of precision, and five iterations multiply its error.
        step = (ours - before).norm()
        assert step > 0
        assert (ours - theirs).norm() < 0.05 * step
        with torch.no_grad():
            theirs.copy_(ours)


def test_a_matrix_without_a_gradient_stays():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    Float32Muon([weight], **SETTINGS).step()
    assert torch.equal(weight, torch.ones(4, 4))
