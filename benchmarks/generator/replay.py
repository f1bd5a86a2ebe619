"""Recomputes the log-probs of finished samples with plain transformers, under each version they name.

For a token sampled by version v, two numbers:

- *replayed*: what v's weights give over the KV cache that the engine had: recomputed by v if it was loaded in mode
  `recompute`, left from earlier versions if in mode `keep`. Unless the engine agrees, a version is wrong.
- *fresh*: what v's weights give over a context that v itself has read, as a trainer computes it. Its difference from
  the engine's is the gap caused by keeping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

Floats = npt.NDArray[np.float64]


class Replayer:
    """Keeps every version's model.

    Args:
        model_path: The model's folder.
        version_files: The weights of each version.
        recomputed: Versions that were loaded in mode `recompute`.
    """

    def __init__(self, model_path: Path, version_files: Mapping[int, str], recomputed: frozenset[int]) -> None:
        # A second thread does not help a model this small, and on shared cores it spins.
        torch.set_num_threads(1)
        self._recomputed = recomputed
        by_file: dict[str, Any] = {}
        for file in set(version_files.values()):
            model = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            model.load_state_dict(load_file(file), strict=False)
            by_file[file] = model.eval()
        self._models = {version: by_file[file] for version, file in version_files.items()}

    def replayed(self, prompt: Sequence[int], token_ids: Sequence[int], versions: Sequence[int]) -> Floats:
        """Log-probs [n] in nats, the cache treated as the engine treated it."""
        tokens = [*prompt, *token_ids]
        # The step that reads a token samples the next one, so both belong to the same version.
        readers = [versions[0]] * (len(prompt) - 1) + list(versions)
        logits: list[torch.Tensor] = []
        cache: Any = None
        end, last = 0, versions[0]
        for version, run in groupby(readers):
            begin, end = end, end + len(list(run))
            first = 0 if cache is None or self._is_recomputed_between(last, version) else begin
            output = self._forward(version, tokens[first:end], cache if first else None)
            cache, last = output.past_key_values, version
            logits.append(output.logits[0, begin - first :])
        return _logprobs(torch.cat(logits)[len(prompt) - 1 :], token_ids)

    def fresh(self, prompt: Sequence[int], token_ids: Sequence[int], versions: Sequence[int]) -> Floats:
        """Log-probs [n] in nats, each over a context that its own version has read."""
        found = np.zeros(len(token_ids))
        for version in sorted(set(versions)):
            logits = self._forward(version, [*prompt, *token_ids[:-1]], None).logits[0, len(prompt) - 1 :]
            is_own = np.asarray(versions) == version
            found[is_own] = _logprobs(logits, token_ids)[is_own]
        return found

    def _is_recomputed_between(self, before: int, after: int) -> bool:
        return any(version in self._recomputed for version in range(before + 1, after + 1))

    def _forward(self, version: int, tokens: Sequence[int], cache: Any) -> Any:
        with torch.inference_mode():
            return self._models[version](input_ids=torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)


def _logprobs(logits: torch.Tensor, token_ids: Sequence[int]) -> Floats:
    chosen = logits.double().log_softmax(dim=-1).gather(1, torch.tensor(list(token_ids)).unsqueeze(1))
    return np.asarray(chosen.squeeze(1).numpy(), np.float64)
