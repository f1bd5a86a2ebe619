"""Lists the samples of a step: sorted, searched, a page of them at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from console.page.files.indexed_recording import IndexedRecording
from console.page.files.values import Answer, count, mapping, number, one_of, text, whole
from console.recording.row_codec import Row

SORTS = ("order", "best", "worst", "longest", "changed")
MAX_LISTED = 4096
"""Samples of a step that are read; of a larger one, those that were recorded first."""
MAX_PAGE = 500
PREVIEW_CHARS = 200
MAX_SEARCH_CHARS = 200
_MAX_CACHED = 4


class SampleLists:
    """The lists of one recording; those asked for last are kept."""

    def __init__(self, recording: IndexedRecording) -> None:
        self._recording = recording
        self._kept: OrderedDict[tuple[int, ...], list[Answer]] = OrderedDict()
        self._step_while_reading: int | None = None

    def answer(self, query: Mapping[str, str]) -> Answer:
        """The samples of `step`, or of the newest one that has any. Raises BadQuestionError.

        `search` finds a text in prompts and completions, whether in capitals or not; `sort=changed` puts first those
        whose prompt is now scored most differently from the last time it was trained on.
        """
        self._recording.advance()
        index = self._recording.index
        steps = index.steps()
        step = whole(query, "step", self._newest(steps))
        sort = one_of(query, "sort", SORTS)
        found = listed = self._listed(step)
        if wanted := text(query.get("search"), MAX_SEARCH_CHARS).casefold():
            hits = set(self._matching(step, wanted))
            found = [each for each in found if each["key"] in hits]
        if sort == "changed":
            found = self._with_change(step, found)
        found = _sorted(found, sort)
        begin = whole(query, "offset", 0)
        page = found[begin : begin + whole(query, "limit", 50, least=1, most=MAX_PAGE)]
        return {
            "step": step,
            "steps_with_samples": [steps[0], steps[-1]] if steps else None,
            "steps": _thinned(steps),
            "total": len(found),
            "samples": page,
            "indexed": round(self._recording.indexed_share, 4),
            "is_cut": len(listed) >= MAX_LISTED,
        }

    def _newest(self, steps: list[int]) -> int:
        """The newest step; while the recording is being read, the first one that was found whole.

        With every answer another one is the newest then, all of whose samples would have to be read and listed.
        """
        if self._recording.indexed_share >= 1 or not steps:
            self._step_while_reading = None
            return steps[-1] if steps else 0
        if self._step_while_reading not in steps:
            self._step_while_reading = steps[-2:][0]
        assert self._step_while_reading is not None
        return self._step_while_reading

    def _listed(self, step: int) -> list[Answer]:
        numbers = self._recording.index.of_step(step)
        ends = self._recording.index.place(numbers[-1]).end if numbers else 0
        key = (self._recording.generation, step, len(numbers), ends)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        found = list({each["key"]: each for each in map(_line, self._rows(numbers))}.values())
        self._kept[key] = found
        if len(self._kept) > _MAX_CACHED:
            self._kept.popitem(last=False)
        return found

    def _rows(self, numbers: list[int]) -> Iterator[Row]:
        for row, _ in zip(self._recording.rows(numbers), range(MAX_LISTED), strict=False):
            yield row

    def _matching(self, step: int, wanted: str) -> Iterator[str]:
        for row in self._rows(self._recording.index.of_step(step)):
            said = [text(row.get("prompt")), text(row.get("completion"))]
            said += [content for _, content in messages_of(row)]
            if any(wanted in each.casefold() for each in said):
                yield key_of(row)

    def _with_change(self, step: int, found: list[Answer]) -> list[Answer]:
        """The samples with `change`: their group's mean score, minus that of their prompt when it was last trained."""
        index = self._recording.index
        numbers = index.of_step(step)
        now: dict[str, list[float]] = {}
        before: dict[str, float] = {}
        earlier = {mine: [one for one in same if one < mine] for mine, same in index.same_prompt(numbers).items()}
        for each in found:
            if each["score"] is not None:
                now.setdefault(_group_of(each["key"]), []).append(each["score"])
        for mine, older in earlier.items():
            if not older:
                continue
            # The first row of a group names it; all of the older one's rows count.
            name = next((_group_of(key_of(row)) for row in self._recording.rows([mine])), "")
            scores = [score for row in self._recording.rows(older[-1:]) if (score := score_of(row)) is not None]
            if scores:
                before[name] = sum(scores) / len(scores)
        changes = {name: sum(now[name]) / len(now[name]) - old for name, old in before.items() if name in now}
        return [{**each, "change": changes.get(_group_of(each["key"]))} for each in found]


def key_of(row: Row) -> str:
    """Names a sample within its step: group/index."""
    return f"{text(row.get('group_id'), 256)}/{count(row.get('sample_index')) or 0}"


def score_of(row: Row) -> float | None:
    """The value of a sample's score, None where it has none."""
    return number(mapping(row.get("score")).get("value"))


def messages_of(row: Row) -> list[tuple[str, str]]:
    """Role and content of a prompt's messages; a plain text is the user's."""
    turns = row.get("messages")
    found = [(text(turn.get("role"), 64), text(turn.get("content"))) for turn in turns or [] if isinstance(turn, dict)]
    return found or [("user", text(row.get("prompt")))]


def components_of(row: Row) -> dict[str, float | None]:
    """The components of a sample's score."""
    return {
        text(name, 128): number(value) for name, value in mapping(mapping(row.get("score")).get("components")).items()
    }


def num_tokens(row: Row) -> int:
    """Completion tokens of a sample."""
    ids = row.get("token_ids")
    return len(ids) if isinstance(ids, list) else 0


def staleness_of(row: Row) -> int | None:
    """The version trained from, minus the sample's oldest one."""
    version, oldest = count(row.get("policy_version")), count(row.get("min_policy_version"))
    return None if version is None or oldest is None else version - 1 - oldest


def _line(row: Row) -> Answer:
    said = row.get("prompt") or messages_of(row)[-1][1]
    return {
        "key": key_of(row),
        "step": count(row.get("policy_version")),
        "score": score_of(row),
        "status": text(mapping(row.get("score")).get("status"), 64),
        "components": components_of(row),
        "tokens": num_tokens(row),
        "staleness": staleness_of(row),
        "min_version": count(row.get("min_policy_version")),
        "max_version": count(row.get("max_policy_version")),
        "prompt": text(said, PREVIEW_CHARS),
        "completion": text(row.get("completion"), PREVIEW_CHARS),
        "finish_reason": text(row.get("finish_reason"), 64),
        "generator_id": text(row.get("generator_id"), 128),
        "group_size": count(row.get("group_size")),
    }


def _group_of(key: str) -> str:
    return key.rpartition("/")[0]


def _sorted(found: list[Answer], sort: str) -> list[Answer]:
    """Sorted as asked; those without what counts come last."""

    def rank(each: Answer) -> tuple[int, float]:
        value = {"best": each["score"], "worst": each["score"], "longest": each["tokens"]}.get(sort, each.get("change"))
        if value is None:
            return (1, 0.0)
        return (0, value if sort == "worst" else -abs(value) if sort == "changed" else -value)

    return found if sort == "order" else sorted(found, key=rank)


def _thinned(steps: list[int], most: int = 2000) -> list[int]:
    stride = -(-len(steps) // most) or 1
    return steps[::-stride][::-1]
