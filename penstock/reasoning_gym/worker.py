"""Makes rows of reasoning_gym and scores answers to them; runs alone, with the package and the standard library only.

    python worker.py FOLDER...      the folders that Python imports from

Reads a request a line and answers with a line:

    {"row": SPEC}                                       {"question", "answer", "version"}
    {"row": SPEC, "expected": text, "given": text}      {"value"}

or {"invalid": why}, where the row itself cannot be made or is another one, {"failed": why}, where the scorer breaks,
or {"limit": what}, where it needs too much for that answer.
SPEC is that of `penstock.reasoning_gym.source`. Start it with PYTHONHASHSEED=0, which rows of some tasks depend on.

The scorers of some tasks evaluate answers as Python. `eval` reads literals only here, an expression for sympy has to be
free of what reaches beyond it, and each answer is scored in a process of its own, which ends with it.
"""

import ast
import functools
import json
import os
import re
import resource
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

CHUNK_ROWS = 1000
"""Rows of one data set of the package: some tasks prepare all of theirs at the start."""
SCORE_CPU_S = 5
_PICTURES = (
    "matplotlib",
    "matplotlib.pyplot",
    "matplotlib.animation",
    "matplotlib.collections",
    "mpl_toolkits",
    "mpl_toolkits.mplot3d",
)
"""What a dependency of the package draws with, which would want a folder to write to."""
_LITERAL_EVAL = ("binary_matrix", "spiral_matrix", "string_insertion")
_EXPRESSIONS = ("simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown")
_BEYOND = re.compile(r"__|['\"\[\]{}@=;:\\]|\b(eval|exec|compile|open|input|lambda|import|[gs]etattr|vars|dir|type)\b")


class InvalidRowError(Exception):
    """There is no such row."""


def main() -> None:
    """Answer until the input ends, which it does when the parent dies."""
    sys.path[:] = sys.argv[1:]
    for name in _PICTURES:
        sys.modules[name] = MagicMock()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    for line in requests:
        answers.write(json.dumps(_answer(json.loads(line), [requests.fileno(), answers.fileno()])) + "\n")
        answers.flush()


def _answer(request: dict[str, Any], private: list[int]) -> dict[str, Any]:
    try:
        dataset, entry = _row(request["row"])
    except InvalidRowError as error:
        return {"invalid": str(error)}
    except Exception as error:
        return {"invalid": f"{request['row']['name']} makes no row: {type(error).__name__}: {error}"[:500]}
    answer = "" if entry["answer"] is None else str(entry["answer"])
    if "given" not in request:
        return {"question": str(entry["question"]), "answer": answer, "version": _version()}
    if request["expected"] != answer:
        return {"invalid": f"reasoning_gym {_version()} makes another row here; install the trainer's version"}
    _disarm(request["row"]["name"], dataset)
    return _apart(lambda: float(dataset.score_answer(request["given"], entry)), private)


def _row(spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    chunk, offset = divmod(spec["index"], CHUNK_ROWS)
    config = json.dumps(spec["config"], sort_keys=True)
    dataset = _dataset(spec["name"], config, spec["level"], spec["seed"] + chunk * CHUNK_ROWS)
    return dataset, dataset[offset]


@functools.lru_cache(maxsize=16)
def _dataset(name: str, config: str, level: int | None, seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import CURRICULA, DATASETS

    if name not in DATASETS:
        import difflib

        near = difflib.get_close_matches(name, DATASETS, n=1)
        raise InvalidRowError(f"reasoning_gym has no task {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    stated = json.loads(config)
    if level is not None:
        if name not in CURRICULA:
            raise InvalidRowError(f"level: reasoning_gym's task {name!r} has no curriculum; leave level out")
        stated = {**_of_level(name, CURRICULA[name](), level), **stated}
    try:
        return reasoning_gym.create_dataset(name, **{**stated, "seed": seed, "size": CHUNK_ROWS})
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidRowError(f"config: reasoning_gym's task {name!r} refuses it: {error}") from error


def _of_level(name: str, curriculum: Any, level: int) -> dict[str, Any]:
    """Fields of the task's configuration at that level, each attribute's highest at most."""
    highest = max((len(each.levels) for each in curriculum.attributes.values()), default=1) - 1
    if level > highest:
        raise InvalidRowError(f"level: {level}; the highest of reasoning_gym's task {name!r} is {highest}")
    for key, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(key, min(level, len(attribute.levels) - 1))
    found = vars(curriculum.generate_configuration())
    return {key: value for key, value in found.items() if key not in ("seed", "size")}


def _version() -> str:
    from importlib.metadata import version

    return version("reasoning_gym")


def _disarm(name: str, dataset: Any) -> None:
    """Have the task's module read literals and plain expressions only."""
    module = sys.modules[type(dataset).__module__]
    if name in _LITERAL_EVAL:
        module.__dict__["eval"] = ast.literal_eval
    elif name in _EXPRESSIONS and "parse_expr" in module.__dict__:
        module.__dict__["parse_expr"] = _plain_only(_sympy().parse_expr)
    elif name in _EXPRESSIONS:
        _sympy().parse_expr = _plain_only(_sympy().parse_expr)


def _sympy() -> Any:
    import sympy

    return sympy


def _plain_only(parse: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(parse, "is_plain_only", False):
        return parse

    def parse_plain(text: str, *args: Any, **kwargs: Any) -> Any:
        if _BEYOND.search(text):
            raise ValueError("no plain expression")
        return parse(text, *args, **kwargs)

    parse_plain.__dict__["is_plain_only"] = True
    return parse_plain


def _apart(score: Callable[[], float], private: list[int]) -> dict[str, Any]:
    """Its value, computed in a process that the answer cannot outlive."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for descriptor in (*private, reading):
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_CPU, (SCORE_CPU_S, SCORE_CPU_S))
            try:
                found: dict[str, Any] = {"value": score()}
            except Exception as error:
                found = {"failed": f"its scorer raised {type(error).__name__}: {error}"[:500]}
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read(4096)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        return {"limit": "its CPU time or memory"}
    try:
        found = json.loads(written)
        return {key: found[key] for key in ("value", "failed") if key in found}
    except ValueError:
        return {"failed": "its scorer ended without a value"}


if __name__ == "__main__":
    main()
