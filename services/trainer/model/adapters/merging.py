"""Merges a saved LoRA adapter into its base: a plain Hugging Face directory for software without adapter support.

Merged weights have the base's element type. If that is narrower than float32, the sums are rounded to it, and log-probs
differ by that rounding from those of base and adapter kept separate.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from penstock.model.adapter_layout import model_digest
from services.trainer.data.tokenizer_files import copy_tokenizer
from services.trainer.model.adapters.lora import ADAPTER_FILE, saved_base_digest
from services.trainer.model.backend import CheckpointMismatchError

ADAPTER_CONFIG = "adapter_config.json"


def merge_adapter(checkpoint: Path, *, out: Path, base: Path | None = None) -> Path:
    """Writes `out`, which must not exist; returns the base that was used.

    Args:
        checkpoint: A checkpoint of a run that trained an adapter.
        out: The directory to write.
        base: The model it was trained on; if None, the one that the checkpoint names.

    Raises:
        CheckpointMismatchError: The checkpoint holds no adapter, or one for another base; both digests are named.
        FileExistsError: `out` already exists.
        OSError: Something cannot be read or written; `out` is not left half-written.
    """
    if out.exists():
        raise FileExistsError(f"{out}: exists already")
    stated = saved_base_digest(checkpoint)
    if stated is None:
        raise CheckpointMismatchError(f"{checkpoint}: no {ADAPTER_FILE} that names its base")
    base = base or _named_base(checkpoint)
    held = model_digest(base)
    if stated != held:
        raise CheckpointMismatchError(
            f"{checkpoint}: an adapter over base weights with digest {stated}, {base} holds {held}"
        )
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    with torch.no_grad():
        merged = PeftModel.from_pretrained(model, checkpoint).merge_and_unload(safe_merge=True)
    temporary = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    merged.save_pretrained(temporary)
    copy_tokenizer(checkpoint, temporary)
    temporary.rename(out)
    return base


def _named_base(checkpoint: Path) -> Path:
    config = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(named, str) or not Path(named).is_dir():
        raise CheckpointMismatchError(f"{checkpoint}: its base {named!r:.200} is not a directory here; name the base")
    return Path(named)
