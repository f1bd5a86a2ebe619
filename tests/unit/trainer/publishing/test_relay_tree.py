"""One receiver of a site is sent across the link, and another one when it fails."""

from __future__ import annotations

from collections import Counter

from services.trainer.publishing import relay_tree as module
from services.trainer.publishing.relay_tree import FANOUT, SiteRelays


def ask(relays, receiver, *, site="s", content="c", failed="", relay=True):
    url = f"http://{receiver}/{content}" if relay else ""
    return relays.sources(site=site, content_id=content, receiver_id=receiver, relay_url=url, failed_url=failed)


def test_the_first_receiver_of_a_site_goes_to_the_origin_and_the_others_to_it():
    relays = SiteRelays()
    assert ask(relays, "a") == []
    assert ask(relays, "b") == ask(relays, "c", relay=False) == ["http://a/c"]
    assert ask(relays, "a") == []
    assert ask(relays, "z", site="t") == []
    assert ask(relays, "b", content="d") == []


def test_without_a_site_everybody_goes_to_the_origin():
    relays = SiteRelays()
    assert ask(relays, "a", site="") == ask(relays, "b", site="") == []


def test_a_receiver_that_cannot_relay_is_never_the_one_the_others_wait_for():
    relays = SiteRelays()
    assert ask(relays, "a", relay=False) == ask(relays, "b") == []
    assert ask(relays, "c") == ["http://b/c"]


def test_when_the_relay_fails_exactly_one_other_takes_its_place():
    relays = SiteRelays()
    for receiver in "abc":
        ask(relays, receiver)
    assert ask(relays, "c", failed="http://a/c") == ["http://b/c"]
    assert ask(relays, "b", failed="http://a/c") == []
    assert ask(relays, "c", failed="http://b/c") == []


def test_a_relay_that_failed_and_asks_again_comes_last():
    relays = SiteRelays()
    ask(relays, "a")
    ask(relays, "b")
    ask(relays, "b", failed="http://a/c")
    assert ask(relays, "a") == ["http://b/c"]
    assert ask(relays, "d") == ["http://b/c"]


def test_a_site_takes_a_version_by_the_content_that_was_named_first():
    relays = SiteRelays()
    for content, version in (("full-1", "1"), ("delta-1", "1"), ("full-2", "2")):
        relays.note_content(content, version)
    assert relays.agreed(site="s", content_id="delta-1") == "delta-1"
    assert relays.agreed(site="s", content_id="full-1") == "delta-1"
    assert relays.agreed(site="t", content_id="full-1") == "full-1"
    assert relays.agreed(site="s", content_id="full-2") == "full-2"
    # Who belongs to no site, and who asks for what is not offered, decides alone.
    assert relays.agreed(site="", content_id="full-1") == "full-1"
    assert relays.agreed(site="s", content_id="other") == "other"


def test_one_that_fetches_without_asking_is_followed_and_one_that_only_looks_is_not():
    relays = SiteRelays()
    for content in ("full", "delta"):
        relays.note_content(content, "1")
    ask(relays, "a", content="full", relay=False)
    assert relays.agreed(site="s", content_id="delta") == "delta"
    ask(relays, "b", site="t", content="full")
    assert relays.agreed(site="t", content_id="delta") == "full"
    # The other one is still served to receivers that can use nothing else.
    assert ask(relays, "c", site="t", content="delta") == []
    assert ask(relays, "d", site="t", content="delta") == ["http://c/delta"]
    relays.clear()
    assert relays.agreed(site="t", content_id="delta") == "delta"


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_CONTENTS", 2)
    monkeypatch.setattr(module, "MAX_RELAYS", 1)
    relays = SiteRelays()
    ask(relays, "a")
    ask(relays, "b")
    assert ask(relays, "b", failed="http://a/c") == []
    for content in ("d", "e"):
        ask(relays, "a", content=content)
    assert ask(relays, "x") == []


def test_a_relay_serves_a_few_and_those_serve_the_next():
    relays = SiteRelays()
    served = Counter(url for number in range(1 + 8 + 64) for url in ask(relays, f"r{number}"))
    assert set(served.values()) == {FANOUT}
    assert served["http://r0/c"] == FANOUT
    assert len(served) == 9
