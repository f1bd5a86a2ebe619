"""What every measuring child does: end with its parent, and write its answer so that it is always whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.process.bound_child import end_group_with_parent


class Worker:
    """This process, a child of `console.probe.children`."""

    def __init__(self) -> None:
        self.settings: Mapping[str, Any] = json.loads(sys.argv[1])
        """What its parent asks for."""
        self._answer: dict[str, Any] = {}
        end_group_with_parent(self.settings["parent_pid"], grace_s=0)

    def tell(self, **found: Any) -> None:
        """Add to the answer."""
        self._answer |= found
        path = Path(self.settings["answer"])
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(self._answer), encoding="utf-8")
        temporary.replace(path)
