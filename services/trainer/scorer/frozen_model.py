"""A frozen model in one process: log-probs of packed samples, without gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers.utils.logging import disable_progress_bar

from services.trainer.batches.packing import Pack
from services.trainer.model.attention import packed_inputs, register_packed_attention
from services.trainer.model.idle_pack import idle_pack
from services.trainer.model.model_loading import load_frozen
from services.trainer.model.precision import compute_dtype, computing_in
from services.trainer.model.ranks import Ranks
from services.trainer.model.token_logprobs import TokenLogprobs


class FrozenModel:
    """Computes what a trainer's reference would, by the same code."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        num_threads: int = 1,
    ) -> None:
        """Loads the model.

        Raises:
            UnsupportedModelError: Packed rows would not compute the model's own function.
            OSError: The directory does not hold a model.
        """
        # Progress bars that redraw themselves garble a service's log.
        disable_progress_bar()
        torch.set_num_threads(num_threads)
        register_packed_attention()
        ranks = Ranks()
        self._device = ranks.device(device)
        self._dtype = compute_dtype(dtype, path=path, device=self._device)
        self._model = load_frozen(path, computing=self._dtype, device=self._device, ranks=ranks)
        self.vocab_size = int(self._model.get_input_embeddings().weight.shape[0])
        self.max_sequence_length = int(self._model.config.get_text_config().max_position_embeddings)
        with torch.no_grad(), computing_in(self._dtype, self._device):
            inputs = packed_inputs(idle_pack(self.vocab_size), self._device)
            self._token_logprobs = TokenLogprobs(self._model, inputs=inputs)

    def logprobs(self, pack: Pack) -> npt.NDArray[np.float32]:
        """Log-probs of the pack's loss tokens, float32[N], nats, at the pack's temperatures."""
        with torch.no_grad(), computing_in(self._dtype, self._device):
            found = self._token_logprobs.of(
                self._model,
                packed_inputs(pack, self._device),
                positions_n=torch.from_numpy(pack.logit_positions).to(self._device),
                targets_n=torch.from_numpy(pack.target_ids).to(self._device),
                temperatures_n=(
                    None if pack.temperatures is None else torch.from_numpy(pack.temperatures).to(self._device)
                ),
            )
        logprobs: npt.NDArray[np.float32] = found.cpu().numpy()
        return logprobs
