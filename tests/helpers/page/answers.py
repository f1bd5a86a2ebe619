"""Answers of the page's server for an invented run of any length, by the shapes of docs/page.md.

Deterministic: the same question gets the same answer. Completions hold what a page must not believe.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

START_S = 1_795_660_000.0
STEP_S = 2.0
HOSTILE = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script> \x1b[31m\u202egnp.exe\x00'
METRICS = (
    "reward/mean",
    "component/correct",
    "component/format",
    "length/mean",
    "length/max",
    "staleness/mean",
    "staleness/max",
    "loss/entropy",
    "loss/mismatch_kl",
    "loss/clip_fraction",
    "step/zero_variance_groups",
    "step/groups",
    "throughput/samples_per_second",
    "time/step_s",
    "time/train_s",
    "time/idle_s",
    "optimizer/grad_norm",
    "publish/bytes",
    "eval/sampled_accuracy",
    "eval/greedy_accuracy",
)
Answer = dict[str, Any]


@dataclass(slots=True)
class InventedRun:
    """One run; `steps` may rise between two questions."""

    index: int = 0
    steps: int = 100
    num_steps: int = 100
    samples: int = 256
    state: str = "finished"

    def described(self) -> Answer:
        """Its entry in /api/runs."""
        return {
            "index": self.index,
            "run_id": f"invented-{self.index}",
            "state": self.state,
            "outcome": self.state,
            "steps": self.steps,
            "num_steps": self.num_steps,
            "started_s": START_S,
            "updated_s": START_S + STEP_S * self.steps,
            "config": f"run:\n  id: invented-{self.index}\noptimizer:\n  learning_rate: {4e-4 * (1 + self.index)}\n",
        }

    def series(self, names: list[str], x: str, points: int) -> Answer:
        """/api/series: buckets of as many steps as it takes to stay within `points`."""
        width = max(1, math.ceil(self.steps / points))
        ends = [min(first + width, self.steps) for first in range(0, self.steps, width)]
        scale = {"step": 1.0, "tokens": 12_000.0, "hours": STEP_S / 3600}[x]
        values = {name: [self._metric(name, end) for end in ends] for name in names if name in METRICS}
        answer: Answer = {"x": [end * scale for end in ends], "series": values, "steps": self.steps}
        for key, sign in (("min", -1), ("max", 1)):
            spread = 0.05 * sign if width > 1 else 0.0
            answer[key] = {
                name: [None if value is None else value + spread * abs(value) for value in line]
                for name, line in values.items()
            }
        return answer

    def _metric(self, name: str, step: int) -> float | None:
        if name.startswith("eval/") and step % max(1, self.steps // 8) not in (0, 1):
            return None
        if step % 41 == 7:
            return None
        draw = random.Random(f"{self.index}{name}{step}").uniform(-1, 1)
        learned = 1 - math.exp(-3 * step / max(self.num_steps, 1))
        levels = {
            "reward/mean": 0.3 + 0.5 * learned,
            "loss/entropy": 0.6 - 0.4 * learned,
            "length/mean": 40 + 60 * learned,
            "step/groups": 32.0,
            "step/zero_variance_groups": 4 + 20 * learned,
            "publish/bytes": 4.4e6,
        }
        return levels.get(name, 0.2 + 0.6 * learned) * (1 + 0.06 * draw)

    def sample_list(self, step: int | None, *, sort: str, search: str, offset: int, limit: int) -> Answer:
        """/api/samples."""
        at = self.steps if step is None else step
        found = [self._listed(at, number) for number in range(self.samples)]
        found = [sample for sample in found if search.lower() in (sample["prompt"] + sample["completion"]).lower()]
        keys = {
            "best": lambda each: -each["score"],
            "worst": lambda each: each["score"],
            "longest": lambda each: -each["tokens"],
            "changed": lambda each: -each["staleness"],
        }
        if sort in keys:
            found.sort(key=keys[sort])
        page = found[offset : offset + limit]
        return {"step": at, "steps_with_samples": [1, self.steps], "total": len(found), "samples": page}

    def _listed(self, step: int, number: int) -> Answer:
        draw = random.Random(f"{self.index}-{step}-{number}")
        completion = (
            f"{HOSTILE} {number * 3} + {step}"
            if number == 1
            else f"The sum is {number * 3} + {step} = {number * 3 + step}."
        )
        return {
            "key": f"g{step}-{number // 8}/{number % 8}",
            "step": step,
            "score": 2.0 if number == 1 else round(draw.random(), 3),
            "status": "judge_error" if number == 5 else "ok",
            "components": {"correct": 1.0, "format": 0.5},
            "tokens": 20 + draw.randrange(200),
            "staleness": draw.randrange(3),
            "min_version": max(0, step - 2),
            "max_version": step - 1,
            "prompt": f"What is {number * 3} plus {step}?",
            "completion": completion,
            "generator_id": f"generator-{number % 2}",
        }

    def sample(self, step: int | None, key: str) -> Answer:
        """/api/sample."""
        at = self.steps if step is None else step
        group, index = key.rsplit("/", 1)
        listed = self._listed(at, int(group.rsplit("-", 1)[1]) * 8 + int(index))
        words = [f"{word} " for word in listed["completion"].split(" ")]
        words += [f"then {number} " for number in range(listed["tokens"] - len(words))]
        tokens = [self._token(at, place, word) for place, word in enumerate(words)]
        submit_s = START_S + STEP_S * (at - 2)
        return {
            "key": key,
            "prompt": [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": listed["prompt"]}],
            "completion": "".join(words),
            "turns": [
                {"role": "assistant", "text": "add(3, 4)", "reward": 0.25},
                {"role": "environment", "text": HOSTILE, "reward": None},
            ],
            "score": {
                "value": listed["score"],
                "status": listed["status"],
                "components": listed["components"],
                "details": {"verdict": "right <b>"},
                "message": "",
                "model": "exact_match",
            },
            "tokens": tokens,
            "times": {
                "submit_s": submit_s,
                "lease_s": submit_s + 0.2,
                "finish_s": submit_s + 2.1,
                "score_s": submit_s + 2.2,
                "trained_s": submit_s + 3.9,
            },
            "generator_id": listed["generator_id"],
            "num_leases": 2,
            "same_prompt": [{"step": at - 1, "key": key.replace(f"g{at}-", f"g{at - 1}-"), "version": at - 2}]
            if at > 1
            else [],
        }

    def _token(self, step: int, place: int, text: str) -> Answer:
        draw = random.Random(f"{step}{place}")
        logprob = -draw.expovariate(2)
        return {
            "text": text,
            "id": 100 + place,
            "logprob": logprob,
            "trainer_logprob": logprob + draw.gauss(0, 0.01),
            "advantage": draw.uniform(-1, 1),
            "version": step - 2 + (place > 30),
            "staleness": 2 - (place > 30),
            "mask": int(place % 50 != 49),
        }

    def lanes(self, from_s: float | None, to_s: float | None) -> Answer:
        """/api/lanes, at most 4,000 spans."""
        begin, end = START_S, START_S + STEP_S * self.steps
        start, stop = max(begin, from_s or begin), min(end, to_s or end)
        first, last = int((start - begin) / STEP_S), math.ceil((stop - begin) / STEP_S)
        width = max(1, math.ceil((last - first) / 200))
        lanes = [self._lane(name, kind, pattern, range(first, last, width), width) for name, kind, pattern in LANES]
        sentence = f"Step {last} took 2.0 s: 1.2 s of decoding on generator-1, then 0.7 s of computing in the trainer."
        return {
            "from": start,
            "to": stop,
            "begin": begin,
            "end": end,
            "lanes": lanes,
            "sentence": sentence,
            "merged": width > 1,
        }

    def _lane(
        self, name: str, kind: str, pattern: tuple[tuple[float, float, str], ...], steps: range, width: int
    ) -> Answer:
        spans = []
        for step in steps:
            for start, stop, what in pattern:
                at = START_S + STEP_S * step
                key = f"g{step}-0/0" if what == "decoding" and width == 1 else None
                spans.append([at + start * STEP_S * width, at + stop * STEP_S * width, what, f"step {step}", key])
        return {"name": name, "kind": kind, "spans": spans}


LANES: tuple[tuple[str, str, tuple[tuple[float, float, str], ...]], ...] = (
    ("generator-0", "generator", ((0.0, 0.6, "decoding"), (0.6, 0.65, "updating"), (0.65, 1.0, "decoding"))),
    ("generator-1", "generator", ((0.1, 0.7, "decoding"), (0.7, 0.8, "updating"))),
    ("reward-0", "reward", ((0.55, 0.6, "scoring"), (0.9, 0.95, "scoring"))),
    ("environment-0", "environment", ((0.2, 0.3, "environment"),)),
    ("trainer rank 0", "trainer", ((0.0, 0.4, "waiting"), (0.4, 0.9, "computing"), (0.9, 1.0, "publishing"))),
)


def problems(is_live: bool) -> Answer:
    """/api/problems."""
    now = {
        "what": "The trainer waits for samples: generator-1 <hangs>",
        "since_s": START_S + 30,
        "count": 1,
        "source": "broker",
        "line": None,
        "docs": "docs/operating.md#what-fails-and-what-happens",
        "state": "now",
    }
    past = {
        "what": "generator-0 was restarted",
        "since_s": START_S + 10,
        "count": 2,
        "source": "logs/generator-0.log",
        "line": f"RuntimeError: {HOSTILE}",
        "docs": "docs/generator.md",
        "state": "past",
    }
    return {"problems": [now, past] if is_live else [past]}


COST: Answer = {
    "sites": [
        {"site": "fra", "gpus": {"H100": 8, "L4": 2}, "dollars_per_hour": 21.4},
        {"site": "waw", "gpus": {"L4": 3}, "dollars_per_hour": 2.1},
    ],
    "dollars_per_hour": 23.5,
    "dollars_per_million_tokens": 0.4213,
    "is_planned": True,
    "purchases": [
        {
            "gpus": {"L4": 1},
            "site": "waw",
            "gain": 0.04,
            "dollars_per_hour": 0.7,
            "dollars_per_million_tokens": 0.4171,
        }
    ],
    "plan": {
        "revision": "3",
        "expected_tokens_per_second": 18_000.0,
        "cost_per_million_tokens": 0.3627,
        "solver": "streamrl",
        "explanation": "35.1 samples/s by the cost model rm1, limited by generation; generators idle 4%, trainers 9%",
    },
    "measured": {
        "tokens_per_second": 15_494.4,
        "samples_per_second": 27.4,
        "generator_idle_ratio": None,
        "trainer_idle_ratio": 0.11,
        "over": "the newest steps",
        "cost_per_million_tokens": 0.4213,
    },
    "advice": ["One more L4 in waw would bring 4 % more samples a second."],
}


def weights(run: InventedRun) -> Answer:
    """/api/weights."""
    newest = run.steps
    return {
        "versions": [
            {
                "version": version,
                "digest": f"blake3:{version:064x}",
                "bytes": 4_475_624,
                "published_s": START_S + STEP_S * version,
            }
            for version in range(max(0, newest - 300), newest + 1)
        ],
        "machines": [
            {"name": "generator-0", "version": newest, "since_s": START_S + STEP_S * newest},
            {"name": "generator-1", "version": newest - 1, "since_s": START_S + STEP_S * (newest - 1)},
        ],
        "links": [{"from": "trainer", "to": "generator-0", "bytes": 4_475_624 * newest}],
    }
