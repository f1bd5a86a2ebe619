"""Lanes, a sample's life and the critical path, out of traces or of metrics alone; versions by machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.page.files import trace_spans, traced_weights
from console.page.files.trace_spans import SpanStore
from console.page.files.values import BadQuestionError
from console.page.run_data import RunData
from tests.helpers.page.run_folders import BEGIN_S, page_folder, trace_line

STEP = {"rl.policy.version": 2}
KEY = {"rl.sample.key": "g/0"}
CHUNKS = [
    (2, "chunk", {"rl.tokens": 7, "rl.policy.version": 1}),
    (4, "chunk", {"rl.tokens": 2, "rl.policy.version": 2}),
]


def traces() -> str:
    generator = trace_line(
        "generator",
        "generator-0",
        {"name": "rl.generator.decode", "start": 0, "end": 6},
        {
            "name": "rl.weights.update",
            "start": 6,
            "end": 7,
            "attributes": {"rl.policy.version": 1, "rl.weights.bytes": 9, "rl.weights.origin_bytes": 6},
        },
        {"name": "rl.sample.generate", "start": 1, "end": 5, "attributes": KEY, "events": CHUNKS},
    )
    broker = trace_line("broker", "broker", {"name": "rl.sample.queue", "start": 0, "end": 1, "attributes": KEY})
    trainer = trace_line(
        "trainer",
        "trainer",
        # Parts end, and are written, before their step.
        {"name": "rl.train.wait", "start": 0, "end": 6, "parent": "s", "attributes": {"rl.waits_for": "samples"}},
        {"name": "rl.train.compute", "start": 6, "end": 9, "parent": "s"},
        {
            "name": "rl.weights.publish",
            "start": 9,
            "end": 10,
            "parent": "s",
            "attributes": STEP | {"rl.weights.digest": "d", "rl.weights.bytes": 9},
        },
        {"name": "rl.train.step", "start": 0, "end": 10, "id": "s", "attributes": STEP},
    )
    return generator + broker + trainer


def test_traces_are_drawn_as_lanes_with_the_steps_critical_path(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    (folder.path / "traces.jsonl").write_text("nonsense\n{}\n" + traces() + '{"resourceSpans": [{"res')
    data = RunData(folder)
    found = data.answer("lanes", {})
    lanes = {lane["name"]: lane for lane in found["lanes"]}
    assert [(lane["name"], lane["kind"]) for lane in found["lanes"]] == [
        ("generator-0", "generator"),
        ("trainer", "trainer"),
    ]
    assert [span[2] for span in lanes["trainer"]["spans"]] == ["waiting", "computing", "publishing"]
    assert lanes["trainer"]["spans"][0][:2] == [BEGIN_S, BEGIN_S + 6]
    assert [BEGIN_S + 1, BEGIN_S + 5, "leased", "g/0", "g/0"] in lanes["generator-0"]["spans"]
    assert found["sentence"] == (
        "Step 2 took 10.0 s: 6.0 s waiting for samples (60 %), 3.0 s computing (30 %), 1.0 s publishing "
        "weights (10 %). "
        "Of the traced samples g/0 on generator-0 ended last in its longest wait."
    )
    part = data.answer("lanes", {"from": str(BEGIN_S + 6.5), "to": str(BEGIN_S + 8), "lane": "trainer"})
    assert [[span[2] for span in lane["spans"]] for lane in part["lanes"]] == [["computing"]]
    life = data.answer("lanes", {"sample": "g/0"})
    assert [(lane["name"], [span[:4] for span in lane["spans"]]) for lane in life["lanes"]] == [
        ("broker", [[BEGIN_S, BEGIN_S + 1, "queued", "queue"]]),
        (
            "generator-0",
            [
                [BEGIN_S + 1, BEGIN_S + 2, "waiting", "for its first token"],
                [BEGIN_S + 2, BEGIN_S + 4, "decoding", "7 tokens of version 1"],
                [BEGIN_S + 4, BEGIN_S + 5, "decoding", "2 tokens of version 2"],
            ],
        ),
    ]
    assert life["events"] == [[BEGIN_S + 2, "chunk", CHUNKS[0][2]], [BEGIN_S + 4, "chunk", CHUNKS[1][2]]]
    with pytest.raises(BadQuestionError, match="to"):
        data.answer("lanes", {"from": "2", "to": "1"})


def test_what_goes_on_beside_a_step_is_not_on_its_path(tmp_path: Path) -> None:
    def part(name: str, start: float, end: float, **attributes: str) -> dict[str, object]:
        return {"name": name, "start": start, "end": end, "parent": "s", "attributes": attributes}

    folder = page_folder(tmp_path / "r")
    spans = [
        part("rl.train.wait", 0, 1, **{"rl.waits_for": "acknowledging"}),
        part("rl.weights.publish", 0.5, 4.5),
        part("rl.train.compute", 1.5, 9.97),
        part("rl.train.wait", 9.97, 10, **{"rl.waits_for": "checkpointing"}),
        part("rl.weights.publish", 10, 13),
        {"name": "rl.train.step", "start": 0, "end": 10, "id": "s", "attributes": STEP},
    ]
    (folder.path / "traces.jsonl").write_text(trace_line("trainer", "trainer", *spans))
    assert RunData(folder).answer("lanes", {})["sentence"] == (
        "Step 2 took 10.0 s: 8.5 s computing (85 %), 1.0 s waiting for the broker's acknowledgement (10 %), "
        "0.5 s publishing weights (5 %)."
    )


def test_weights_are_listed_by_version_machine_and_link(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    (folder.path / "traces.jsonl").write_text(traces())
    found = RunData(folder).answer("weights", {})
    assert found["versions"][1] == {"version": 2, "digest": "d", "bytes": 9, "published_s": BEGIN_S + 10}
    assert found["versions"][2] == {"version": 3, "digest": None, "bytes": None, "published_s": BEGIN_S + 30}
    assert found["machines"] == [{"name": "generator-0", "version": 1, "since_s": BEGIN_S + 7}]
    assert found["links"] == [
        {"from": "its site", "to": "generator-0", "bytes": 3},
        {"from": "trainer", "to": "generator-0", "bytes": 6},
    ]


def test_without_traces_the_trainers_times_are_drawn_and_it_is_said(tmp_path: Path) -> None:
    found = RunData(page_folder(tmp_path / "r", num_steps=2)).answer("lanes", {})
    (lane,) = found["lanes"]
    assert [span[2:4] for span in lane["spans"]] == [
        ["waiting", "step 1"],
        ["computing", "step 1"],
        ["waiting", "step 2"],
        ["computing", "step 2"],
    ]
    assert lane["spans"][1][:2] == [BEGIN_S + 2.5, BEGIN_S + 10]
    assert found["sentence"] == "Step 2 took 10.0 s: 7.5 s computing (75 %), 2.5 s waiting for samples (25 %)."
    assert "without traces" in found["note"]


def test_traces_are_read_in_pieces_the_newest_first_and_the_share_is_one_of_all_files(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    for index in range(1, 5):
        line = trace_line("generator", f"g{index}", {"name": "rl.generator.decode", "start": index, "end": index + 1})
        name = "traces.jsonl" if index == 1 else f"traces-{index:05d}.jsonl"
        (folder.path / name).write_text(line)
    store, shares, names = SpanStore(folder.path), [], []
    for _ in range(4):
        # A budget of nothing is a line.
        store.refresh(budget_s=-1.0)
        shares.append(store.read_share)
        names.append(store.lanes[-1][1])
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.01)
    assert names == ["g4", "g3", "g2", "g1"]


def test_an_answer_holds_few_spans_however_many_there_are(tmp_path: Path) -> None:
    spans = [{"name": "rl.generator.decode", "start": t, "end": t + 0.5} for t in range(20_000)]
    spans.append({"name": "rl.weights.update", "start": 5000, "end": 6000})
    folder = page_folder(tmp_path / "r")
    (folder.path / "traces.jsonl").write_text(trace_line("generator", "generator-0", *spans))
    data = RunData(folder)
    found = data.answer("lanes", {})
    assert found["merged"]
    drawn = found["lanes"][0]["spans"]
    assert 1000 < len(drawn) <= 4000
    assert [span[2] for span in drawn if span[1] - span[0] > 900] == ["updating"]
    assert sum(int(span[3].split()[0]) if span[3] else 1 for span in drawn if span[2] == "decoding") == 20_000
    near = data.answer("lanes", {"from": str(BEGIN_S), "to": str(BEGIN_S + 100)})
    assert (near["merged"], len(near["lanes"][0]["spans"])) == (False, 101)
    store = SpanStore(folder.path, max_spans=1000)
    store.refresh()
    starts, ends, _ = store.columns()
    assert len(starts) <= 1000
    assert (ends - starts).max() == 1000
    assert store.is_thinned


def test_the_samples_that_ended_first_are_forgotten_whatever_file_is_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_spans, "MAX_SPANS_OF_SAMPLES", 10)
    spans = [
        {"name": "rl.sample.queue", "start": t, "end": t + 1, "attributes": {"rl.sample.key": f"g/{t // 4}"}}
        for t in range(24)
    ]
    (tmp_path / "traces.jsonl").write_text(trace_line("broker", "broker", *spans[:12]))
    (tmp_path / "traces-00002.jsonl").write_text(trace_line("broker", "broker", *spans[12:]))
    store = SpanStore(tmp_path)
    store.refresh()
    assert {key: len(found) for key, found in store.samples.items()} == {"g/4": 4, "g/5": 4}


def test_the_newest_step_and_versions_are_told_whatever_file_is_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_spans, "MAX_STEPS", 3)
    monkeypatch.setattr(traced_weights, "MAX_VERSIONS", 16)
    folder = page_folder(tmp_path / "r", num_steps=40)
    for name, versions in (("traces.jsonl", range(1, 21)), ("traces-00002.jsonl", range(21, 41))):
        lines = [
            trace_line(kind, kind, {"name": span, "start": v, "end": v + 1, "id": f"s{v}", "attributes": attributes})
            for v in versions
            for kind, span, attributes in (
                ("trainer", "rl.train.step", {"rl.policy.version": v}),
                ("trainer", "rl.weights.publish", {"rl.policy.version": v, "rl.weights.digest": f"d{v}"}),
                ("generator", "rl.weights.update", {"rl.policy.version": v, "rl.weights.bytes": 5}),
            )
        ]
        (folder.path / name).write_text("".join(lines))
    data = RunData(folder)
    assert data.answer("lanes", {})["sentence"].startswith("Step 40 took 1.0 s")
    found = data.answer("weights", {})
    digests = {each["version"]: each["digest"] for each in found["versions"]}
    assert (digests[40], digests[30], digests[1]) == ("d40", "d30", None)
    assert [(each["name"], each["version"]) for each in found["machines"]] == [("generator", 40)]
    assert found["links"] == [{"from": "its site", "to": "generator", "bytes": 200}]
