"""Parts of the reward `judge`: answers are kept within bounds, and odd responses are read as what they are."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from services.reward.judge.answer_cache import Answer, AnswerCache
from services.reward.judge.config import JudgeConfig
from services.reward.judge.endpoint import Endpoint, retry_after_s
from services.reward.judge.responses import read_error, read_usage


def answer(text: str) -> Answer:
    return Answer(content=text, model="m", fingerprint="")


def test_the_least_recently_used_answers_are_forgotten_and_memory_is_bounded() -> None:
    cache = AnswerCache(max_bytes=10_000)
    keys = [AnswerCache.key("judge", number) for number in range(100)]
    for key in keys:
        cache.put(key, answer("x" * 100))
        assert cache.get(keys[0]) is not None
        assert cache.num_bytes <= 10_000
    kept = [key for key in keys if cache.get(key) is not None]
    assert kept == [keys[0], *keys[-len(kept) + 1 :]]
    assert len(kept) == 10_000 // (512 + 4 * 101)
    cache.put(keys[0], answer("x" * 10_000))
    assert cache.get(keys[0]) is None
    cache.put(keys[1], answer("y"))
    cache.put(keys[1], answer("z"))
    assert cache.get(keys[1]) == answer("z")
    cache.clear()
    assert (cache.num_bytes, cache.get(keys[1])) == (0, None)
    nothing = AnswerCache(max_bytes=0)
    nothing.put(keys[0], answer(""))
    assert nothing.get(keys[0]) is None


def test_a_retry_after_is_seconds_or_a_date() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    found = retry_after_s({"retry-after": later})
    assert found is not None
    assert 95 < found <= 100
    assert retry_after_s({"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}) == 0
    assert retry_after_s({"retry-after": " 2.5 "}) == 2.5
    for text in ("", "soon", "-1", "nan", "inf", "1e9", "\u0663"):
        assert retry_after_s({"retry-after": text}) is None
    assert retry_after_s({}) is None


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 4}, (3, 4)),
        ({"prompt_tokens": -3, "completion_tokens": True}, (0, 0)),
        ({"prompt_tokens": 10**12, "completion_tokens": 1.5}, (0, 0)),
        (None, (0, 0)),
        ([], (0, 0)),
    ],
)
def test_odd_counts_of_tokens_count_nothing(usage: Any, counts: tuple[int, int]) -> None:
    assert read_usage(json.dumps({"usage": usage}).encode()) == counts
    assert read_usage(b"\xff{") == (0, 0)


def test_an_error_is_reported_in_any_form() -> None:
    assert read_error(b'{"error": {"message": "no"}}') == "no"
    assert read_error(b'{"error": "no"}') == "no"
    assert read_error(b"<html>" + b"x" * 1000) == "<html>" + "x" * 194
    assert read_error(b"\xff\xfe") == "\ufffd\ufffd"


async def test_a_key_is_read_from_a_file_and_shown_in_plain_text_to_this_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("sk-1\n")
    monkeypatch.setenv("MY_KEY_FILE", str(tmp_path / "key"))
    urls = {
        "http://127.0.0.1:8000/v1": False,
        "http://localhost/v1": False,
        "http://[::1]:8000/v1": False,
        "http://[::1]/v1": False,
        "http://judge:8000/v1": True,
        "http://judge": True,
        "https://judge/v1": False,
    }
    for url, is_shown in urls.items():
        endpoint = Endpoint(JudgeConfig(url=url, model="m", key_variable="MY_KEY"))
        assert endpoint.shows_key_in_plain is is_shown, url
        await endpoint.close()
    endpoint = Endpoint(JudgeConfig(url="http://judge/v1", model="m", key_variable="OTHER_KEY"))
    assert not endpoint.shows_key_in_plain
    await endpoint.close()
