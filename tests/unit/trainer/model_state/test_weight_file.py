"""A file of weights that one process writes: byte for byte what safetensors writes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.model.digests import safetensors_digests
from penstock.transfer.chunks import chunks_of
from services.trainer.model_state.agreement import Writers
from services.trainer.model_state.weight_digests import digest_together
from services.trainer.model_state.weight_file import part_of, write_together
from tests.helpers.full_disk import largest_file
from tests.helpers.weights.written import write

TENSORS = {
    "b.weight": torch.randn(7, 5).bfloat16(),
    "a.weight": torch.randn(3, 2, 2),
    "steps": torch.tensor(5),
    "ä": torch.zeros(0, 4),
    "mask": torch.tensor([True, False, True]),
}


def test_the_file_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    write(TENSORS, tmp_path / "ours")
    save_file(TENSORS, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_numbers_are_written_in_the_published_type_and_counts_in_their_own(tmp_path: Path) -> None:
    parts = {name: part_of(tensor, dtype=torch.bfloat16, rank=0) for name, tensor in TENSORS.items()}
    write_together(tmp_path / "file", parts, writers=Writers(), metadata={"format": "pt"})
    found = load_file(tmp_path / "file")
    assert found["a.weight"].dtype is torch.bfloat16
    assert torch.equal(found["a.weight"], TENSORS["a.weight"].bfloat16())
    assert torch.equal(found["steps"], TENSORS["steps"])


def test_digests_are_those_of_the_written_file(tmp_path: Path) -> None:
    written = write(TENSORS, tmp_path / "file")
    assert written.tensors == safetensors_digests(tmp_path / "file")
    assert list(written.chunks) == chunks_of(tmp_path / "file")
    with (tmp_path / "file").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\7")
    assert digest_together(tmp_path / "file", writers=Writers()).tensors != written.tensors


@pytest.mark.parametrize("room", [64, 4096])
def test_a_disk_without_room_leaves_nothing(tmp_path: Path, room: int) -> None:
    """The header does not fit, or the tensors do not."""
    with largest_file(room), pytest.raises(OSError, match="too large"):
        write({"weight": torch.zeros(100_000)}, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
