import errno
from pathlib import Path

import pytest

from penstock.process.disk import LINES_BYTES, failure_message, is_full, needed_bytes


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EFBIG, "File too large"), True),
        (OSError("x: Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (OSError("x: I/O error: Permission denied (os error 13)"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (ValueError("No space left on device"), False),
    ],
)
def test_a_full_disk_is_distinguished_from_other_failures(error, expected):
    assert is_full(error) is expected


def test_the_message_names_folder_room_and_how_to_go_on(tmp_path: Path):
    run = tmp_path / "r1"
    checkpoint = run / "checkpoints" / "step_2" / "model"
    checkpoint.mkdir(parents=True)
    (checkpoint / "a.safetensors").write_bytes(bytes(3 * 2**20))

    assert needed_bytes(run) == LINES_BYTES + 3 * 2**20
    full = failure_message(run, OSError(errno.ENOSPC, "No space left on device"))
    assert full.startswith(f"{run}: the disk is full: ")
    assert "MiB free, 19.0 MiB needed" in full
    assert full.endswith(f"penstock run --resume {run}")
    assert len(full.splitlines()) == 1
    refused = failure_message(run, OSError(errno.EROFS, "Read-only file system"))
    assert refused == f"{run}: cannot be written to: [Errno 30] Read-only file system"
