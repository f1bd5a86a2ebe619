"""Shows how well a run's lengths are forecast: asks its scheduler; for the status, summary.json and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from console.view.formats import number
from penstock.errors import PenstockError
from penstock.network.rpc import call, open_channel
from penstock.security import Security
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc

_TIMEOUT_S = 2.0
_COLUMNS = {
    "forecaster": "forecaster",
    "test": "tested on",
    "num_samples": "samples",
    "recall_longest_20_percent": "recall 20 %",
    "recall_longest_10_percent": "10 %",
    "recall_longest_5_percent": "5 %",
    "spearman": "Spearman",
    "mean_absolute_error_tokens": "mean error, tokens",
    "interval_coverage": "in the 80 % interval",
}
Document = dict[str, Any]


async def fetch_lengths(run_id: str, scheduler: str | None, security: Security) -> Document | None:
    """The scheduler's report on a run's lengths; None if it does not answer or knows none."""
    if scheduler is None:
        return None
    async with open_channel(scheduler, security) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = scheduler_pb2.GetLengthModelRequest(run_id=run_id)
        try:
            answer = await call(stub.GetLengthModel, request, peer=f"scheduler {scheduler}", timeout_s=_TIMEOUT_S)
        except PenstockError:
            # Forecasts are only advice: a status without their quality is still a status.
            return None
    return as_document(answer)


def as_document(answer: scheduler_pb2.GetLengthModelResponse) -> Document:
    """The quality as JSON; unknown values are null."""
    return {
        "model": answer.model or None,
        "model_version": answer.model_version,
        "num_prompts": answer.num_prompts,
        "num_observations": answer.num_observations,
        "fit_s": answer.fit_duration.ToNanoseconds() / 1e9 if answer.HasField("fit_duration") else None,
        "fit_problem": answer.fit_problem or None,
        "qualities": [_quality(quality) for quality in answer.qualities],
    }


def _quality(quality: scheduler_pb2.LengthQuality) -> Document:
    test = scheduler_pb2.LengthTest.Name(quality.test).removeprefix("LENGTH_TEST_").lower()
    document: Document = {"forecaster": quality.forecaster, "test": test}
    for name in list(_COLUMNS)[2:]:
        is_known = name not in ("spearman", "interval_coverage") or quality.HasField(name)  # type: ignore[arg-type]
        document[name] = getattr(quality, name) if is_known else None
    names = ("expected_tokens", "mean_tokens", "num_samples")
    document["buckets"] = [{name: getattr(bucket, name) for name in names} for bucket in quality.buckets]
    return document


def length_lines(document: Document) -> Iterator[str]:
    """A readable line on the forecaster, and one on each test of it."""
    learned = f"{document['num_observations']} lengths of {document['num_prompts']} prompts"
    if document["model"] is None:
        yield f"lengths: means so far, from {learned}"
    else:
        yield f"lengths: {document['model']}, version {document['model_version']}, from {learned}"
    if document["fit_problem"]:
        yield f"  the newest fit failed: {document['fit_problem']}"
    for quality in document["qualities"]:
        coverage = quality["interval_coverage"]
        yield (
            f"  {quality['forecaster']}, {quality['test'].replace('_', '-')}: finds "
            f"{'/'.join(number(quality[f'recall_longest_{percent}_percent'], '.2f') for percent in (20, 10, 5))} "
            f"of the longest 20/10/5 %, Spearman {number(quality['spearman'], '.2f')}, "
            f"off by {number(quality['mean_absolute_error_tokens'], '.0f')} tokens"
            + (f", {100 * coverage:.0f} % in the 80 % interval" if coverage is not None else "")
        )


def lengths_table(summary: Mapping[str, Any]) -> str:
    """The report's section; empty if nothing was forecast."""
    document = summary.get("lengths")
    if not isinstance(document, dict) or not document.get("qualities"):
        return ""
    head = "".join(f"<th>{escape(title)}</th>" for title in _COLUMNS.values())
    rows = []
    for quality in document["qualities"]:
        cells = [str(quality.get(name) or "") for name in ("forecaster", "test")]
        cells.append(number(quality.get("num_samples"), ",d"))
        forms = (".2f", ".2f", ".2f", ".2f", ".1f", ".2f")
        cells += [number(quality.get(name), form) for name, form in zip(list(_COLUMNS)[3:], forms, strict=True)]
        rows.append("".join(f"<td class=value>{escape(cell)}</td>" for cell in cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h2>Length forecasts</h2><table><tr>{head}</tr>{body}</table>"
