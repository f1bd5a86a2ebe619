"""What a generator needs to let its samples talk with an environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.environments.environment_messages import read_tools
from penstock.errors import InvalidFieldError
from penstock.model.model_folder import TextDecoder
from penstock.v1 import broker_pb2, environment_pb2, types_pb2
from services.generator.environments.client import EnvironmentClient
from services.generator.environments.dialogue import Dialogue
from services.generator.environments.error_policy import EnvironmentFaultError
from services.generator.environments.rendering import (
    ChatRenderer,
    ChatTokenizer,
    IdRenderer,
    Renderer,
    TextRenderer,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSessions:
    """Makes the session of each sample."""

    client: EnvironmentClient
    text: TextDecoder
    tokenizer: ChatTokenizer | None
    """None for an emulated model that has none."""
    run_id: str
    instance_id: Callable[[], str]
    """Of the run behind that id, once weights are held."""

    @property
    def max_waiting(self) -> int:
        """Sessions that may wait for the environment at once."""
        return self.client.limits.max_waiting

    def dialogue(self, lease: broker_pb2.Lease) -> Dialogue:
        """The session of a leased sample."""

        def render(description: environment_pb2.GetEnvironmentResponse) -> Renderer:
            return self._renderer(lease.prompt, description)

        return Dialogue(self.client, render, self.text, lease, run_id=self.run_id, instance_id=self.instance_id())

    def _renderer(self, prompt: types_pb2.Prompt, description: environment_pb2.GetEnvironmentResponse) -> Renderer:
        if self.tokenizer is None:
            return IdRenderer()
        if not prompt.messages:
            return TextRenderer(self.tokenizer)
        try:
            tools = read_tools(description.tools_json)
        except InvalidFieldError as error:
            raise EnvironmentFaultError(str(error), status=types_pb2.SCORE_STATUS_ENVIRONMENT_ERROR) from error
        return ChatRenderer(self.tokenizer, prompt.messages, tools, opens=description.opens)
