import pytest

from penstock.rewards import RewardItem, UnscorableError
from services.reward.models.answers import final_answer, normalised
from services.reward.models.exact_match import exact_match
from services.reward.models.numeric import numeric


def item(completion, answer, **metadata):
    return RewardItem(completion=completion, answer=answer, metadata=metadata)


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("12+7=19\n19+9=28\n#### 28", "28"),
        ("#### 1\nno: #### 2", "2"),
        ("#### 28\nand so on, 99", "28"),
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("Answer: 42\n", "42"),
        ("The final answer is: 7", "7"),
        ("3+4=7", "7"),
        ("first 3, then 5", "5"),
        ("I do not know", None),
        ("", None),
        ("####", ""),
        ("\\boxed{never closed", None),
    ],
)
def test_the_final_answer_is_found_where_it_stands(completion, found):
    assert final_answer(completion) == found


@pytest.mark.parametrize(("one", "other"), [("1,234", "1234"), (" $ 12 ", "12"), ("Paris.", "paris"), ("+5", "5")])
def test_writing_that_does_not_change_the_meaning_is_normalised(one, other):
    assert normalised(one) == normalised(other)


def test_a_list_of_numbers_is_not_taken_for_one_with_thousands():
    assert normalised("1,23") != normalised("123")
    assert normalised("1,2345") != normalised("12345")


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("12+7=19\n19+9=28\n#### 28", "28", 1.0),
        ("12+7=19\n19+9=28\n#### 28", "29", 0.0),
        ("#### 28", "5*5=25, 25+3=28 #### 28", 1.0),
        ("28 28 28 ####", "28", 0.0),
        ("", "28", 0.0),
        ("28" * 100_000, "28", 0.0),
    ],
)
def test_exact_match_compares_final_answers(completion, answer, value):
    assert exact_match(item(completion, answer)) == value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("#### 0.5", "1/2", 1.0),
        ("#### 1,000.0", "1000", 1.0),
        ("about 3.14", "3.15", 0.0),
        ("#### 1e3", "1000", 1.0),
        ("#### 1/0", "1", 0.0),
        ("nothing", "1", 0.0),
        ("#### " + "9" * 100_000, "9", 0.0),
    ],
)
def test_numeric_compares_numbers(completion, answer, value):
    assert numeric(item(completion, answer)) == value


def test_a_row_may_set_the_tolerance():
    assert numeric(item("about 3.14", "3.15", tolerance=0.01)) == 1.0


@pytest.mark.parametrize(("rule", "answer"), [(exact_match, " "), (numeric, "none here")])
def test_a_row_without_a_usable_reference_is_unscorable_and_not_zero(rule, answer):
    with pytest.raises(UnscorableError, match="needs"):
        rule(item("#### 1", answer))


def test_a_tolerance_that_is_no_number_is_unscorable():
    with pytest.raises(UnscorableError, match="tolerance"):
        numeric(item("1", "1", tolerance="wide"))
