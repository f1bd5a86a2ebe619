"""Addresses in object storage: SCHEME://BUCKET/NAME, and file:///FOLDER/NAME for a folder that several machines mount.

Pure: nothing is looked up. Promises, for whatever a configuration or a listing states:

- No component of a name is empty, `.` or `..`, so joined to a folder it never leads out of it.
- No character is a wildcard or a query to the libraries that will read the name, nor does an address hold a password.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NewType

from pydantic import AfterValidator, PlainValidator

Address = NewType("Address", str)
"""A checked address, without a slash at its end."""

PACKAGES: dict[str, str | None] = {"s3": "s3fs", "gs": "gcsfs", "file": None}
"""By scheme: the package that reads it beside fsspec; `pip install penstock[SCHEME]` installs it."""

_SEPARATOR = "://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_COMPONENT = re.compile(r"[^\x00-\x1f\x7f/\\?#*\[\]]{1,255}")
MAX_NAME_CHARACTERS = 1024


def scheme_of(address: Address) -> str:
    """`s3`, `gs` or `file`."""
    return address.partition(_SEPARATOR)[0]


def looks_like_address(value: object) -> bool:
    """Whether it is meant as an address, not as a path."""
    return isinstance(value, str) and _SEPARATOR in value


def checked_address(value: str) -> Address:
    """The address; raises ValueError that says what it must be."""
    scheme, _, rest = value.partition(_SEPARATOR)
    rest = rest.rstrip("/")
    if scheme not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise ValueError(f"{value!r:.200} is an address of none of the known kinds ({known}); use one, or a path")
    bucket, _, name = rest.partition("/")
    if scheme == "file":
        if bucket or not name:
            raise ValueError(f"{value!r:.200} must name a folder from the root: file:///FOLDER/NAME")
    elif not _BUCKET.fullmatch(bucket):
        raise ValueError(f"{value!r:.200} must begin with a bucket, without a password: {scheme}://BUCKET/NAME")
    if name:
        check_name(name)
    return Address(f"{scheme}{_SEPARATOR}{rest}")


def check_name(name: str) -> str:
    """The name of an object below an address; raises ValueError if it could lead elsewhere."""
    parts = name.split("/")
    if (
        len(name) > MAX_NAME_CHARACTERS
        or not all(_COMPONENT.fullmatch(part) for part in parts)
        or {".", ".."} & {*parts}
    ):
        raise ValueError(
            f"{name!r:.200} cannot be the name of an object: use at most {MAX_NAME_CHARACTERS} characters, and no "
            "empty component, '.', '..', '?', '#', '*', '[', ']' or '\\'"
        )
    return name


def below(address: Address, name: str) -> Address:
    """The address of an object or folder below another."""
    return Address(f"{address}/{check_name(name)}")


def last_name(source: Path | Address) -> str:
    """The last component of a path or an address."""
    return source.name if isinstance(source, Path) else PurePosixPath(source).name


def is_below(address: Address, folder: Address) -> bool:
    """Whether it is that folder, or in it."""
    return address == folder or address.startswith(f"{folder}/")


def stored_path(text: str) -> Path | Address:
    """What a configuration says: an address, or else a path. Raises ValueError."""
    return checked_address(text) if looks_like_address(text) else Path(text)


def read_stored(value: Any) -> Path | Address:
    """The same of a value of any type."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a path or an address")
    return stored_path(value)


StoredPath = Annotated[Path | Address, PlainValidator(read_stored, json_schema_input_type=str)]
"""A path of the machine that reads it, or an address in object storage."""

StoredAddress = Annotated[Address, AfterValidator(checked_address)]
"""An address in object storage."""
