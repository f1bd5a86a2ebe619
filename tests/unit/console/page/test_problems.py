"""What is wrong with a run, by its logs, its processes, its books and its broker; and what it costs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict

from console.config.run_folder import ProcessRecord, RunFolder
from console.page.queries.problems import DOCS, DROPS, LIMITS, REFUSALS, RESTARTS, STALENESS, STALLS
from console.page.run_data import RunData
from penstock.v1 import broker_pb2
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.reference import RM1
from services.scheduler.planning.plan_wire import checked_task, plan_task
from tests.helpers.page.run_folders import BEGIN_S, page_folder

ROOT = Path(__file__).resolve().parents[4]
LOG = """\
2026-11-26T02:39:58.785058Z [warning  ] weights not taken              error=gone policy_version=3 service=generator-0
2026-11-26T02:39:59.000000Z [info     ] generator is up                service=generator-0
2026-11-26T02:40:58.785058Z [warning  ] weights not taken              error=late policy_version=4 service=generator-0
{"event": "engine failed <b>", "level": "error", "timestamp": "2026-11-26T02:41:58.785058Z"}
2026-11-26T02:40:00.000000Z [warning  ] Triton is left out              library=vllm.triton_utils service=generator-0
{"event": "falls back", "level": "warning", "library": "vllm", "timestamp": "2026-11-26T02:41:58.785058Z"}
{"event": "torn
\x1b[31mnot a line of ours\x1b[0m
"""


def test_problems_of_logs_processes_counters_and_broker_name_their_pages(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    folder.log_of("generator-0").write_text(LOG)
    folder.write_record(
        ProcessRecord(name="generator-0", pid=1, started_ticks=-1, state="paused", why="ended with 1", num_restarts=4)
    )
    summary = {"audit": {"dropped": {"stale": 7, "no_score": 0}, "balanced": False}, "restarts": {"reward": 2}}
    folder.summary.write_text(json.dumps(summary))
    found = RunData(folder).answer("problems", {})["problems"]
    by_what = {each["what"]: each for each in found}
    taken = by_what["weights not taken"]
    assert (taken["count"], taken["source"], taken["docs"]) == (2, "generator-0", "docs/weights.md#how-contents-travel")
    assert "error=late" in taken["line"]
    assert by_what["engine failed <b>"]["docs"] == "docs/generator.md#failures"
    paused = by_what["generator-0 is paused: ended with 1"]
    assert (paused["count"], paused["state"], paused["docs"]) == (4, "past", RESTARTS)
    assert "engine failed" in paused["line"]
    assert by_what["reward was restarted"]["count"] == 2
    assert by_what["samples were dropped: stale"]["docs"] == STALENESS
    assert found[0]["what"] == "the audit does not balance"
    assert len(found) == 6


def test_stalls_come_first_as_the_broker_tells_them(tmp_path: Path) -> None:
    run = broker_pb2.GetRunResponse(run_id="r", reward_warnings={"reward-0": "2 canaries drift"})
    run.audit.balanced = True
    run.audit.dropped["stale"] = 1
    run.waits.add(waiter="trainer", owner="generators", reason="no generator is connected").since_time.FromSeconds(100)
    data = RunData(page_folder(tmp_path / "r"), live=lambda: run)
    stall, *others = data.answer("problems", {})["problems"]
    assert stall["what"] == "trainer waits for generators: no generator is connected"
    assert (stall["since_s"], stall["state"], stall["docs"]) == (100.0, "now", STALLS)
    assert {each["source"] for each in others} == {"reward-0", "audit"}
    assert data.facts()["state"] == "running"
    run.is_closed, run.policy_version = True, 9
    elsewhere = RunData(RunFolder(tmp_path / "r-elsewhere"), live=lambda: run).facts()
    assert (elsewhere["run_id"], elsewhere["state"], elsewhere["steps"]) == ("r-elsewhere", "finished", 9)


def test_refused_chunks_are_counted_by_reason_and_generator_with_the_line_of_its_log(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    line = "2026-11-26T02:39:58.1Z [info ] sample dropped  lease_id=l reason='LEASE_LOST: no lease \"l\"'"
    folder.log_of("generator-0").write_text(f"{line}\n{LOG}")
    counted = {"gen-0": {"LEASE_LOST": 3, "STALE": 0}, "a/../b": {"ODD": 2, "x": "y"}, "gen-2": "?"}
    folder.summary.write_text(json.dumps({"refused_chunks": counted}))

    def told(data: RunData) -> list[tuple[object, ...]]:
        found = [each for each in data.answer("problems", {})["problems"] if "refused" in each["what"]]
        return [(each["what"][-10:], each["source"], each["count"], each["docs"], each["line"]) for each in found]

    lost = ("LEASE_LOST", "gen-0", 3, REFUSALS["LEASE_LOST"], line)
    assert told(RunData(folder)) == [lost, ("fused: ODD", "a/../b", 2, LIMITS, None)]
    run = broker_pb2.GetRunResponse(run_id="r")
    run.generators.add().hello.generator_id = "gen-0"
    run.generators[0].beat.refused_chunks["LEASE_LOST"] = 3
    assert told(RunData(folder, live=lambda: run)) == [lost]


@pytest.mark.parametrize(
    "page", sorted({page for _, page in DOCS} | {*REFUSALS.values(), LIMITS, STALLS, RESTARTS, DROPS, STALENESS})
)
def test_the_pages_that_explain_exist(page: str) -> None:
    path, _, anchor = page.partition("#")
    text = (ROOT / path).read_text(encoding="utf-8")
    titles = [line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")]
    anchors = {"".join(c for c in title if c.isalnum() or c in " -").replace(" ", "-") for title in titles}
    assert not anchor or anchor in anchors


def test_states_are_derived_from_what_is_left_of_a_run(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    data = RunData(folder)
    assert data.facts()["state"] == "cut short"
    for outcome, state in (("completed", "finished"), ("stopped", "finished"), ("failed", "failed")):
        folder.summary.write_text(json.dumps({"outcome": outcome}))
        assert (data.facts()["state"], data.facts()["outcome"]) == (state, outcome)
    for content in ("", "{", "[]", "\x00", '{"outcome": 3}'):
        folder.summary.write_text(content)
        folder.config.write_text(content)
        assert data.facts()["state"] == "cut short"
        assert data.answer("cost", {})["measured"]["tokens_per_second"] == 10.0
    for each in folder.path.iterdir():
        if each.is_file():
            each.unlink()
    assert RunData(folder).facts()["run_id"] == "r"
    for what in ("series", "metrics", "samples", "lanes", "problems", "cost", "weights"):
        json.dumps(RunData(folder).answer(what, {}), allow_nan=False)


def test_gpus_and_dollars_are_those_of_the_plan(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    problem = ROOT / "tests/helpers/plans/planning_instances/tiny_02.json"
    document = json.loads(problem.read_text())
    folder.config.write_text(f"run: {{id: r}}\nscheduler: {{problem: {problem}}}\nredis: redis://:secret@h:1\n")
    data = RunData(folder)
    node = document["nodes"][0]
    assert "secret" not in data.facts()["config"]
    whole = sum(each["gpus"] * each.get("count", 1) for each in document["nodes"])
    assert sum(sum(site["gpus"].values()) for site in data.answer("cost", {})["sites"]) == whole
    name = f"{node['name']}-0"
    plan = {"revision": "1", "assignments": [{"node_id": name, "role": "ROLE_TRAINER", "accelerator_indices": [0]}]}
    folder.plans.write_text(json.dumps(plan) + "\n" + '{"torn')
    found = data.answer("cost", {})
    (site,) = found["sites"]
    assert site["gpus"] == {node["gpu"]: 1}
    price = node["price_per_gpu_hour"]
    assert found["dollars_per_hour"] == pytest.approx(price)
    assert found["dollars_per_million_tokens"] == pytest.approx(1e6 * price / 3600 / 10)


def test_without_a_plan_prices_are_those_of_the_configuration(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    assert RunData(folder).answer("cost", {})["sites"] == []

    def told(prices: str, gpus: object) -> tuple[object, ...]:
        folder.config.write_text(f"run: {{id: r}}\nprices: {prices}\n")
        folder.devices.write_text(json.dumps({"site": "fra", "gpus": gpus}))
        found = RunData(folder).answer("cost", {})
        (site,) = found["sites"]
        return site["dollars_per_hour"], site["missing_prices"], found["dollars_per_million_tokens"]

    of_two = 1e6 * 7 / 3600 / 10
    assert told("{H100: 3, L4: 0.5}", {"H100": 2, "L4": 2}) == (7.0, [], pytest.approx(of_two))
    assert told("{H100: 3}", {"H100": 2, "L4": 2}) == (None, ["prices.L4"], None)
    assert told("{}", {}) == (None, ["prices.machine"], None)
    assert told("{machine: 0.2}", {}) == (0.2, [], pytest.approx(1e6 * 0.2 / 3600 / 10))
    assert told("[nonsense]", {"H100": "x"}) == (None, ["prices.machine"], None)


def test_what_one_more_machine_brings_is_the_plans_and_costs_at_the_measured_rate(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    problem = ROOT / "tests/helpers/plans/planning_instances/tiny_02.json"
    folder.config.write_text(f"run: {{id: r}}\nscheduler: {{problem: {problem}}}\n")
    task = checked_task(pb.CreatePlanRequest(run_id="r", problem_json=problem.read_text()), cost_model=RM1)
    plan = plan_task(task, time_left=lambda: 1000.0, start=None, keeps_pool=False, is_advised=True)
    assert plan.next_purchases
    folder.plans.write_text(json.dumps(MessageToDict(plan, preserving_proto_field_name=True)) + '\n{"revision": 2}\n')
    os.utime(folder.config, (BEGIN_S + 1e6,) * 2)
    facts = RunData(folder).facts()
    assert facts["started_s"] == BEGIN_S + 10
    found = RunData(folder).answer("cost", {})
    first, stated = found["purchases"][0], plan.next_purchases[0]
    assert (first["gpus"], first["gain"]) == ({stated.gpu: stated.num_gpus}, pytest.approx(stated.gain))
    per_hour = found["dollars_per_hour"] + stated.usd_per_hour
    assert found["measured"]["cost_per_million_tokens"] == found["dollars_per_million_tokens"]
    assert first["dollars_per_million_tokens"] == pytest.approx(1e6 * per_hour / 3600 / (10 * (1 + stated.gain)))
    odd = '"cost_per_million_tokens": NaN, "expected_tokens_per_second": 1e999, "solver": []'
    folder.plans.write_text(f'{{"next_purchases": [3, {{"gain": "x"}}, {{"gain": 1, "num_gpus": NaN}}], {odd}}}\n')
    found = RunData(folder).answer("cost", {})
    assert found["purchases"] == []
    assert found["plan"] == {"revision": "", "solver": "", "explanation": ""}
