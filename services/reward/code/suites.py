"""Reads a data row's tests, in the shapes in which data sets have them.

| columns | tests |
|---|---|
| `tests`: `[{"input": ..., "output": ...}]` | standard input and output |
| `input_output` or `tests`: `{"inputs": [...], "outputs": [...]}`, perhaps as JSON text (APPS, TACO) | likewise |
| the same with `fn_name` | calls of that function; an input is the list of its arguments |
| `test_list`: `["assert f(1) == 2", ...]`, `test_setup_code` (MBPP) | assertions, each a test |
| `test` with `check(candidate)`, `entry_point` (HumanEval) | one test |
"""

from __future__ import annotations

import ast
import builtins
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.rewards import UnscorableError

MAX_TESTS = 1000
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Streams:
    """Tests by standard input and output."""

    inputs: list[str]
    outputs: list[str]

    @property
    def num_tests(self) -> int:
        """How many."""
        return len(self.outputs)


@dataclass(frozen=True, slots=True)
class Calls:
    """Tests by calls of one function; arguments and results are JSON values."""

    function: str
    arguments: list[list[Any]]
    results: list[Any]

    @property
    def num_tests(self) -> int:
        """How many."""
        return len(self.results)


@dataclass(frozen=True, slots=True)
class Assertions:
    """Tests that are code: each passes unless it raises."""

    setup: str
    tests: list[str]
    functions: list[str] = field(default_factory=list)
    """Names in the tests that the candidate's program has to define."""

    @property
    def num_tests(self) -> int:
        """How many."""
        return len(self.tests)


Suite: TypeAlias = Streams | Calls | Assertions


def suite_of(row: Mapping[str, Any]) -> Suite:
    """The row's tests. Raises UnscorableError: there are none, or they are malformed."""
    try:
        suite = _read(row)
    except (TypeError, ValueError, KeyError, SyntaxError, RecursionError) as error:
        raise UnscorableError(f"this row's tests cannot be read: {type(error).__name__}: {error}") from error
    if suite is None:
        raise UnscorableError("this row has no tests: none of tests, input_output, test_list and test")
    if not 1 <= suite.num_tests <= MAX_TESTS:
        raise UnscorableError(f"this row has {suite.num_tests} tests, expected 1 to {MAX_TESTS}")
    return suite


def same_output(found: str, expected: str) -> bool:
    """Whether two texts are equal but for white space at the ends of lines and of the text."""
    return _lines(found) == _lines(expected)


def same_result(found: Any, expected: Any) -> bool:
    """Whether two JSON values are equal, floating-point numbers to 1e-6."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float) and isinstance(expected, int | float):
        return found == expected or _is_close(found, expected)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same_result, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_result(found[key], expected[key]) for key in expected)
    return type(found) is type(expected) and bool(found == expected)


def _is_close(found: float, expected: float) -> bool:
    try:
        return math.isclose(found, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:
        return False


def _read(row: Mapping[str, Any]) -> Suite | None:
    for column in ("tests", "input_output"):
        if row.get(column):
            found = row[column]
            return _read_pairs(json.loads(found) if isinstance(found, str) else found)
    if row.get("test_list"):
        setup = "\n".join([*map(str, row.get("test_imports", ())), str(row.get("test_setup_code") or "")])
        tests = [str(test) for test in row["test_list"]]
        return Assertions(setup, tests, _undefined(setup, tests))
    if row.get("test") and row.get("entry_point"):
        name = str(row["entry_point"])
        test = f"{row['test']}\ncheck({name})\n"
        return Assertions("", [test], sorted({name, *_undefined("", [test])}))
    return None


def _read_pairs(found: Any) -> Suite:
    if isinstance(found, Sequence) and not isinstance(found, str):
        return Streams([_text(test["input"]) for test in found], [_text(test["output"]) for test in found])
    inputs, outputs = list(found["inputs"]), list(found["outputs"])
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if name := found.get("fn_name"):
        if not str(name).isidentifier():
            raise ValueError(f"fn_name {name!r:.80} is no name")
        return Calls(str(name), [list(arguments) for arguments in inputs], outputs)
    return Streams([_text(one) for one in inputs], [_text(one) for one in outputs])


def _text(value: Any) -> str:
    """A text; of several, lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _undefined(setup: str, tests: Sequence[str]) -> list[str]:
    """Names that tests use and that only the program can define, sorted."""
    used: set[str] = set()
    defined: set[str] = set(dir(builtins))
    for source in (setup, *tests):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                defined.add(node.name)
    return sorted(used - defined)
