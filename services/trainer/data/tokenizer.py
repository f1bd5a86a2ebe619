"""The model's own tokenizer, as `services.trainer.data.prompt_order` needs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        self._tools: list[dict[str, Any]] | None = None
        self._opens_answer = True
        self._shows_tools = False

    def note_environment(self, *, tools: Sequence[dict[str, Any]] | None, opens: bool) -> None:
        """Render chats from now on with these tools, and without opening an answer if the environment `opens`."""
        self._tools = list(tools) if tools else None
        self._opens_answer = not opens

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, including a begin-of-text token if the tokenizer adds one."""
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), return_attention_mask=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def encode_chat(self, messages: Sequence[tuple[str, str]], tools: Sequence[Any] = ()) -> list[int]:
        """Token ids of the turns by the chat template, with these tools beside an environment's; raises DataError."""
        turns = [{"role": role, "content": content} for role, content in messages]
        text = self._rendered(turns, tools)
        if tools and not self._shows_tools:
            if text == self._rendered(turns, ()):
                raise DataError("tools: the model's chat template does not show them; leave the column out")
            self._shows_tools = True
        # The template writes every special token itself.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _rendered(self, turns: Sequence[dict[str, str]], tools: Sequence[Any]) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    turns,
                    tools=[*(self._tools or ()), *tools] or None,
                    tokenize=False,
                    add_generation_prompt=self._opens_answer,
                )
            )
        except (ValueError, TypeError, TemplateError) as error:
            raise DataError(f"chat messages need a chat template that takes them: {error}") from error
