"""Says what is wrong with a run, or was: each with its source, the line of the log, and the page that explains it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from console.config.run_folder import ProcessRecord, RunFolder
from console.page.files.log_lines import Complaint, complaints, newest_line
from console.page.files.values import Answer, count, mapping, text
from penstock.v1 import broker_pb2
from penstock.wire.timestamps import unix_s

MAX_PROBLEMS = 300
DOCS = (
    (r"redis|store away|payload", "docs/operating.md#outages"),
    (r"broker does not answer|no audit", "docs/operating.md#outages"),
    (r"disk|no room|No space", "docs/operating.md#a-full-disk"),
    (r"short of a core|event loop was held", "docs/protocol.md#when-a-lease-ends"),
    (r"checkpoint", "docs/training.md#checkpoints"),
    (r"weights|delta|broadcast|version was not published", "docs/weights.md#how-contents-travel"),
    (r"engine|sample failed", "docs/generator.md#failures"),
    (r"canar", "docs/rewards.md#canaries"),
    (r"scor|reward|judge", "docs/rewards.md#samples-without-a-score"),
    (r"environment", "docs/environments.md#limits-and-statuses"),
    (r"\bplan\b|revis", "docs/planning.md#while-a-run-goes-on"),
    (r"lengths", "docs/lengths.md"),
    (r"certificate", "docs/operating.md#certificates"),
    (r"critic", "docs/training.md#a-critic-of-its-own"),
)
"""The page that explains what a message is about, by what it says."""
REFUSALS = {
    "LEASE_LOST": "docs/protocol.md#when-a-lease-ends",
    "UNKNOWN_SAMPLE": "docs/protocol.md#when-a-lease-ends",
    "OFFSET_MISMATCH": "docs/operating.md#outages",
    "UNAVAILABLE": "docs/operating.md#outages",
    "WRONG_OWNER": "docs/protocol.md#who-owns-a-shard",
    "STALE": "docs/protocol.md#staleness",
    "RUN_CLOSED": "docs/protocol.md#ends-of-streams",
}
"""The page that explains why chunks of tokens are refused, by the broker's reason."""
STALLS, RESTARTS = "docs/protocol.md#who-waits-for-whom", "docs/operating.md#what-fails-and-what-happens"
DROPS, AUDIT = "docs/protocol.md#groups-that-lose-samples-or-generate-too-many", "docs/protocol.md#the-audit"
STALENESS, LIMITS = "docs/protocol.md#staleness", "docs/protocol.md#limits"


def problems(folder: RunFolder, *, summary: Answer, run: broker_pb2.GetRunResponse | None) -> Answer:
    """What is wrong now, then what was, newest first.

    Args:
        folder: Of the run.
        summary: Its summary.json, as far as there is one.
        run: The broker's state; None if it is not known.
    """
    logged = complaints(folder.logs)
    found = [] if run is None else [*_stalls(run), *_warnings(run)]
    found += _processes(folder.records(), mapping(summary.get("restarts")), logged)
    found += _books(summary if run is None else {"audit": _audit(run)})
    found += _refusals(folder, summary, run)
    found += [_logged(each) for each in logged]
    found.sort(key=lambda each: (each["state"] != "now", -(each["since_s"] or 0.0)))
    return {"problems": found[:MAX_PROBLEMS], "asked_broker": run is not None}


def _stalls(run: broker_pb2.GetRunResponse) -> Iterator[Answer]:
    for wait in run.waits:
        since_s = unix_s(wait.since_time) if wait.HasField("since_time") else None
        what = f"{wait.waiter} waits for {wait.owner}: {wait.reason}"
        yield _problem(what, source="status", docs=docs_of(wait.reason, STALLS), since_s=since_s, is_now=True)


def _warnings(run: broker_pb2.GetRunResponse) -> Iterator[Answer]:
    said = sorted(run.reward_warnings.items())
    said += [(each.hello.generator_id, each.beat.warning) for each in run.generators if each.beat.warning]
    for source, warning in said:
        yield _problem(text(warning, 1024), source=source, docs=docs_of(warning), is_now=True)


def _processes(records: Sequence[ProcessRecord], restarts: object, logged: Sequence[Complaint]) -> Iterator[Answer]:
    is_under_way = any(record.name == "console" and record.is_alive for record in records)
    counted = {name: number for name, value in mapping(restarts).items() if (number := count(value))}
    for record in records:
        is_down = record.state in ("restarting", "paused", "failed")
        num_restarts = max(record.num_restarts, counted.pop(record.name, 0))
        if not num_restarts and not is_down:
            continue
        why = f": {record.why}" if record.why else ""
        what = f"{record.name} is {record.state}{why}" if is_down else f"{record.name} was restarted"
        line = next((each.line for each in logged if each.source == record.name and each.level != "warning"), None)
        yield _problem(
            what,
            source=record.name,
            docs=RESTARTS,
            since_s=record.since_s or None,
            number=max(1, num_restarts),
            line=line,
            is_now=is_down and is_under_way,
        )
    for name, number in counted.items():
        yield _problem(f"{name} was restarted", source=name, docs=RESTARTS, number=number)


def _books(summary: Answer) -> Iterator[Answer]:
    audit = mapping(summary.get("audit"))
    for reason, number in mapping(audit.get("dropped")).items():
        if count(number):
            docs = STALENESS if "stale" in reason else DROPS
            yield _problem(f"samples were dropped: {text(reason, 64)}", source="audit", docs=docs, number=number)
    if audit and audit.get("balanced") is False:
        yield _problem("the audit does not balance", source="audit", docs=AUDIT, is_now=True)


def _refusals(folder: RunFolder, summary: Answer, run: broker_pb2.GetRunResponse | None) -> Iterator[Answer]:
    """Chunks of tokens that brokers refused, as each generator counts them since it started."""
    said = mapping(summary.get("refused_chunks"))
    if run is not None:
        said = {each.hello.generator_id: dict(each.beat.refused_chunks) for each in run.generators}
    for generator_id, reasons in said.items():
        for reason, number in mapping(reasons).items():
            if not count(number):
                continue
            # A run's own generators are gen-N, and their logs generator-N.log.
            log = text(generator_id, 128).replace("gen-", "generator-", 1)
            yield _problem(
                f"chunks of tokens were refused: {text(reason, 64)}",
                source=text(generator_id, 128),
                docs=REFUSALS.get(reason, LIMITS),
                number=number,
                line=newest_line(folder.logs, log, f"{reason}: ") if "/" not in log else None,
            )


def _audit(run: broker_pb2.GetRunResponse) -> Answer:
    return {"dropped": dict(run.audit.dropped), "balanced": run.audit.balanced}


def _logged(each: Complaint) -> Answer:
    return _problem(
        each.event,
        source=each.source,
        docs=docs_of(each.line, None),
        since_s=each.first_s,
        number=each.count,
        line=each.line,
    )


def docs_of(message: str, otherwise: str | None = RESTARTS) -> str | None:
    """The page that explains a message."""
    return next((page for words, page in DOCS if re.search(words, message, re.IGNORECASE)), otherwise)


def _problem(
    what: str,
    *,
    source: str,
    docs: str | None,
    since_s: float | None = None,
    number: int = 1,
    line: str | None = None,
    is_now: bool = False,
) -> Answer:
    return {
        "what": what,
        "since_s": since_s,
        "count": number,
        "source": source,
        "line": line,
        "docs": docs,
        "state": "now" if is_now else "past",
    }
