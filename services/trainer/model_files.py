"""Files of a checkpoint that hold tensors and the tokenizer: reading, checking, copying. Never pickle."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from services.trainer.backend import CheckpointMismatchError

OPTIMIZER_FILE = Path("resume") / "optimizer.safetensors"
"""Below a checkpoint's directory, apart from the files that `from_pretrained` reads."""
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)
_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the tokenizer's files byte for byte, so that an export never tokenises otherwise than its origin."""
    for pattern in TOKENIZER_PATTERNS:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face directory, whether in one file or sharded."""
    weights: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def adamw_moments(state: dict[str, Tensor], name: str, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of one parameter on its device; empty where the file holds none."""
    if any(f"{name}/{part}" not in state for part in _ADAMW_STATE):
        return {}
    moments = {part: state[f"{name}/{part}"].to(parameter.device) for part in _ADAMW_STATE}
    if any(
        moments[part].shape != parameter.shape or moments[part].dtype != parameter.dtype for part in _ADAMW_STATE[1:]
    ):
        return {}
    return moments


def check_same(found: dict[str, Tensor], wanted: dict[str, Tensor], *, where: Path) -> None:
    """Refuses tensors that differ from the wanted ones in name, shape or element type.

    Raises:
        CheckpointMismatchError: names the first difference.
    """
    if found.keys() != wanted.keys():
        odd = sorted(found.keys() ^ wanted.keys())[:3]
        raise CheckpointMismatchError(f"{where}: tensors missing or unknown, for example {', '.join(odd)}")
    for name, tensor in wanted.items():
        other = found[name]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise CheckpointMismatchError(
                f"{where}: {name} is {other.dtype} {list(other.shape)}, the model has "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
