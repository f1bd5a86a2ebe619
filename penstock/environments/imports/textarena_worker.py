"""Plays games of TextArena; runs alone, with that package and the standard library only.

    python textarena_worker.py

Reads a request a line and answers with a line:

    {"session": NAME, "reset": {"game", "seed", "options"}}    {"text"}
    {"session": NAME, "step": TEXT}                            {"text", "done", "reward", "reason"}
    {"session": NAME, "close": true}                           {}

or {"invalid": why}, where the game cannot be played, {"failed": why}, where it breaks, or {"unknown": true}, where no
such session is open. Games draw from Python's one generator: each session has a state of its own, which is put back for
its calls, so that sessions do not disturb each other and can be played again.
"""

import json
import os
import random
from typing import Any

MAX_TEXT_CHARACTERS = 256 * 1024
PLAYER = 0


def main() -> None:
    """Answer until the input ends, which it does when the parent dies."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    games: dict[str, _Game] = {}
    for line in requests:
        request = json.loads(line)
        try:
            answer = _answer(games, request)
        except Exception as error:
            answer = {"failed": f"the game raised {type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class _Game:
    def __init__(self, game: str, seed: int, options: dict[str, Any]) -> None:
        import textarena

        random.seed(seed)
        self.env: Any = textarena.make(game, **options)
        self.env.reset(num_players=1, seed=seed)
        # Observation wrappers repeat everything that was said; what is new is the game's own.
        self.inner = self.env
        while isinstance(self.inner, textarena.Wrapper):
            self.inner = self.inner.env
        self.chance = random.getstate()

    def step(self, text: str) -> dict[str, Any]:
        """Take a turn."""
        random.setstate(self.chance)
        is_done, _ = self.env.step(action=text)
        answer = {"text": self.said(), "done": bool(is_done), "reward": None, "reason": ""}
        if is_done:
            rewards, info = self.inner.close()
            answer["reward"] = float((rewards or {}).get(PLAYER, 0.0))
            answer["reason"] = str((info or {}).get(PLAYER, {}).get("reason", ""))[:500]
        self.chance = random.getstate()
        return answer

    def said(self) -> str:
        """What the player has not read yet, without its own moves."""
        player, messages = self.inner.get_observation()
        if player != PLAYER:
            raise RuntimeError(f"it is the turn of player {player}, and only player {PLAYER} is played")
        texts = [text for sender, text, kind in messages if sender != PLAYER and kind.name != "PLAYER_ACTION"]
        return "\n".join(texts)[:MAX_TEXT_CHARACTERS]


def _answer(games: dict[str, _Game], request: dict[str, Any]) -> dict[str, Any]:
    session = request["session"]
    if "reset" in request:
        try:
            games[session] = _Game(**request["reset"])
            return {"text": games[session].said()}
        except Exception as error:
            games.pop(session, None)
            why = str(error).strip().splitlines() or [""]
            return {"invalid": f"{request['reset']['game']}: {type(error).__name__}: {why[0]}"[:500]}
    if "close" in request:
        games.pop(session, None)
        return {}
    game = games.get(session)
    return {"unknown": True} if game is None else game.step(request["step"])


if __name__ == "__main__":
    main()
