"""The section `data`: a file, one source or a list of them; mistakes are named with key, value and fix."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import ConfigError, validate
from penstock.wire.source_tag import MAX_NAME_CHARACTERS, MAX_TAG_BYTES, SourceTag, read_tag, tagged
from services.trainer.config import TrainingConfig


def source(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "path": f"{name}.jsonl", **settings}


def config(data: dict[str, Any], **sections: Any) -> TrainingConfig:
    return validate(TrainingConfig, {"model": {"path": "m"}, "data": data, **sections}, source="x.yaml")


def test_a_file_is_a_source_without_a_name_and_a_mapping_a_list_of_one() -> None:
    plain = config({"train": "a.jsonl", "eval": "b.jsonl"}).data
    assert [(each.name, str(each.path)) for each in plain.train_sources] == [("", "a.jsonl")]
    assert list(plain.files) == ["data.train", "data.eval"]
    one = config({"train": source("a", eval="b.jsonl")}).data
    assert [(each.name, str(each.path)) for each in one.eval_sources] == [("a", "b.jsonl")]
    assert list(one.files) == ["data.train.0.path", "data.train.0.eval"]
    again = config(config({"train": [source("a"), source("b")]}).data.model_dump(mode="json")).data
    assert [each.name for each in again.train_sources] == ["a", "b"]


def test_held_out_rows_take_what_the_training_source_of_their_name_has() -> None:
    data = config({"train": [source("a", reward="math", max_new_tokens=9)], "eval": [source("a"), source("c")]}).data
    assert [(each.name, each.reward, each.max_new_tokens) for each in data.eval_sources] == [
        ("a", "math", 9),
        ("c", None, None),
    ]


@pytest.mark.parametrize(
    ("data", "sections", "message"),
    [
        ({"train": [source("a"), source("a")]}, {}, "several sources are called 'a'; rename all but one"),
        ({"train": [source("a", eval="x")], "eval": [source("a")]}, {}, "eval: several sources are called 'a'"),
        ({"train": [source("a", weight=0)]}, {}, r"data.train.0.weight: .* greater than 0 \(got 0\)"),
        ({"train": [source("a", weights=1)]}, {}, "data.train.0.weights: unknown key; did you mean 'weight'"),
        ({"train": [source("a b")]}, {}, "data.train.0.name: .*'a b'"),
        ({"train": []}, {}, "train: 0 sources; give 1 to 64"),
        ({"train": [source(f"s{n}") for n in range(65)]}, {}, "train: 65 sources; give 1 to 64"),
        ({"train": [source("a", group_size=9)]}, {}, r"'a': group_size: 9 is more than algorithm.group_size \(8\)"),
        ({"train": [source("a", group_size=1)]}, {}, "'a': group_size: 1 leaves grpo nothing to compare"),
        ({"train": [source("a", max_new_tokens=257)]}, {}, r"'a': max_new_tokens: 257 is more than sampling"),
        (
            {"train": [source("a", max_new_tokens=9)]},
            {"algorithm": {"overlong_buffer_tokens": 10}},
            r"'a': max_new_tokens: 9 is less than algorithm.overlong_buffer_tokens \(10\); raise it, or lower that",
        ),
        ({"train": "a", "difficulty": {"rest_at": [2]}}, {}, "data.difficulty.rest_at.0: .*0 or 1"),
        ({"train": None, "difficulty": {}}, {}, "difficulty: has no effect without data.train"),
        (
            {"train": "a", "difficulty": {}},
            {"policy": {"drops_zero_variance": True}},
            "data.difficulty: policy.drops_zero_variance drops the very groups",
        ),
        ({"train": "a", "curriculum": [{"weights": {}}]}, {}, "curriculum: has no effect without several sources"),
        ({"train": [source("a")], "curriculum": [{"weights": {"b": 1}}]}, {}, "'b' is no source of data.train"),
        ({"train": [source("a")], "curriculum": [{"weights": {"a": 0}}]}, {}, "no source has a weight above 0"),
        (
            {"train": [source("a")], "curriculum": [{"weights": {}}, {"weights": {}}]},
            {},
            "curriculum.0: it has no end, so that later stages never begin; give for_steps, until_pass_rate or",
        ),
        (
            {"train": [source("a")], "curriculum": [{"weights": {}, "until_accuracy": {"a": 0.5}}, {"weights": {}}]},
            {},
            "curriculum.0.until_accuracy: source 'a' has no held-out rows",
        ),
        (
            {
                "train": [source("a", eval="x")],
                "curriculum": [{"weights": {}, "until_accuracy": {"a": 0.5}}, {"weights": {}}],
            },
            {"run": {"eval_every_steps": 0}},
            "data.curriculum: until_accuracy needs measurements; set run.eval_every_steps",
        ),
        (
            {"train": [source("a")], "curriculum": [{"weights": {}, "for_steps": 3}]},
            {},
            "curriculum.0: the last stage never ends",
        ),
        (
            {
                "train": [source("a"), source("b")],
                "curriculum": [{"weights": {"a": 0}, "until_pass_rate": {"a": 0.5}}, {"weights": {}}],
            },
            {},
            "'a' has weight 0 in this stage and is never measured; give it some",
        ),
        (
            {
                "train": [source("a")],
                "curriculum": [{"weights": {}, "fades": True, "until_pass_rate": {"a": 0.5}}, {"weights": {}}],
            },
            {},
            "curriculum.0.fades: has no effect without for_steps",
        ),
        (
            {"train": [source("a", reward="math")], "eval": [source("a", reward="numeric")]},
            {},
            "'a': reward: the source of data.train of that name has another",
        ),
    ],
)
def test_mistakes_are_named(data: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(data, **sections)


def test_a_tag_is_bounded_and_what_others_send_is_never_an_error() -> None:
    longest = SourceTag(source="s" * MAX_NAME_CHARACTERS, epoch=2**63, row=2**63)
    assert len(tagged("{}", longest)) <= MAX_TAG_BYTES
    text = tagged('{"penstock": "mine", "level": [1, 2.5]}', SourceTag(source="a", epoch=1, row=2))
    assert read_tag(text) == SourceTag(source="a", epoch=1, row=2)
    hostile = ("", "{", "[1]", '{"penstock": 3}', '{"penstock": {}}', '"penstock"', "[" * 100_000 + '"penstock"')
    assert {read_tag(each) for each in hostile} == {None}
    assert read_tag('{"penstock": {"source": "a", "epoch": true, "row": -1}}') is None
    assert read_tag('{"penstock": {"source": "%s", "epoch": 0, "row": 0}}' % ("s" * 65)) is None
