"""Programs of completions, tests of rows, and what counts as equal."""

import json

import pytest

from penstock.rewards import UnscorableError
from services.reward.code.program import program_of
from services.reward.code.suites import Assertions, Calls, Streams, same_output, same_result, suite_of


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("First:\n```python\na\n```\nthen\n```\nb\n```\nDone.", "b\n"),
        ("  ```py\nindented\n  ```", "indented\n"),
        ("```python\nwhile True:\n    cut off", None),
        ("", None),
        ("```\n\n```", None),
        ("a\0b", None),
        ("x" * 300_000, None),
        ("```a\n```b\n```\n```\nc", "```b\n"),
        ("```a\n" * 200_000, None),
    ],
)
def test_the_last_whole_block_of_code_is_the_program(completion, program):
    assert program_of(completion) == program


PAIRS = {"inputs": ["1\n", "2\n"], "outputs": ["a", "b"]}


@pytest.mark.parametrize(
    ("row", "suite"),
    [
        ({"tests": [{"input": "1\n", "output": "a"}, {"input": "2\n", "output": "b"}]}, Streams(**PAIRS)),
        ({"input_output": json.dumps(PAIRS)}, Streams(**PAIRS)),
        ({"tests": {"inputs": [["1", "2"]], "outputs": [["3", "4"]]}}, Streams(["1\n2"], ["3\n4"])),
        (
            {"input_output": {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[3]]}},
            Calls("f", [[1, [2]]], [[3]]),
        ),
        (
            {"test_list": ["assert f(g(1), k=len([2])) == h"], "test_setup_code": "import math\nh = math.pi"},
            Assertions("\nimport math\nh = math.pi", ["assert f(g(1), k=len([2])) == h"], ["f", "g"])
        ),
        (
            {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"},
            Assertions("", ["def check(candidate):\n    assert candidate(1) == 2\ncheck(f)\n"], ["f"]),
        ),
    ],
)  # fmt: skip
def test_tests_are_read_in_the_shapes_of_data_sets(row, suite):
    found = suite_of(row)
    if isinstance(suite, Assertions):
        assert found.setup.strip() == suite.setup.strip()
        assert (found.tests, found.functions) == (suite.tests, suite.functions)
    else:
        assert found == suite


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({}, "no tests"),
        ({"tests": []}, "no tests"),
        ({"tests": [{"input": "1"}]}, "KeyError"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"tests": {"inputs": [[1]], "outputs": [1], "fn_name": "os.system"}}, "is no name"),
        ({"input_output": "{"}, "JSONDecodeError"),
        ({"test_list": ["assert ("]}, "SyntaxError"),
        ({"tests": [{"input": "", "output": ""}] * 1001}, "1001 tests"),
        ({"tests": 5}, "TypeError"),
    ],
)
def test_a_row_without_usable_tests_is_named(row, why):
    with pytest.raises(UnscorableError, match=why):
        suite_of(row)


def test_outputs_are_equal_but_for_white_space_at_ends():
    assert same_output("1 2  \n3\n\n", "1 2\n3")
    assert not same_output("1  2", "1 2")
    assert not same_output("", "0")


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (1, 1.0, True), (0.1 + 0.2, 0.3, True), (1, True, False), (True, True, True), ("1", 1, False),
        ([1, [2.0000001]], [1, [2]], True), ([1], [1, 2], False), ({"a": 1}, {"a": 1.0}, True), ({"a": 1}, {}, False),
        (None, None, True), (None, 0, False), (float("nan"), float("nan"), False), (10**300 * 10**100, 1.0, False),
    ],
)  # fmt: skip
def test_results_are_equal_as_json_values(found, expected, same):
    assert same_result(found, expected) is same
