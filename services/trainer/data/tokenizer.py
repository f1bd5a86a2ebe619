"""The model's own tokenizer, as `services.trainer.data.prompt_order` needs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer

from penstock.config import ConfigError
from services.trainer.data.prompt_rows import DataError


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face directory."""

    def __init__(self, model_path: Path) -> None:
        """Load it from the model's directory; raises ConfigError if there is none."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {model_path}: no usable tokenizer: {error}") from error

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, including a begin-of-text token if the tokenizer adds one."""
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), return_attention_mask=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of the turns by the chat template; raises DataError."""
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (ValueError, TemplateError) as error:
            raise DataError(f"chat messages need a chat template that takes them: {error}") from error
        # The template writes every special token itself.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
