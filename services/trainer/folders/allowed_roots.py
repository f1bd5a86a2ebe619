"""Which folders of this machine a client may have the trainer read and write: those below its `allowed_roots`.

Promises, for a run folder, a model or a data file that StartRun names:

- It is refused by name unless it is a root or lies below one, after links and `..` are resolved.
- Nothing outside the roots is read, created or deleted before that check.
- A run folder is checked again, with its content, after it is made: no link in it leads outside.

- An address in object storage is refused by name unless it is one of `allowed_storage`, or below one.

Links within a model's folder are followed wherever they lead: hubs store models that way, and no client can make one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import InvalidFieldError, ServiceUnavailableError
from penstock.process.disk import is_full
from penstock.storage.addresses import Address, is_below

_MAX_SHOWN = 200


class Roots:
    """Folders, or files, as configured; relative ones belong to the folder in which the trainer was started.

    Args:
        roots: Of this machine.
        storage: Addresses in object storage.
        runs_dir: Where run folders are on this machine, whatever a run names; None: where it does.
    """

    def __init__(self, roots: Sequence[Path], storage: Sequence[Address] = (), *, runs_dir: Path | None = None) -> None:
        self._runs_dir = None if runs_dir is None else runs_dir.expanduser().absolute()
        self._roots = [root.expanduser().absolute() for root in roots]
        if self._runs_dir is not None:
            self._roots.append(self._runs_dir)
        self._storage = tuple(storage)

    @property
    def has_own_runs(self) -> bool:
        """Whether run folders here are shared with no other machine."""
        return self._runs_dir is not None

    def run_dir(self, stated: Path, run_id: str) -> Path:
        """The real path of a run's folder; raises as `require` does."""
        return self.require("run.dir", (self._runs_dir or stated) / run_id)

    def require(self, field: str, path: Path) -> Path:
        """The real path of `path`, which need not exist; raises InvalidFieldError unless it is a root or below one."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:
            # A NUL, half a surrogate pair, or links in a circle.
            raise InvalidFieldError(f"{field}: {_shown(path)} cannot be a path: {error}", field=field) from error
        # The roots are resolved at each call, too: a folder may be moved and replaced by a link.
        if not any(real.is_relative_to(root.resolve()) for root in self._roots):
            roots = ", ".join(map(str, self._roots))
            raise InvalidFieldError(
                f"{field}: {_shown(path)} is not below {roots}; move it there, or add its folder to allowed_roots of "
                "the trainer's own configuration",
                field=field,
            )
        return real

    def require_storage(self, field: str, address: Address) -> None:
        """Raises InvalidFieldError unless the address is one of those that are allowed, or below one."""
        if not any(is_below(address, folder) for folder in self._storage):
            raise InvalidFieldError(
                f"{field}: {address} is not below {', '.join(self._storage) or 'any allowed address'}; add its folder "
                "to allowed_storage of the trainer's own configuration",
                field=field,
            )

    def make_run_dir(self, path: Path) -> None:
        """Make a run's folder if it does not exist.

        Raises:
            InvalidFieldError: It, or something in it, is outside the roots, or it cannot be a folder.
            ServiceUnavailableError: The disk is full.
        """
        # As resolved: for the path `../new/../root/run` the folder `new` would be made, outside the roots.
        real = self.require("run.dir", path)
        try:
            real.mkdir(parents=True, exist_ok=True)
            links = [inner for inner in real.iterdir() if inner.is_symlink()]
        except OSError as error:
            message = f"run.dir: {_shown(path)} cannot be made: {error.strerror}"
            if is_full(error):
                raise ServiceUnavailableError(f"{message}; free some space") from error
            raise InvalidFieldError(f"{message}; choose another", field="run.dir") from error
        for made in (real, *links):
            self.require("run.dir", made)


def require_file(field: str, path: Path) -> None:
    """Raises InvalidFieldError unless `path` is a file that can be accessed."""
    try:
        is_file = path.is_file()
    except OSError as error:
        raise InvalidFieldError(f"{field}: {_shown(path)}: {error.strerror}", field=field) from error
    if not is_file:
        raise InvalidFieldError(f"{field}: {_shown(path)}: no such file on the trainer's machine", field=field)


def _shown(path: Path) -> str:
    text = str(path)
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
