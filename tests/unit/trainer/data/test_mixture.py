"""Several sources: shares, order, what is saved of it, rows that rest, and stages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from penstock.wire.source_tag import SourceTag
from services.trainer.data.curriculum import WINDOW_GROUPS
from services.trainer.data.difficulty import DifficultyPool
from services.trainer.data.interleaving import Interleaver
from services.trainer.data.prompt_mixture import PassedGroup, PromptMixture, PromptSource
from services.trainer.data.prompt_order import EncodedPrompt
from services.trainer.data.prompt_rows import DataError, Row
from services.trainer.data_config import DataConfig, DifficultyConfig

SIZES = {"big": 11, "small": 3, "mid": 7}
WEIGHTS = {"big": 3.0, "small": 1.0, "mid": 1.5}


def source(name: str, num_rows: int, *, weight: float = 1.0) -> PromptSource:
    # Every second row of its file is usable.
    rows = [
        EncodedPrompt(row=Row(prompt=f"{name}{n}", answer="1", metadata_json="{}"), token_ids=(1,), row_number=2 * n)
        for n in range(num_rows)
    ]
    return PromptSource(name=name, prompts=rows, group_size=2, max_new_tokens=8, weight=weight)


def mixture(
    names: tuple[str, ...] = tuple(SIZES), *, sizes: dict[str, int] | None = None, **data: Any
) -> PromptMixture:
    sources = [source(name, (sizes or SIZES)[name], weight=WEIGHTS[name]) for name in names]
    train = [{"name": name, "path": f"{name}.jsonl", "weight": WEIGHTS[name]} for name in names]
    return PromptMixture(sources, DataConfig.model_validate({"train": train, **data}), seed=5)


def take(order: PromptMixture, count: int) -> list[tuple[str, int, int]]:
    tags = [order.at(order.take())[2] for _ in range(count)]
    return [(tag.source, tag.epoch, tag.row) for tag in tags if tag is not None]


def resumed(order: PromptMixture, outstanding: list[int], **data: Any) -> PromptMixture:
    other = mixture(**data)
    other.load(order.dump(outstanding), position=order.position)
    return other


@pytest.mark.parametrize(
    "weights", [(1, 1), (3, 1), (0.7, 0.3), (5, 3, 1), (1, 0, 2.5, 2.5, 0.01), tuple(range(1, 65))]
)
def test_each_source_has_its_share_to_within_one_group_at_any_moment(weights: tuple[float, ...]) -> None:
    turns, shares = Interleaver(len(weights)), np.array(weights) / sum(weights)
    chosen = np.array([turns.next(weights) for _ in range(3000)])
    for source_number, share in enumerate(shares):
        ahead = np.cumsum(chosen == source_number) - share * np.arange(1, 3001)
        assert np.abs(ahead).max() < 1.0 + 1e-9
        # Over any window.
        assert max(ahead.max(), 0.0) - min(ahead.min(), 0.0) < (1.0 if len(weights) == 2 else 2.0) + 1e-9


def test_a_source_comes_shuffled_once_an_epoch_whatever_the_others_are() -> None:
    rows = [(epoch, row) for name, epoch, row in take(mixture(), 400) if name == "mid"]
    first, second = [row for epoch, row in rows if epoch == 0], [row for epoch, row in rows if epoch == 1]
    assert sorted(first) == sorted(second) == [0, 2, 4, 6, 8, 10, 12]
    assert first != second
    alone = [(epoch, row) for _, epoch, row in take(mixture(("mid",)), 50)]
    assert alone == rows[:50]
    assert [row for _, _, row in take(mixture(("mid",), shuffle=False), 8)] == [0, 2, 4, 6, 8, 10, 12, 0]


def test_a_file_without_a_name_keeps_the_order_it_always_had() -> None:
    rows = [EncodedPrompt(row=Row(prompt=str(n), answer="1", metadata_json="{}"), token_ids=(1,)) for n in range(6)]
    plain = PromptSource(name="", prompts=rows, group_size=2, max_new_tokens=8)
    config = DataConfig(train="rows.jsonl")
    order = PromptMixture([plain], config, seed=3)
    found = [order.at(order.take()) for _ in range(12)]
    expected = [n for epoch in (0, 1) for n in np.random.default_rng([3, epoch]).permutation(6).tolist()]
    assert [prompt.row.prompt for _, prompt, _ in found] == [str(n) for n in expected]
    assert {tag for _, _, tag in found} == {None}
    # A checkpoint from before there were sources says the position alone.
    later = PromptMixture([plain], config, seed=3)
    later.load(None, position=8)
    assert later.at(7)[1].row.prompt == str(expected[7])
    assert [later.at(later.take())[1].row.prompt for _ in range(4)] == [str(n) for n in expected[8:]]


DIFFICULTY = {"difficulty": {"after": 2, "for_epochs": 2}}
STAGES = {
    "curriculum": [
        {"weights": {"mid": 0}, "until_pass_rate": {"small": 0.5}},
        {"weights": {"big": 0}, "for_steps": 10, "fades": True},
        {"weights": {"small": 9}},
    ]
}


def outcome(tag: tuple[str, int, int]) -> PassedGroup:
    """Some rows are always passed, some never, some half the time; small ones more and more."""
    name, epoch, row = tag
    rate = 1.0 if name == "small" else {0: 0.0, 1: 1.0}.get(row // 2 % 4, 0.5)
    return PassedGroup(SourceTag(source=name, epoch=epoch, row=row), rate)


@pytest.mark.parametrize("data", [{}, DIFFICULTY, STAGES, DIFFICULTY | STAGES])
@pytest.mark.parametrize("cut", [1, 13, 40, 90])
def test_a_resumed_order_is_that_of_an_unbroken_run(data: dict[str, Any], cut: int) -> None:
    """Steps of four groups that were chosen two steps before; the run is cut between two steps."""

    def play(order: PromptMixture, out: list[tuple[str, int, int]], num_steps: int) -> list[tuple[str, int, int]]:
        chosen = []
        for _ in range(num_steps):
            new = take(order, 4)
            chosen += new
            out += new
            if len(out) > 8:
                order.note_step([outcome(tag) for tag in out[:4]])
                del out[:4]
        return chosen

    whole = play(mixture(**data), [], 200)
    order, out = mixture(**data), []
    begun = play(order, out, cut)
    positions = list(range(order.position - len(out), order.position))
    other = resumed(order, positions, **data)
    tags = [other.at(position)[2] for position in positions]
    assert [(tag.source, tag.epoch, tag.row) for tag in tags if tag] == out
    assert begun + play(other, out, 200 - cut) == whole


def test_a_stage_ends_at_a_step_that_counts_the_accuracy_of_all_its_sources() -> None:
    stages = [{"weights": {"mid": 0}, "until_accuracy": {"big": 0.5, "small": 0.9}}, {"weights": {"big": 0}}]
    evals = [{"name": name, "path": "x"} for name in ("big", "small")]
    data = {"curriculum": stages, "eval": evals}

    def stage(order: PromptMixture) -> int:
        return int(json.loads(order.dump([]))["curriculum"]["stage"])

    order = mixture(**data)
    order.note_step([], {"big": 0.6, "small": 0.8})
    order.note_step([], {"small": 1.0})
    order.note_step([])
    assert stage(order) == 0
    order = resumed(order, [], **data)
    order.note_step([], {"big": 0.6, "small": 0.9})
    assert stage(order) == 1


def test_rows_rest_while_all_pass_or_fail_and_come_back() -> None:
    order = mixture(("mid",), shuffle=False, difficulty={"after": 2, "for_epochs": 1})
    visits: dict[int, list[int]] = {}
    for _ in range(60):
        (tag,) = take(order, 1)
        visits.setdefault(tag[1], []).append(tag[2])
        order.note_step([PassedGroup(SourceTag(source="mid", epoch=tag[1], row=tag[2]), 1.0 if tag[2] == 4 else 0.5)])
    assert [epoch for epoch, rows in visits.items() if 4 not in rows and len(rows) == 6] == [2, 5, 8]
    assert all(len(rows) == 7 for epoch, rows in visits.items() if epoch in (0, 1, 3, 4, 6))
    assert order.metrics()["source/mid/resting_rows"] in (0.0, 1.0)


def test_when_every_row_would_rest_all_come_back_early_which_is_said_once() -> None:
    order = mixture(("small",), difficulty={"rest_at": [0], "after": 1, "for_epochs": 5})
    epochs = []
    with capture_logs() as logs:
        for _ in range(12):
            (tag,) = take(order, 1)
            epochs.append(tag[1])
            order.note_step([PassedGroup(SourceTag(source="small", epoch=tag[1], row=tag[2]), 0.0)])
    assert [line["source"] for line in logs] == ["small"]
    assert epochs == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_pool_takes_five_bytes_a_row_and_refuses_that_of_other_rows() -> None:
    pool = DifficultyPool(1000, DifficultyConfig())
    assert pool.num_bytes == 5000
    for row in range(0, 1000, 3):
        pool.note(row, 1.0, epoch=4)
        pool.note(row, 1.0, epoch=5)
    other = DifficultyPool(1000, DifficultyConfig())
    other.load(pool.dump())
    assert other.num_resting(6) == pool.num_resting(6) == 334
    assert other.dump() == pool.dump()
    with pytest.raises(ValueError, match="not that of 999 rows"):
        DifficultyPool(999, DifficultyConfig()).load(pool.dump())


def test_more_rows_than_a_checkpoint_holds_the_pools_of_are_refused() -> None:
    many = PromptSource(name="", prompts=(source("a", 1).prompts[0],) * 5_000_001, group_size=2, max_new_tokens=8)
    config = DataConfig.model_validate({"train": "a.jsonl", "difficulty": {}})
    with pytest.raises(DataError, match=r"data.difficulty: 10000002 rows, and a checkpoint holds the pools of at most"):
        PromptMixture([many, many], config, seed=0)


def test_stages_follow_steps_and_pass_rates_and_weights_fade() -> None:
    order = mixture(**STAGES)
    small = [PassedGroup(SourceTag(source="small"), rate) for rate in (0.25, 1.0)]
    assert order.metrics()["source/mid/share"] == 0.0
    for _ in range(2 * WINDOW_GROUPS):
        order.note_step(small[:1])
    assert order.metrics()["source/mid/share"] == 0.0, "it does not pass often enough"
    for _ in range(WINDOW_GROUPS // 3 + 1):
        order.note_step(small[1:])
    assert order.metrics()["source/big/share"] == 0.0
    for _ in range(5):
        order.note_step([])
    # Half way between 0, 1, 1.5 and 3, 9, 1.5.
    assert order.metrics()["source/small/share"] == pytest.approx(5 / 8)
    for _ in range(5):
        order.note_step([])
    assert order.metrics()["source/small/share"] == pytest.approx(9 / 13.5)


def test_an_order_is_not_continued_with_other_rows_or_without_a_source_whose_groups_are_out() -> None:
    order = mixture()
    take(order, 20)
    state = order.dump(range(10, 20))
    with pytest.raises(DataError, match=r"'mid' had 7 usable rows and has 8 now; resume with the rows"):
        mixture(sizes=SIZES | {"mid": 8}).load(state, position=20)
    with pytest.raises(DataError, match="the run had one source when it was written"):
        mixture().load(None, position=20)
    with pytest.raises(DataError, match=r"groups of source 'mid' are out, which data.train no longer has"):
        mixture(("big", "small")).load(state, position=20)
    assert json.loads(state).keys() == {"sources", "chosen", "curriculum"}


def test_other_rows_in_a_source_of_the_same_size_are_refused_and_a_checkpoint_without_a_digest_is_not() -> None:
    def made(digest: str) -> PromptMixture:
        rows = replace(source("mid", 7), digest=digest)
        return PromptMixture([rows], DataConfig.model_validate({"train": [{"name": "mid", "path": "m"}]}), seed=5)

    order = made("a" * 64)
    take(order, 3)
    made("a" * 64).load(order.dump([]), position=3)
    with pytest.raises(
        DataError, match=r"'mid' had other rows \(sha256 a{12}\.\.\., now b{12}.*put the former file back"
    ):
        made("b" * 64).load(order.dump([]), position=3)
    earlier = json.loads(order.dump([]))
    del earlier["sources"]["mid"]["digest"]
    made("b" * 64).load(json.dumps(earlier), position=3)
