import json

import pytest

from console.config.config import RunConfig
from penstock.config import ConfigError
from penstock.reasoning_gym import rows
from penstock.reasoning_gym.rows import DrawnRow
from penstock.reasoning_gym.source import MAX_ROWS, ReasoningGymSource, read_source
from penstock.wire.source_tag import SourceTag
from services.trainer.data import drawn_prompts
from services.trainer.data.drawn_prompts import DrawnPrompts
from services.trainer.data.prompt_mixture import PassedGroup, PromptMixture, PromptSource
from services.trainer.data.prompt_order import EncodedPrompt
from services.trainer.data.prompt_rows import Row
from services.trainer.data_config import DataConfig
from tests.helpers.imports.reasoning_gym import skip_without_reasoning_gym


class Bytes:
    def encode_texts(self, texts):
        return [list(text.encode()) for text in texts]

    def encode_chat(self, messages):
        return [token for role, content in messages for token in f"<{role}>{content}".encode()]


def drawn(limit=512, **options):
    source = ReasoningGymSource(**{"reasoning_gym": "chain_sum", **options})
    return DrawnPrompts("data.train", source, Bytes(), max_prompt_tokens=limit)


def test_a_task_is_named_by_text_or_with_its_options():
    config = DataConfig.model_validate({"train": "reasoning_gym:chain_sum", "eval": "held_out.jsonl"})
    assert config.train == ReasoningGymSource(reasoning_gym="chain_sum")
    assert list(config.files) == ["data.eval"]
    assert list(config.tasks) == ["data.train"]
    mapping = {"reasoning_gym": "chain_sum", "level": 2, "config": {"max_terms": 3}}
    again = DataConfig.model_validate(DataConfig.model_validate({"train": mapping}).model_dump(mode="json"))
    assert again.train == read_source(mapping)
    assert again.train.spec(5)["config"] == {"max_terms": 3}
    for wrong, named in (
        ("reasoning_gym:", "reasoning_gym:"),
        ({"reasoning_gym": "x", "seeds": 1}, "seeds"),
        ({"reasoning_gym": "x", "level": -1}, "level"),
        ({"reasoning_gym": "x", "size": 10_000_001}, "size"),
    ):
        with pytest.raises(ValueError, match=named):
            DataConfig.model_validate({"train": wrong})
    with pytest.raises(ValueError, match=r"difficulty: no row of reasoning_gym:x is repeated.*give it a size"):
        DataConfig.model_validate({"train": "reasoning_gym:x", "difficulty": {}})
    assert DataConfig.model_validate({"train": {"reasoning_gym": "x", "size": 9}, "difficulty": {}}).difficulty


def test_a_task_is_a_source_beside_files_and_brings_its_own_scorer():
    train = [
        {"name": "file", "path": "a.jsonl", "reward": "math"},
        {"name": "sums", "path": "reasoning_gym:chain_sum", "weight": 2, "eval": "reasoning_gym:chain_sum"},
        {"name": "own", "path": {"reasoning_gym": "countdown", "size": 9}, "reward": "numeric"},
        {"name": "slow", "path": "reasoning_gym:countdown", "reward": {"timeout_s": 60}},
    ]
    document = {"model": {"path": "m"}, "data": {"train": train}, "reward": "exact_match"}
    config = RunConfig.model_validate(document)
    assert list(config.data.files) == ["data.train.0.path"]
    assert list(config.data.tasks) == [f"data.train.{key}" for key in ("1.path", "1.eval", "2.path", "3.path")]
    assert config.reward.model == "exact_match"
    found = {name: (reward.model, reward.timeout_s) for name, reward in config.source_rewards.items()}
    own = "reasoning_gym"
    assert found == {"file": ("math", 30), "sums": (own, 30), "own": ("numeric", 30), "slow": (own, 60)}
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config

    def reward_of_run(**keys):
        data = {"train": "reasoning_gym:chain_sum"}
        return RunConfig.model_validate({"model": {"path": "m"}, "data": data, **keys}).reward

    assert reward_of_run().model == own
    assert reward_of_run(reward={"timeout_s": 7}).model == own
    assert reward_of_run(reward="numeric").model == "numeric"
    assert [part.model for part in reward_of_run(reward=[{"model": "numeric"}, {"model": "format"}]).parts] == [
        "numeric",
        "format",
    ]


class Drawer:
    """Draws rows without the package, and tells which."""

    def __init__(self, field, source, *, default_seed=0):
        self.drawn = []

    def draw(self, indices):
        self.drawn += indices
        return [DrawnRow(f"row {index}", str(index), "{}") for index in indices]

    def close(self):
        pass


ENDLESS, SIZED = "reasoning_gym:chain_sum", {"reasoning_gym": "chain_sum", "size": 5}


def mixture(**data):
    """A task without end, one with five rows, and a file of three."""
    train = [{"name": "end", "path": ENDLESS}, {"name": "five", "path": SIZED, "weight": 2}]
    rows = {
        "end": drawn(),
        "five": drawn(size=5),
        "file": [
            EncodedPrompt(row=Row(prompt=str(n), answer="1", metadata_json="{}"), token_ids=(1,), row_number=n)
            for n in range(3)
        ],
    }
    if "difficulty" in data:
        del rows["end"], train[0]
    config = DataConfig.model_validate({"train": [*train, {"name": "file", "path": "rows.jsonl"}], **data})
    sources = [
        PromptSource(name=each.name, prompts=rows[each.name], group_size=2, max_new_tokens=8, weight=each.weight)
        for each in config.train_sources
    ]
    return PromptMixture(sources, config, seed=5)


def take(order, count):
    """Chooses, then draws, then reads, as the feeder does; only then rows are read that were drawn together."""
    positions = [order.take() for _ in range(count)]
    for prompts, indices in order.to_draw(positions):
        prompts.load(indices)
    drawers = [source.drawn._drawer for source in order.sources if source.drawn is not None]
    before = [len(each.drawn) for each in drawers]
    found = []
    for position in positions:
        source, prompt, tag = order.at(position)
        assert tag == SourceTag(source=source.name, epoch=tag.epoch, row=prompt.row_number)
        assert source.name == "file" or prompt.row.prompt == f"row {prompt.row_number}"
        found.append((source.name, tag.epoch, tag.row))
    assert [len(each.drawn) for each in drawers] == before
    return found


@pytest.mark.parametrize("data", [{}, {"difficulty": {"after": 1}}])
def test_tasks_and_files_take_turns_in_an_order_that_is_resumed_exactly(data, monkeypatch):
    monkeypatch.setattr(drawn_prompts, "RowDrawer", Drawer)

    def play(order, num_steps):
        chosen = []
        for _ in range(num_steps):
            groups = take(order, 8)
            chosen += groups
            # Some rows of each source are solved at once and rest.
            order.note_step(
                PassedGroup(SourceTag(source=name, epoch=epoch, row=row), 1.0 if row % 3 == 0 else 0.5)
                for name, epoch, row in groups
            )
        return chosen

    unbroken, first, second = mixture(**data), mixture(**data), mixture(**data)
    expected = play(unbroken, 12)
    assert play(first, 5) == expected[:40]
    second.load(first.dump([]), position=first.position)
    assert play(second, 7) == expected[40:]
    by_source = {name: [row for source, _, row in expected if source == name] for name in ("end", "five", "file")}
    if data:
        assert any(order.pool.num_resting(order.epoch) for order in unbroken._orders)
        return
    assert [len(by_source[name]) for name in ("end", "five", "file")] == [24, 48, 24]
    assert by_source["end"] == list(range(24)), "rows without end come in order, each once"
    assert sorted(by_source["five"][:5]) == list(range(5))
    assert by_source["five"][:5] != by_source["five"][5:10], "shuffled anew in each epoch"


def test_rows_that_are_kept_are_bounded_and_those_asked_for_are_among_them(monkeypatch):
    monkeypatch.setattr(drawn_prompts, "RowDrawer", Drawer)
    monkeypatch.setattr(drawn_prompts, "KEPT_PROMPTS", 8)
    prompts = drawn()
    for start in range(0, 100, 4):
        prompts.load(range(start, start + 4))
    assert len(prompts._kept) == 8
    prompts.load([92, 200, 201, 202, 203, 204])
    assert prompts._drawer.drawn == [*range(100), 200, 201, 202, 203, 204]
    assert prompts[92].row.prompt == "row 92"
    assert len(prompts._drawer.drawn) == 105


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"data.train: reasoning_gym:chain_sum.*pip install 'penstock\[reasoning-gym\]'"
    ):
        drawn()


def test_rows_are_drawn_alike_after_a_restart_and_long_ones_are_replaced(monkeypatch):
    skip_without_reasoning_gym()
    first = drawn(size=40, chat=True, system="Sum.", level=1)
    first.load(range(40))
    assert len({first[index].token_ids for index in range(40)}) > 30
    first.close()

    other = drawn(size=40, chat=True, system="Sum.", level=1, seed=0)
    other.load([7, 8])
    assert other[7] == first[7]
    assert [turn.role for turn in other[7].row.prompt] == ["system", "user"]
    spec = json.loads(other[7].row.metadata_json)["reasoning_gym"]
    assert {key: spec[key] for key in ("name", "index", "seed", "level")} == {
        "name": "chain_sum",
        "index": 7,
        "seed": 0,
        "level": 1,
    }
    # The child ends by itself with the last of its owners, and is started again where it was ended.
    other.close()

    endless = drawn(limit=85)
    assert len(endless) > 10_000_000
    lengths = [len(endless[index].token_ids) for index in range(60)]
    assert max(lengths) <= 85
    replaced = [json.loads(endless[i].row.metadata_json)["reasoning_gym"]["index"] != i for i in range(60)]
    assert 0 < sum(replaced) < 60
    assert all(json.loads(endless[i].row.metadata_json)["reasoning_gym"]["index"] < MAX_ROWS for i in range(60))
    endless.close()

    for options, named in (
        ({"limit": 8}, "longer than data.max_prompt_tokens = 8"),
        ({"level": 90}, "data.train: level"),
    ):
        refused = drawn(**options)
        with pytest.raises(ConfigError, match=named):
            refused.load([0])
        refused.close()

    monkeypatch.setattr(rows, "ROW_TIMEOUT_S", 0.01)
    monkeypatch.setattr(rows, "START_TIMEOUT_S", 0.0)
    slow = drawn()
    with pytest.raises(ConfigError, match=r"made no row 0 in 0\.01 s"):
        slow.load([0])
