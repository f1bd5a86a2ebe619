"""Implements an environment of several turns: the model guesses a number from the hints "higher" and "lower".

Serve it:              python guess.py                        (or: penstock env serve guess:Guess)
See that it conforms:  penstock env check 127.0.0.1:7320 --row '{"answer": "42"}' --say 50 --say 42
Train with it:         penstock run CONFIG.yaml environment=grpc://127.0.0.1:7320

Without starting it, in the folder of this file:  penstock run CONFIG.yaml environment=guess:Guess
"""

import re
import sys

from penstock.environments import Action, Environment, Message, Opening, Outcome, Task, UnplayableError, serve

MAX_TURNS = 5
LARGEST = 99


class Guess(Environment):
    """One for the right number, a little for every guess that comes nearer than all before it."""

    name = "guess"
    version = "1"

    def reset(self, task: Task) -> Opening:
        """The number is the row's answer."""
        if not task.answer.strip().isdecimal():
            raise UnplayableError(f"answer: {task.answer!r}; must be a number from 0 to {LARGEST}")
        self.number = int(task.answer)
        self.nearest = LARGEST + 1
        return Opening(max_turns=MAX_TURNS)

    def step(self, action: Action) -> Outcome:
        """The last number in a turn is the guess."""
        found = re.findall(r"\d+", action.text)
        if not found:
            return self._answer("write a number", 0.0, action)
        guess = min(int(found[-1][:4]), LARGEST)
        if guess == self.number:
            return Outcome(reward=1.0, is_done=True, components={"found": 1.0})
        is_nearer = abs(guess - self.number) < self.nearest
        self.nearest = min(self.nearest, abs(guess - self.number))
        return self._answer("higher" if guess < self.number else "lower", 0.1 * is_nearer, action)

    def _answer(self, text: str, reward: float, action: Action) -> Outcome:
        is_last = action.turn + 1 >= MAX_TURNS
        messages = [Message(role="user", content=f"{text}\n")]
        return Outcome(messages=messages, reward=reward, is_done=is_last, components={"found": 0.0})


if __name__ == "__main__":
    serve(Guess, listen=sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7320")
