"""1 when the completion has its tags once each, closed and in order, else 0.

The reward for format of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2). Tags are searched for as they are written, which
takes time linear in the text whatever it is; no pattern of a user's is matched.
"""

from __future__ import annotations

from services.reward.models.config import FormatConfig


def has_format(completion: str, config: FormatConfig) -> bool:
    """Whether `completion` has the tags. What is inside them, even nothing, does not matter."""
    end = 0
    for index, tag in enumerate(config.tags):
        opening, closing = f"<{tag}>", f"</{tag}>"
        is_open = index == 0 and config.opened_by_prompt
        if completion.count(opening) != (0 if is_open else 1) or completion.count(closing) != 1:
            return False
        begin = 0 if is_open else completion.index(opening)
        close = completion.index(closing)
        if begin < end or close < begin:
            return False
        if not config.allows_other_text and completion[end:begin].strip():
            return False
        end = close + len(closing)
    return config.allows_other_text or not completion[end:].strip()
