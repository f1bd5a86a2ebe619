"""The environment SDK: write a class, serve it, check it.

Example:
    from penstock.environments import Action, Environment, Message, Outcome, Task, serve

    class Countdown(Environment):
        def reset(self, task: Task) -> None:
            self.wanted = task.answer

        def step(self, action: Action) -> Outcome:
            if action.text.strip() == self.wanted:
                return Outcome(reward=1.0, is_done=True)
            return Outcome(messages=[Message(role="user", content="No. Try again.")])

    serve(Countdown, listen="127.0.0.1:7320")
"""

from penstock.environments.environment import Environment, EnvironmentFactory
from penstock.environments.loading import EnvironmentLoadError, load_environment
from penstock.environments.serving import serve, serve_async
from penstock.environments.types import (
    Action,
    Message,
    Opening,
    Outcome,
    ScoreStatus,
    Task,
    ToolCall,
    UnplayableError,
)

__all__ = [
    "Action",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentLoadError",
    "Message",
    "Opening",
    "Outcome",
    "ScoreStatus",
    "Task",
    "ToolCall",
    "UnplayableError",
    "load_environment",
    "serve",
    "serve_async",
]
