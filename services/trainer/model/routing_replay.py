"""Replays recorded routes: the experts of each token are those that an engine chose, not the router's own.

An engine rounds differently, so its routers choose other experts for some tokens, and the log-probs of those differ by
far more than rounding does. Replayed, both compute the same function again. Only the choice is replayed: the weights of
the chosen experts are computed from this router's own logits, all of them, so that gradients reach it.

Source: R3 (arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.routers import Routers
from penstock.wire.routes import Routes


class RoutingReplay:
    """Hooks on the routers of a network; without effect outside of `of`.

    Each hook knows its layer: activations that are computed again visit the layers backwards.

    Args:
        network: A model of `transformers`, perhaps with an adapter around it.
        routers: Its routers.
    """

    def __init__(self, network: nn.Module, routers: Routers) -> None:
        self._routes_tlk: Tensor | None = None
        modules = dict(network.named_modules())
        for place, name in enumerate(routers.module_names):
            [router] = (module for found, module in modules.items() if found == name or found.endswith(f".{name}"))
            router.register_forward_hook(self._hook(place))

    @contextmanager
    def of(self, routes: Routes, device: torch.device) -> Iterator[None]:
        """In the context, passes over a row of T tokens take these experts, [T, layers, experts_per_token]."""
        self._routes_tlk = torch.from_numpy(routes).to(device)
        try:
            yield
        finally:
            self._routes_tlk = None

    def _hook(self, place: int) -> Any:
        def replay(router: Any, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            if self._routes_tlk is None:
                return None
            logits_te, weights_tk, _own_tk = output
            chosen_tk = self._routes_tlk[:, place].long()
            replayed_tk = logits_te.softmax(dim=-1, dtype=torch.float32).gather(1, chosen_tk)
            if router.norm_topk_prob:
                replayed_tk = replayed_tk / replayed_tk.sum(dim=-1, keepdim=True)
            return logits_te, replayed_tk.to(weights_tk.dtype), chosen_tk

        return replay
