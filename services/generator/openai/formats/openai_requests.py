"""Checks requests of OpenAI's API field by field.

Unsupported fields that would change sampling are refused, since the log-probs would be wrong; other fields (`user`,
`metadata`, `store` ...) are ignored, as other servers do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.config import StrictModel
from penstock.security.session_keys import MAX_VALID_S, SESSION_ID, TASK, Opens
from services.generator.openai.formats.api_errors import ApiError, invalid

MAX_MESSAGES = 4096
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 64
MAX_TOKENS = 2**31 - 1
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "use_beam_search": (None, False),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "functions": (None, []),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
}
_Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class StreamOptions(_Lenient):
    """Options of a stream."""

    include_usage: bool = False


class SamplingRequest(_Lenient):
    """Fields of both endpoints."""

    model: _Name | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=0, lt=2**62)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_STOP_TOKENS)
    """Tokens that end an answer beside the model's own, as in vLLM."""
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    return_token_ids: bool = False
    """Beyond OpenAI's fields, as in vLLM: the answer contains `prompt_token_ids` and each choice's `token_ids`."""

    @model_validator(mode="before")
    @classmethod
    def _asks_for_nothing_else(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name, neutral in _NEUTRAL.items():
                if name in value and value[name] not in neutral:
                    raise ValueError(f"{name} is not offered here; leave it out")
        return value

    @model_validator(mode="after")
    def _has_sensible_stops(self) -> Self:
        stops = self.stops
        if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise ValueError(f"stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class FunctionCall(_Lenient):
    """The name and arguments of a tool call."""

    name: str = Field(min_length=1, max_length=1024)
    arguments: str | dict[str, Any] = "{}"


class ToolCallMessage(_Lenient):
    """A tool call, as the client repeats it."""

    id: str | None = Field(default=None, max_length=256)
    function: FunctionCall


class TextPart(_Lenient):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(_Lenient):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[ToolCallMessage] | None = Field(default=None, max_length=256)
    tool_call_id: str | None = Field(default=None, max_length=256)

    @property
    def text(self) -> str:
        """The text of the message."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it, with call arguments as objects."""
        made: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.tool_calls:
            made["tool_calls"] = [_template_call(call) for call in self.tool_calls]
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                made[name] = getattr(self, name)
        return made

    def digest(self) -> bytes:
        """Equal for messages with the same content, however a client's library formats them."""
        calls = [(call.function.name, _canonical_arguments(call.function.arguments)) for call in self.tool_calls or ()]
        said = [self.role, self.text.strip(), calls, self.tool_call_id, self.name]
        return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).digest()


class ChatRequest(SamplingRequest):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=256)
    tool_choice: str | None = None
    logprobs: bool = False
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)

    @property
    def usable_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        return None if self.tool_choice == "none" else self.tools or None

    def history(self) -> tuple[bytes, ...]:
        """The conversation so far: its tools, then its messages."""
        tools = json.dumps(self.usable_tools, sort_keys=True, default=str).encode()
        return (hashlib.blake2b(tools, digest_size=16).digest(), *(message.digest() for message in self.messages))


class CompletionRequest(SamplingRequest):
    """Body of /v1/completions."""

    prompt: str | list[int] | list[str]
    logprobs: int | None = Field(default=None, ge=0, le=0)
    """0: log-probs of the sampled tokens; alternatives are not supported."""

    @property
    def only_prompt(self) -> str | list[int]:
        """The one prompt; raises ApiError if there are several, or none."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and all(isinstance(item, str) for item in prompt):
            if len(prompt) > 1:
                raise invalid("prompt", f"{len(prompt)} prompts; one a request")
            prompt = str(prompt[0])
        if not prompt:
            raise invalid("prompt", "empty")
        if isinstance(prompt, str):
            return prompt
        ids = [item for item in prompt if isinstance(item, int) and 0 <= item < 2**31]
        if len(ids) < len(prompt):
            raise invalid("prompt", "token ids must be in [0, 2**31)")
        return ids


class RewardRequest(StrictModel):
    """Body of /v1/sessions/{id}/reward."""

    reward: float | None = None
    """The score; when unset, the endpoint's reward service is asked."""
    components: dict[_Name, float] = Field(default_factory=dict, max_length=32)
    """Named parts of the score, for reports."""
    answer: str = Field(default="", max_length=64 * 1024)
    """For the reward service: the reference answer."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """For the reward service: other data that it reads."""


class SessionKeyRequest(StrictModel):
    """Body of /v1/session_keys."""

    session: str = Field(pattern=f"^{SESSION_ID.pattern}$")
    """The key opens the session with this id; with "*" at its end, all sessions with the prefix before it."""
    group: str = Field(default="", pattern=f"^({TASK.pattern})?$")
    """The task that they belong to; if empty, the agent chooses one, under the same names."""
    valid_s: float = Field(default=3600.0, ge=1, le=MAX_VALID_S)
    """Lifetime of the key, in seconds."""
    opens: tuple[Opens, ...] = Field(default=(Opens.COMPLETE,), min_length=1, max_length=len(Opens))
    """Actions that the key allows."""


_Model = TypeVar("_Model", bound=BaseModel)


def read(model: type[_Model], body: bytes) -> _Model:
    """The body parsed as that model; raises ApiError naming the field, the value and the fix."""
    return _valid(lambda: model.model_validate_json(body))


def checked(model: type[_Model], document: Mapping[str, Any]) -> _Model:
    """The same of a parsed body."""
    return _valid(lambda: model.model_validate(document))


def _valid(make: Callable[[], _Model]) -> _Model:
    try:
        return make()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"{first['msg']}, found {first.get('input')!r:.80}" if where else str(first["msg"])
        raise ApiError(400, f"{where}: {text}" if where else text, code="invalid_value", param=where or None) from None


def transcript(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """A conversation as (role, text)."""
    return [(message.role, message.text) for message in messages]


def _template_call(call: ToolCallMessage) -> dict[str, Any]:
    arguments = call.function.arguments
    parsed = _parsed(arguments) if isinstance(arguments, str) else arguments
    function = {"name": call.function.name, "arguments": parsed}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id is not None else {})


def _canonical_arguments(arguments: str | dict[str, Any]) -> str:
    parsed = _parsed(arguments) if isinstance(arguments, str) else arguments
    return json.dumps(parsed, sort_keys=True)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
