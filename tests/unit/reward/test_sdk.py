import asyncio
import math
import threading

import pytest

from penstock.rewards import BatchReward, RewardItem, RewardResult, ScoreStatus, Turn, UnscorableError, reward
from penstock.rewards.function import FunctionReward
from penstock.rewards.loading import RewardLoadError, as_reward, load_reward
from penstock.rewards.local import LocalModel
from penstock.rewards.score_messages import check_score, read_item, write_item
from penstock.v1 import reward_pb2, types_pb2

OK, ABSTAINED, TIMEOUT, FAILED, INVALID = (
    types_pb2.SCORE_STATUS_OK,
    types_pb2.SCORE_STATUS_ABSTAINED,
    types_pb2.SCORE_STATUS_TIMEOUT,
    types_pb2.SCORE_STATUS_FAILED,
    types_pb2.SCORE_STATUS_INVALID,
)


async def score(function, *items, timeout_s=5.0):
    model = LocalModel(as_reward(function))
    try:
        return await model.score([write_item(item) for item in items], timeout_s=timeout_s)
    finally:
        await model.close()


def item(completion="c", **fields):
    return RewardItem(completion=completion, **fields)


@pytest.mark.parametrize("function", [lambda completion, token_ids: 0.0, reward(wants_token_ids=True)(lambda: 0.0)])
async def test_a_function_that_names_token_ids_is_sent_them_wherever_it_is_served(function):
    assert (await LocalModel(as_reward(function)).describe()).wants_token_ids
    assert not (await LocalModel(as_reward(lambda completion: 0.0)).describe()).wants_token_ids


async def test_a_function_gets_the_parameters_it_names():
    seen = {}

    def judge(completion, answer, level, *, missing="default", **columns):
        seen.update(completion=completion, answer=answer, level=level, missing=missing, columns=columns)
        return 1

    await score(judge, item("c", answer="a", metadata={"level": 3, "source": "x", "prompt": "a column"}))

    assert seen == {
        "completion": "c",
        "answer": "a",
        "level": 3,
        "missing": "default",
        "columns": {"source": "x"},
    }


async def test_a_function_may_ask_for_the_turns_of_a_session():
    def judge(completion_turns):
        return float(sum(turn.role == "assistant" for turn in completion_turns))

    said = [Turn(role=role, content="x") for role in ("environment", "assistant", "assistant")]
    scores = await score(judge, item("a whole sample"), item("x\nx", completion_turns=said))
    assert [each.value for each in scores] == [1.0, 2.0]


async def test_prompt_and_metadata_are_passed_whole():
    def judge(prompt, metadata):
        return RewardResult(len(prompt), {"level": metadata["level"]})

    (given,) = await score(judge, item(prompt="2+2=", metadata={"level": 3}))

    assert (given.status, given.value, dict(given.components)) == (OK, 4.0, {"level": 3.0})


async def test_one_raising_sample_fails_alone_and_order_is_kept():
    def judge(completion):
        if completion == "bad":
            raise KeyError("no such thing")
        return float(completion)

    scores = await score(judge, item("1"), item("bad"), item("3"))

    assert [each.status for each in scores] == [OK, FAILED, OK]
    assert [scores[0].value, scores[2].value] == [1.0, 3.0]
    assert "KeyError" in scores[1].message
    assert not scores[1].HasField("value")


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(1), KeyboardInterrupt()])
async def test_errors_that_would_end_the_process_fail_the_sample_only(error):
    def judge(completion):
        raise error

    (given,) = await score(judge, item())

    assert given.status == FAILED
    assert type(error).__name__ in given.message


@pytest.mark.parametrize(
    ("returned", "status"),
    [
        (None, ABSTAINED),
        (math.nan, FAILED),
        (math.inf, FAILED),
        (1e300, FAILED),
        (-1.1e12, FAILED),
        (-1e12, OK),
        ("1.0", FAILED),
        ({"value": 1}, FAILED),
        (True, OK),
        (RewardResult(1.0, {"part": math.nan}), FAILED),
        (RewardResult(status=ScoreStatus.TIMEOUT), TIMEOUT),
        (RewardResult(5.0, status=ScoreStatus.FAILED), FAILED),
    ],
)
async def test_what_is_no_finite_number_never_becomes_a_value(returned, status):
    (given,) = await score(lambda completion: returned, item())

    assert given.status == status
    assert given.HasField("value") == (status == OK)
    assert check_score(given) is None


async def test_unscorable_samples_are_invalid():
    def judge(answer):
        raise UnscorableError("no reference")

    (given,) = await score(judge, item())

    assert (given.status, given.message) == (INVALID, "no reference")


async def test_a_missing_column_is_named():
    (given,) = await score(lambda level: 1.0, item(metadata={"lvl": 3}))

    assert given.status == INVALID
    assert "'level'" in given.message
    assert "lvl" in given.message


async def test_a_hanging_call_times_out_alone():
    release = threading.Event()

    def judge(completion):
        if completion == "hang":
            release.wait(30)
        return 1.0

    scores = await score(judge, item("hang"), item("quick"), timeout_s=2.0)
    release.set()

    assert [each.status for each in scores] == [TIMEOUT, OK]


async def test_async_functions_run_concurrently_within_their_limit():
    running, most = 0, 0

    @reward(max_threads=2)
    async def judge(completion):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return 1.0

    scores = await score(judge, *[item()] * 6)

    assert [each.status for each in scores] == [OK] * 6
    assert most == 2


async def test_threads_are_bounded():
    names = set()

    @reward(max_threads=3)
    def judge(completion):
        names.add(threading.current_thread().name)
        return 1.0

    await score(judge, *[item()] * 50)

    assert 1 <= len(names) <= 3


async def test_a_batch_class_with_a_wrong_count_fails_its_batch():
    class Broken(BatchReward):
        async def score(self, items):
            return [RewardResult(1.0)]

    scores = await score(Broken, item(), item())

    assert [each.status for each in scores] == [FAILED, FAILED]
    assert "1 results for 2 items" in scores[0].message


async def test_a_batch_class_that_hangs_times_out():
    class Hanging(BatchReward):
        async def score(self, items):
            await asyncio.Event().wait()

    (given,) = await score(Hanging, item(), timeout_s=0.1)

    assert given.status == TIMEOUT


async def test_malformed_metadata_makes_one_sample_invalid():
    model = LocalModel(as_reward(lambda completion: 1.0))
    items = [reward_pb2.ScoreItem(metadata_json="[1]"), reward_pb2.ScoreItem(), reward_pb2.ScoreItem(token_ids=b"abc")]

    scores = await model.score(items, timeout_s=5)

    assert [each.status for each in scores] == [INVALID, OK, INVALID]


def test_chat_prompts_arrive_as_turns_and_as_text():
    turn = types_pb2.ChatMessage(role="user", content="hi")
    read = read_item(reward_pb2.ScoreItem(messages=[turn], finish_reason=types_pb2.FINISH_REASON_LENGTH))

    assert read.prompt == "user: hi"
    assert read.messages[0].content == "hi"
    assert read.is_truncated


def test_a_decorated_function_stays_callable():
    @reward(name="mine", version="2")
    def judge(completion):
        return len(completion)

    assert judge("abc") == 3
    assert (judge.name, judge.version) == ("mine", "2")


def test_positional_only_parameters_are_refused_with_the_names_to_use():
    with pytest.raises(RewardLoadError, match="completion"):
        as_reward(lambda x, /: 1.0)


def test_loading_finds_modules_in_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "mine_in_cwd.py").write_text("def judge(completion): return 1.0\nvalue = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent"])

    assert isinstance(load_reward("mine_in_cwd:judge"), FunctionReward)
    with pytest.raises(RewardLoadError, match="did you mean 'judge'"):
        load_reward("mine_in_cwd:jugde")
    with pytest.raises(RewardLoadError, match="found int"):
        load_reward("mine_in_cwd:value")


def test_loading_errors_name_the_fix(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "raising_reward.py").write_text("raise ValueError('at import')\n")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(RewardLoadError, match="PYTHONPATH"):
        load_reward("no_such_module:judge")
    with pytest.raises(RewardLoadError, match="imports 'a_package_nobody_has', which is not installed"):
        load_reward("broken_reward:judge")
    with pytest.raises(RewardLoadError, match="ValueError: at import"):
        load_reward("raising_reward:judge")
    with pytest.raises(RewardLoadError, match="module:function"):
        load_reward("no_colon")
