"""Which rows of routes each token of a session is stored with: a row is a position, its number here."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.clients.sample_stream import SampleStream
from penstock.v1 import types_pb2
from services.generator.environments.turn_tokens import TurnTokens
from tests.helpers.generators.scripted_engine import span

NUM_PROMPT = 3


def rows(first, end):
    return np.arange(first, end, dtype=np.uint8).reshape(-1, 1, 1)


def stream(offset):
    return SampleStream(
        types_pb2.SampleKey(group_id="g"), lease_id="l", offset=offset, listener=None, on_change=lambda *_: None
    )


@pytest.mark.parametrize("num_given", [0, 2])
@pytest.mark.parametrize("offset", [0, 4], ids=["first turn", "later turn"])
def test_a_token_has_the_row_before_it_and_the_sample_s_first_ones_those_of_the_prompt(offset, num_given):
    sent = stream(offset)
    tokens = TurnTokens(sent, has_routes=True)
    if num_given:
        tokens.give([60, 61], policy_version=1)
    assert not sent.is_dirty, "an engine has not read what was given"
    # The engine reads everything so far as its prompt, and says so of each position.
    num_read = NUM_PROMPT + offset + num_given
    tokens.append(span(7, 8, version=2, routes=rows(0, num_read + 1)))
    tokens.append(span(9, version=2, routes=rows(num_read + 1, num_read + 2)))
    chunk = sent.take_chunk()
    assert np.frombuffer(chunk.token_ids, "<i4").tolist() == [60, 61, 7, 8, 9][2 - num_given :]
    assert list(chunk.loss_mask) == ([0, 0, 1, 1, 1] if num_given else [])
    first_row = NUM_PROMPT + offset - 1 if offset else 0
    assert list(chunk.routes) == list(range(first_row, num_read + 2))


def test_without_routes_what_was_given_is_sent_at_once():
    sent = stream(0)
    TurnTokens(sent, has_routes=False).give([60, 61], policy_version=1)
    chunk = sent.take_chunk()
    assert (list(chunk.loss_mask), chunk.routes) == ([0, 0], b"")
