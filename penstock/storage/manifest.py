"""The list of a folder's files with their digests, which is written last: a folder without it is not whole."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.storage.addresses import check_name
from penstock.storage.storage import FileDigest

MANIFEST_NAME = "MANIFEST.json"
_FORMAT = 1


class ManifestError(ValueError):
    """It is none, or of another version of Penstock."""


def manifest_text(files: Mapping[str, FileDigest]) -> str:
    """As JSON."""
    entries = {name: {"size_bytes": file.size_bytes, "blake3": file.blake3} for name, file in sorted(files.items())}
    return json.dumps({"format": _FORMAT, "files": entries}, indent=1)


def read_manifest(text: bytes | str) -> dict[str, FileDigest]:
    """What `manifest_text` wrote; raises ManifestError."""
    try:
        document = json.loads(text)
        if document["format"] != _FORMAT:
            raise ManifestError(f"format {document['format']!r:.50}, this version reads {_FORMAT}")
        return {
            check_name(name) if name else name: FileDigest(
                size_bytes=int(entry["size_bytes"]), blake3=str(entry["blake3"])
            )
            for name, entry in document["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise error if isinstance(error, ManifestError) else ManifestError(f"not a manifest: {error!r:.200}") from error
