"""Reports whether a run dropped more of its long samples than of its short ones: one line, from its audit rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

TAIL_SHARE = 0.2
"""The long tail: the longest fifth, as closely as the audit's buckets allow."""


def loss_by_length(audit: Mapping[str, Any]) -> str | None:
    """The shares lost of the longest samples and of the others; None if nothing was lost or all lengths are similar.

    Args:
        audit: What `audit_document` makes, possibly of an older run. Samples dropped before
            their first token count for neither side: their length is unknown.
    """
    trained: Counter[int] = Counter()
    lost: Counter[int] = Counter()
    for row in audit.get("rows") or []:
        if row["max_tokens"]:
            trained[row["max_tokens"]] += row["trained"]
            lost[row["max_tokens"]] += sum(row["dropped"].values())
    ended = trained + lost
    bound, num_in_tail = 0, 0
    for max_tokens in sorted(ended, reverse=True)[:-1]:
        if num_in_tail < TAIL_SHARE * ended.total():
            bound, num_in_tail = max_tokens // 2, num_in_tail + ended[max_tokens]
    num_others = ended.total() - num_in_tail
    if not lost.total() or not num_in_tail:
        return None
    lost_in_tail = sum(count for max_tokens, count in lost.items() if max_tokens > bound)
    tail, others = lost_in_tail / num_in_tail, (lost.total() - lost_in_tail) / num_others
    return f"lost by length: {100 * tail:.0f} % of samples over {bound} tokens, {100 * others:.0f} % of shorter ones"
