"""Checks that a model's weights are those that its config.json asks for, before an engine loads them.

vLLM says of others only that its process ended, and transformers draws weights that are missing at random.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from penstock.model.digests import MalformedWeightsError, safetensors_shapes
from services.generator.engine.engine import UnusableModelError


def unfit(folder: Path, *, missing: Collection[str], mismatched: Collection[str]) -> UnusableModelError:
    """Names the first of the tensors that are missing, or else of those with another shape."""
    names = [*(f"{name} is missing" for name in sorted(missing))]
    names += [f"{name} has another shape" for name in sorted(mismatched)]
    more = f", and {len(names) - 1} more such tensors" if len(names) > 1 else ""
    return UnusableModelError(
        f"{folder}: its weights do not fit its config.json: {names[0]}{more}; copy both from the same model"
    )


def check_fit(folder: Path) -> None:
    """Compares the headers of its files with an empty model; what transformers does not know is left to the engine.

    Raises:
        UnusableModelError: A tensor is missing, or has another shape, or a file cannot be read.
    """
    # Imported here: both take seconds, and only engines that are to start need them.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            # Its files hold other shapes than the model.
            return
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError):
        # The engine may know it, and says what is wrong otherwise: packages that it needs, settings of newer versions.
        return
    prefix = f"{model.base_model_prefix}."
    held = _shapes(folder)
    # Of a model that was saved without its output layer.
    held |= {f"{prefix}{name}": shape for name, shape in held.items() if not name.startswith(prefix)}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    mismatched = [name for name in expected.keys() & held.keys() if expected[name] != held[name]]
    # Where names are converted, as those of experts are, the engine alone knows which are missing.
    is_converted = bool(get_model_conversion_mapping(model, add_legacy=False))
    missing = () if is_converted else expected.keys() - held.keys() - model.all_tied_weights_keys.keys()
    if missing or mismatched:
        raise unfit(folder, missing=missing, mismatched=mismatched)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            found |= safetensors_shapes(file)
        except (MalformedWeightsError, OSError) as error:
            raise UnusableModelError(f"{folder}: its weights cannot be read: {error}") from error
    return found
