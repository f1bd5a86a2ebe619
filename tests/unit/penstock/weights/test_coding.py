"""Frames on the way: what goes in comes out, and nothing that is not one does harm."""

from __future__ import annotations

import io
import os

import pytest
import zstandard

from penstock.errors import ServiceUnavailableError
from penstock.transfer.coding import MAX_PLAIN_BYTES, MAX_STORED_BYTES, decode_frame, encode_frame, read_frame


@pytest.mark.parametrize("plain", [b"x", bytes(MAX_PLAIN_BYTES), os.urandom(MAX_PLAIN_BYTES)])
def test_a_frame_is_read_back_and_says_what_it_took(plain):
    frame = encode_frame(plain)
    reader = io.BytesIO(frame + encode_frame(b"next"))
    assert read_frame(reader) == (plain, len(frame))
    assert read_frame(reader)[0] == b"next"


@pytest.mark.parametrize(
    "stored",
    [
        zstandard.ZstdCompressor().compress(bytes(MAX_PLAIN_BYTES + 1)),
        zstandard.ZstdCompressor(write_content_size=False).compress(b"says no size"),
        encode_frame(b"broken " * 100)[4:-3],
        b"no frame at all",
    ],
)
def test_what_is_no_frame_of_bounded_size_is_refused(stored):
    with pytest.raises(ServiceUnavailableError, match="frame"):
        decode_frame(stored)


@pytest.mark.parametrize("data", [b"", b"\x09\0\0\0short", (MAX_STORED_BYTES + 1).to_bytes(4, "little"), bytes(4)])
def test_a_body_that_ends_early_or_states_an_absurd_length_is_refused(data):
    with pytest.raises(ServiceUnavailableError):
        read_frame(io.BytesIO(data))
