"""Which folders of this machine a client may have the trainer read and write: those below its `allowed_roots`.

Promises, of a run folder, a model or a file of data that StartRun names:

- It is refused by name unless it lies below a root, or is one, once links are followed and `..` is taken away.
- Nothing outside the roots is looked at, created or deleted before that is known.
- A run folder is looked at again when it has been made, with what lies in it: no link in it leads outside.

Links within a model's folder are followed wherever they lead: hubs keep models like that, and no client can make one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import InvalidFieldError, ServiceUnavailableError
from penstock.process.disk import is_full

_MAX_SHOWN = 200


class Roots:
    """Folders, or files, as configured; relative ones belong to the folder in which the trainer was started."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [root.expanduser().absolute() for root in roots]

    def require(self, field: str, path: Path) -> None:
        """Raises InvalidFieldError unless `path`, which need not exist, is a root or below one."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:
            # A NUL or half a surrogate pair, links in a circle.
            raise InvalidFieldError(f"{field}: {_shown(path)} cannot be a path: {error}", field=field) from error
        # The roots too are followed at each call: a folder may be moved, and a link put in its place.
        if not any(real.is_relative_to(root.resolve()) for root in self._roots):
            roots = ", ".join(map(str, self._roots))
            raise InvalidFieldError(
                f"{field}: {_shown(path)} is not below {roots}; move it there, or add its folder to allowed_roots of "
                "the trainer's own configuration",
                field=field,
            )

    def make_run_dir(self, path: Path) -> None:
        """Make a run's folder if it does not exist.

        Raises:
            InvalidFieldError: It is outside the roots, something in it is, or it cannot be a folder.
            ServiceUnavailableError: The disk is full.
        """
        self.require("run.dir", path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            links = [inner for inner in path.iterdir() if inner.is_symlink()]
        except OSError as error:
            message = f"run.dir: {_shown(path)} cannot be made: {error.strerror}"
            if is_full(error):
                raise ServiceUnavailableError(f"{message}; free some space") from error
            raise InvalidFieldError(f"{message}; choose another", field="run.dir") from error
        for made in (path, *links):
            self.require("run.dir", made)


def require_file(field: str, path: Path) -> None:
    """Raises InvalidFieldError unless `path` is a file that can be looked at."""
    try:
        is_file = path.is_file()
    except OSError as error:
        raise InvalidFieldError(f"{field}: {_shown(path)}: {error.strerror}", field=field) from error
    if not is_file:
        raise InvalidFieldError(f"{field}: {_shown(path)}: no such file on the trainer's machine", field=field)


def _shown(path: Path) -> str:
    text = str(path)
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
