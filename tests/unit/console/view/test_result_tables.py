"""The tables of the report: complete, safe with hostile text, and made from whatever there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from console.config.run_folder import RunFolder
from console.view.axis_ticks import ticks
from console.view.outcome import read_lines
from console.view.result_tables import newest_checkpoint, results_html
from console.view.source_table import source_words

STEPS = [
    {"policy_version": version, "reward/mean": version / 40, "length/mean": 40.0, "length/max": 190,
     "staleness/mean": 0.4, "staleness/max": 1, "throughput/samples_per_second": 90.0,
     "throughput/response_tokens_per_second": 4000.0,
     "time/step_s": 2.0, "time/train_s": 1.5, "time/idle_s": 0.5}
    for version in range(1, 31)
]  # fmt: skip
EVALUATIONS = [{"policy_version": 0, "sampled_accuracy": 0.3, "greedy_accuracy": 0.6}]
SUMMARY = {
    "run_id": "r1", "outcome": "completed", "steps": 30, "wall_s": 61.0, "reward_first": 0.1, "reward_last": 0.7,
    "audit": {"submitted": 10, "trained": 8, "dropped": {"stale": 2}, "in_flight": 0, "balanced": True},
    "versions": {"torch": "2.13.0"}, "restarts": {"broker": 1, "trainer": 0},
}  # fmt: skip


def page(**changes: object) -> str:
    return results_html(RunFolder(Path("/nowhere")), STEPS, EVALUATIONS, {**SUMMARY, **changes})


def test_sources_stand_beside_each_other() -> None:
    assert "by source" not in page()
    steps = [
        {**step, "source/easy/reward_mean": 0.75, "source/hard/reward_mean": step["reward/mean"],
         "source/hard/pass_rate": 0.5, "source/hard/resting_rows": float(step["policy_version"])}
        for step in STEPS
    ]  # fmt: skip
    evaluations = [{**EVALUATIONS[0], "source/hard/greedy_accuracy": 0.625, "source/hard/sampled_accuracy": None}]
    text = results_html(RunFolder(Path("/nowhere")), steps, evaluations, SUMMARY)
    (hard,) = re.findall(r"<tr><th>hard</th>(.*?)</tr>", text)
    cells = re.findall(r"<td class=value>(.*?)</td>", hard)
    assert cells == ["-", "-", "0.637", "0.50", "-", "-", "-", "30", "-", "0.625"]
    assert source_words(steps[3]) == "easy 0.750, hard 0.100"


def test_it_says_what_the_run_came_to() -> None:
    text = page()
    for words in (
        "0.100 to 0.700",
        "submitted 10 = trained 8 + dropped 2 (stale 2) + in flight 0: balanced",
        "broker (1)",
    ):
        assert words in text
    assert "trainer (0)" not in text


def test_the_way_to_load_the_checkpoint_is_valid_python(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_30").mkdir(parents=True)
    found = results_html(RunFolder(tmp_path), STEPS, EVALUATIONS, SUMMARY)
    code = re.search(r"<pre>(from transformers.*?)</pre>", found, flags=re.DOTALL)
    assert code is not None
    text = code[1].replace("&#x27;", "'").replace("&quot;", '"')
    compile(text, "report", "exec")
    assert f"'{tmp_path}/checkpoints/step_30'" in text


def test_text_of_the_run_cannot_become_markup() -> None:
    text = results_html(RunFolder(Path("/<b>")), [], [], {"message": "<img>", "versions": {"<script>": "<script>"}})
    assert "<b>" not in text
    assert "<img>" not in text
    assert "<script>" not in text


def test_an_unbalanced_audit_stands_out() -> None:
    audit = {"submitted": 9, "trained": 8, "dropped": {}, "in_flight": 0, "balanced": False}
    assert 'class="value bad">submitted 9 = trained 8 + dropped 0 + in flight 0: NOT BALANCED' in page(audit=audit)


def test_the_newest_whole_checkpoint_is_named(tmp_path: Path) -> None:
    for name in ("step_9", "step_10", "step_11.tmp", "step_x"):
        (tmp_path / name).mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "step_10"
    assert newest_checkpoint(tmp_path / "none") is None


def test_lines_that_are_no_metrics_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"policy_version": 1}\n[]\n{"other": 1}\nnonsense\n')
    assert read_lines(path) == [{"policy_version": 1}]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.0), (-3.0, 17.0), (5.0, 5.0), (0.001, 0.0012), (0, 1e6)])
def test_ticks_cover_the_range_with_few_round_numbers(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert found == sorted(found)
    tolerance = 1e-9 * max(1.0, abs(high))
    assert found[0] <= low + tolerance
    assert found[-1] >= high - tolerance


def test_it_says_how_well_lengths_were_foreseen() -> None:
    assert "Length forecasts" not in page(lengths=None)
    qualities = [
        {"forecaster": "ridge", "test": "held_out", "num_samples": 1234, "recall_longest_20_percent": 0.8449,
         "recall_longest_10_percent": 0.7, "recall_longest_5_percent": 0.6, "spearman": 0.93,
         "mean_absolute_error_tokens": 1100.4, "interval_coverage": 0.81},
        {"forecaster": "<b>", "test": "prequential", "num_samples": 2, "spearman": None, "interval_coverage": None},
    ]  # fmt: skip
    text = page(lengths={"model": "ridge", "qualities": qualities})
    row = ["ridge", "held_out", "1,234", "0.84", "0.70", "0.60", "0.93", "1100.4", "0.81"]
    assert "".join(f"<td class=value>{cell}</td>" for cell in row) in text
    assert "&lt;b&gt;" in text
