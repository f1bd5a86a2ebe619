"""A server of openenv-core, run by its own interpreter: python openenv_server.py PORT. Guess the number, in words."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Heard(Observation):
    hint: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.played = 0

    def reset(self, seed=None, episode_id=None, highest=100, **_):
        self.wanted = random.Random(seed).randint(1, highest)
        self.played = 0
        return Heard(hint=f"between 1 and {highest}", done=False, reward=None)

    def step(self, action, **_):
        self.played += 1
        if action.number == 666:
            raise RuntimeError("not that one")
        if action.number == self.wanted:
            return Heard(hint="yes", done=True, reward=1.0)
        return Heard(hint="lower" if action.number > self.wanted else "higher", done=False, reward=-0.1)

    @property
    def state(self):
        return State(step_count=self.played)


app = create_fastapi_app(Guessing, Guess, Heard, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
