"""The quick start's problems: exact answers, the split, the tail, the slips."""

import json
import random
from pathlib import Path
from statistics import mean

from quickstart.arithmetic import (
    ANSWER_MARKER,
    MAX_TERMS,
    MIN_TERMS,
    Problem,
    extract_answer,
    sample_distinct_problems,
    sample_problem,
    write_rows,
    write_working,
)


def test_working_adds_one_term_a_line_and_ends_with_the_answer() -> None:
    problem = Problem(terms=(12, 7, 9))
    working = write_working(problem, rng=random.Random(0))
    assert problem.prompt == "a12 b7 c9="
    assert working == f"b7+12=19\nc9+19=28\n{ANSWER_MARKER}28"


def test_clean_working_always_reaches_the_exact_answer() -> None:
    rng = random.Random(1)
    for _ in range(300):
        problem = sample_problem(rng, held_out=False)
        assert extract_answer(write_working(problem, rng=rng)) == problem.answer == str(sum(problem.terms))


def test_a_slip_forgets_a_term_and_spoils_the_answer() -> None:
    problem = Problem(terms=(12, 7, 9))
    assert write_working(problem, rng=random.Random(0), slip_probability=1.0) == f"{ANSWER_MARKER}12"


def test_slips_fall_as_often_as_asked() -> None:
    rng = random.Random(2)
    problem = Problem(terms=tuple([5] * MAX_TERMS))
    num_lines = [write_working(problem, rng=rng, slip_probability=0.28).count("\n") for _ in range(400)]
    assert abs(mean(num_lines) / (MAX_TERMS - 1) - 0.72) < 0.03


def test_held_out_and_training_problems_never_meet() -> None:
    held_out = sample_distinct_problems(random.Random(0), held_out=True, num_problems=300)
    train = sample_distinct_problems(random.Random(0), held_out=False, num_problems=3000)
    assert not set(held_out) & set(train)
    assert all(problem.is_held_out for problem in held_out)
    assert not any(problem.is_held_out for problem in train)


def test_distinct_problems_are_distinct_and_follow_from_the_seed() -> None:
    first = sample_distinct_problems(random.Random(7), held_out=False, num_problems=500)
    again = sample_distinct_problems(random.Random(7), held_out=False, num_problems=500)
    other = sample_distinct_problems(random.Random(8), held_out=False, num_problems=500)
    assert len(set(first)) == 500
    assert first == again != other


def test_response_lengths_have_a_long_tail() -> None:
    rng = random.Random(3)
    lengths = sorted(len(write_working(sample_problem(rng, held_out=False), rng=rng)) for _ in range(4000))
    assert 8 <= lengths[0] <= 15
    assert 38 <= mean(lengths) <= 54
    assert lengths[-1] <= 210
    assert lengths[int(0.99 * len(lengths))] > 3 * mean(lengths)


def test_curriculum_bound_limits_the_number_of_terms() -> None:
    rng = random.Random(4)
    counts = {len(sample_problem(rng, held_out=False, max_terms=4).terms) for _ in range(300)}
    assert counts == {MIN_TERMS, 3, 4}


def test_answer_is_what_follows_the_last_marker() -> None:
    assert extract_answer("#### 1\n#### 28") == "28"
    assert extract_answer("b7+12=19") is None


def test_rows_hold_prompt_and_answer(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [Problem(terms=(1, 2)), Problem(terms=(3, 4, 5))])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows == [{"prompt": "a1 b2=", "answer": "3"}, {"prompt": "a3 b4 c5=", "answer": "12"}]
