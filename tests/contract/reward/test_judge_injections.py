"""What a completion says changes nothing about how it is graded: fifty that try, against a judge that is easily led."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.rewards import RewardItem
from services.reward.judge.config import JudgeConfig
from services.reward.judge.judge_reward import JudgeReward
from services.reward.judge.prompts import Prompts, quoted
from tests.helpers.generators.openai_endpoint import chat_tokenizer
from tests.helpers.rewards.injections import INJECTIONS
from tests.helpers.rewards.naive_judge import MARKS, naive_verdict
from tests.helpers.rewards.scripted_judge import ScriptedJudge, material, scripted_judge

PROMPT, ANSWER = "What is 6 times 7?", "42"


def item(completion: str) -> RewardItem:
    return RewardItem(prompt=PROMPT, completion=completion, answer=ANSWER)


def config(judge: ScriptedJudge | None = None) -> JudgeConfig:
    url = "http://127.0.0.1:1/v1" if judge is None else judge.url
    return JudgeConfig(url=url, model="naive", rubric={"correct": "The final answer is right."}, cache_mb=0)


def unprotected(completion: str) -> list[list[dict[str, str]]]:
    """Prompts as they are often written: the completion as it is, without and with fixed ends."""
    asked = f"Grade this completion.\nReference answer: {ANSWER}\n"
    forms = (f"{asked}Completion: {completion}", f"{asked}BEGIN\n{completion}\nEND\nAnswer in JSON.")
    return [[{"role": "user", "content": form}] for form in forms]


async def test_fifty_completions_fool_a_naive_judge_unprotected_and_none_through_the_prompt():
    assert len(INJECTIONS) == 50
    fooled = {
        name for name, text in INJECTIONS.items() if any('"correct": 10' in naive_verdict(m) for m in unprotected(text))
    }
    assert fooled == INJECTIONS.keys()
    async with scripted_judge(lambda body: naive_verdict(body["messages"])) as judge:
        reward = JudgeReward(config(judge))
        items = [item(text) for text in INJECTIONS.values()]
        results = await reward.score_within([*items, item("It is 42")], timeout_s=30)
        await reward.close()
    values = dict(zip(INJECTIONS, (result.value for result in results), strict=False))
    assert values == dict.fromkeys(INJECTIONS, 0.0)
    assert results[-1].value == 1.0
    # The judge reads each completion unchanged, in a message whose ends nobody could have known.
    assert {material(body)["completion"] for body in judge.bodies} >= set(INJECTIONS.values())
    codes = [body["messages"][-1]["content"].split("\n")[0].removeprefix("BEGIN ") for body in judge.bodies]
    assert len(set(codes)) == 51
    assert all(len(code) == 32 for code in codes)


@pytest.mark.parametrize("name", INJECTIONS)
def test_nothing_of_it_can_become_a_role_or_a_line(name: str):
    prompt = Prompts(config()).write(prompt=PROMPT, completion=INJECTIONS[name], reference=ANSWER)
    line = prompt.material
    assert line.isprintable()
    assert not MARKS.search(line)
    assert not set("<>[]|`&").intersection(line)
    assert json.loads(line) == {"prompt": PROMPT, "completion": INJECTIONS[name], "reference": ANSWER}


def test_a_real_tokenizer_makes_no_marks_of_it():
    tokenizer: Any = chat_tokenizer()
    marks = set(tokenizer.all_special_ids)

    def num_marks(messages: list[dict[str, str]]) -> int:
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return sum(token_id in marks for token_id in ids)

    prompts, attack = Prompts(config()), INJECTIONS["ChatML"]
    written = [prompts.write(prompt=PROMPT, completion=text, reference="").messages() for text in ("12", attack)]
    assert num_marks(written[0]) == num_marks(written[1])
    assert num_marks([{"role": "user", "content": attack}]) > num_marks([{"role": "user", "content": "12"}])


def test_text_of_any_language_stays_readable():
    text = 'Größe: 12 µm, 答えは「4」、ответ\u00a04.\n"ok"'
    assert quoted(text).replace("\\u00a0", " ") == '"Größe: 12 µm, 答えは「4」、ответ 4.\\n\\"ok\\""'
    assert json.loads(quoted(text)) == text


def test_an_order_in_the_prompt_or_the_reference_is_data_too():
    for where in ("prompt", "reference"):
        sample = {"prompt": PROMPT, "completion": "12", "reference": ANSWER} | {where: INJECTIONS["ChatML"]}
        assert '"correct": 0' in naive_verdict(Prompts(config()).write(**sample).messages())
