import json

import pytest

from penstock.reasoning_gym.rows import RowDrawer
from penstock.reasoning_gym.source import ReasoningGymSource
from penstock.rewards import RewardItem, ScoreStatus
from services.reward.code.config import CodeConfig
from services.reward.reasoning_gym import scorers
from services.reward.reasoning_gym.reward import ReasoningGymReward, answer_of
from tests.helpers.imports.reasoning_gym import skip_without_reasoning_gym

skip_without_reasoning_gym(allow_module_level=True)


@pytest.fixture(scope="module")
def draw():
    """Rows of several tasks from one child."""
    drawer = RowDrawer("data.train", ReasoningGymSource(reasoning_gym="chain_sum"))

    def row(name, index, **options):
        drawer._source = ReasoningGymSource(reasoning_gym=name, **options)
        return drawer.draw([index])[0]

    yield row
    drawer.close()


def item(row, completion, **changed):
    metadata = json.loads(row.spec_json)
    metadata["reasoning_gym"].update(changed)
    return RewardItem(completion=completion, answer=row.answer, metadata=metadata)


ESCAPES = (
    "().__class__.__base__.__subclasses__()",
    "open('/etc/passwd').read()",
    "eval(chr(49))",
    "(lambda: 24)()",
)


@pytest.mark.timeout(180)
async def test_answers_are_scored_by_the_tasks_own_scorer_and_reach_nothing(draw, monkeypatch):
    """One start of the sandboxed scorer for all of it: right, wrong, hostile, and rows that are none."""
    row = draw("chain_sum", 1500, level=2)
    game, letters = draw("puzzle24", 3), draw("string_insertion", 5)
    escaping = [item(game, f"<answer>{answer}</answer>") for answer in ESCAPES]
    literal = item(letters, str(list(letters.answer)))
    hostile = item(letters, "__import__('os').kill(__import__('os').getppid(), 9)")
    never = item(game, "9**9**9**9**9")
    monkeypatch.setattr(scorers, "NUM_CELLS", 1)
    reward = ReasoningGymReward(CodeConfig())
    try:
        found = await reward.score(
            [
                item(row, f"so <answer> {row.answer} </answer> is it"),
                item(row, f"#### {int(row.answer) + 1}"),
                item(row, "", index=1501),
                item(row, "", name="chain_sums"),
                item(row, "", config={"min_terms": 9, "max_terms": 1}),
                item(row, "", index=-1),
                RewardItem(completion="1", answer="1"),
                literal,
                hostile,
                *escaping,
                never,
                item(row, row.answer),
            ]
        )
    finally:
        await reward.close()

    right, wrong, other_row, no_task, refused, no_index, no_row = found[:7]
    assert right.value == 1.0
    assert wrong.value is not None
    assert wrong.value < 0.1
    assert all(each.status is ScoreStatus.INVALID for each in (other_row, no_task, refused, no_index, no_row))
    assert "did you mean 'chain_sum'" in no_task.message
    assert "another row" in other_row.message
    # A list of the right characters is worth a tenth: the scorer's own rule, for which literals are read.
    assert [each.value for each in found[7:9]] == [0.1, 0.0]
    assert all((each.value or 0.0) < 0.1 for each in found[9:13]), found[9:13]
    assert found[13].status is ScoreStatus.CANDIDATE_LIMIT
    assert found[14].value == 1.0


def test_the_answer_is_the_last_tagged_text_or_what_follows_the_mark_or_everything():
    assert answer_of("<answer>1</answer> no, <answer>\n2\n</answer>.") == "2"
    assert answer_of("#### 1\n#### 3 ") == "3"
    assert answer_of(" 4 ") == "4"
