"""Records the experts that the routers of a model choose in each forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.model.routers import Routers
from penstock.wire.routes import Routes


class RouteRecorder:
    """Hooks on a model's routers; the model must have been loaded by `transformers`."""

    def __init__(self, model: Any, routers: Routers) -> None:
        self._shape = routers.shape
        self._chosen: list[torch.Tensor | None] = [None] * self._shape.num_layers
        for place, name in enumerate(routers.module_names):
            model.get_submodule(name).register_forward_hook(self._hook(place))

    def take(self, num_rows: int) -> Routes:
        """What the last forward pass over a batch [num_rows, t] chose, [num_rows, t, layers, experts_per_token]."""
        layers = [ids for ids in self._chosen if ids is not None]
        self._chosen = [None] * len(self._chosen)
        chosen = torch.stack(layers, dim=1).cpu().numpy().astype(self._shape.dtype)
        routes: Routes = chosen.reshape(num_rows, -1, self._shape.num_layers, self._shape.experts_per_token)
        return routes

    def joined(self, parts: list[Routes]) -> Routes:
        """Consecutive rows of one sample."""
        return np.concatenate([self._shape.empty(), *parts])

    def _hook(self, place: int) -> Any:
        def note(_router: object, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
            # Logits, weights and ids, of all positions of the batch.
            self._chosen[place] = output[2]

        return note
