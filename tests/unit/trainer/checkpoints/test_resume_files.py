"""Errors of writing the tensors that resume training."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.process.disk import is_full
from services.trainer.model_state import dcp


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_an_error_of_a_disk_keeps_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(dcp, "write_alone", refused)
    with pytest.raises(OSError, match=f"{tmp_path}: process 0: .*{os.strerror(number)}") as caught:
        dcp.write_resume({"weight": torch.zeros(2)}, tmp_path)
    assert caught.value.errno == number
    assert is_full(caught.value) is (number == errno.ENOSPC)
