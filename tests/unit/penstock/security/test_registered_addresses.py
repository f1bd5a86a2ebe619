"""What a service registers for others to call is its own address, or is refused by name."""

from __future__ import annotations

import asyncio
import threading
from ipaddress import ip_address
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidFieldError
from penstock.security import resolving
from penstock.security.registered_addresses import OwnAddresses, Peer, TrustedHosts, check_url
from penstock.security.resolving import Resolver

SETTING = "trusted_relay_hosts"
PEER = Peer(ip=ip_address("203.0.113.7"))
LOCAL = Peer(ip=ip_address("127.0.0.1"))
NAMED = Peer(ip=ip_address("203.0.113.7"), names=("gpu-1.example", "*.site.example", "10.1.2.3"), is_tls=True)
DNS = {
    "own.example": ["203.0.113.7"],
    "both.example": ["2001:db8::7", "203.0.113.7"],
    "inside.example": ["10.0.0.5"],
    "localhost": ["127.0.0.1", "::1"],
    "here.example": ["127.0.1.1"],
}


def look_up(name):
    if name not in DNS:
        raise OSError(f"{name}: unknown")
    return frozenset(map(ip_address, DNS[name]))


def is_taken(url, peer, *trusted):
    return bool(taken([url], peer, *trusted))


def taken(urls, peer, *trusted):
    """Those of them that are; a refusal is one line that names the field and the text."""
    own = OwnAddresses(trusted, setting=SETTING, resolver=Resolver(look_up=look_up))
    return asyncio.run(_taken(own, urls, peer))


async def _taken(own, urls, peer):
    found = []
    for url in urls:
        try:
            await own.check("relay_url", url, peer)
            found.append(url)
        except InvalidFieldError as error:
            said = str(error)
            if not said.startswith(f"relay_url: {url!r:.200} ") or "\n" in said:
                raise
    return found


@pytest.mark.parametrize(
    ("url", "peer", "trusted"),
    [
        ("http://203.0.113.7:7000/weights/r/c", PEER, ()),
        ("https://203.0.113.7/weights", PEER, ()),
        ("http://own.example:7000", PEER, ()),
        ("http://OWN.example.:7000", Peer(ip=ip_address("203.0.113.7"), names=("own.example",)), ()),
        ("http://both.example:7000", PEER, ()),
        ("http://127.0.0.1:7000", LOCAL, ()),
        ("http://[::1]:7000", LOCAL, ()),
        ("http://localhost:7000", LOCAL, ()),
        ("http://here.example:7000", LOCAL, ()),
        ("http://[2001:db8::7]:7000", Peer(ip=ip_address("2001:db8::7")), ()),
        ("http://[::ffff:203.0.113.7]:7000", PEER, ()),
        ("https://gpu-1.example:7000", NAMED, ()),
        ("https://gpu-9.site.example:7000", NAMED, ()),
        ("https://10.1.2.3:7000", NAMED, ()),
        ("http://192.168.1.5:7000", PEER, ("192.168.0.0/16",)),
        ("http://inside.example:7000", PEER, ("10.0.0.5",)),
        ("http://unknown.lan:7000", PEER, (".lan",)),
        ("http://gpu-1:7000", PEER, ("gpu-1",)),
    ],
)
def test_a_peers_own_address_is_taken(url, peer, trusted):
    assert is_taken(url, peer, *trusted)


@pytest.mark.parametrize(
    ("url", "peer", "trusted"),
    [
        ("http://10.0.0.5:80/admin", PEER, ()),
        ("http://inside.example:80/admin", PEER, ()),
        ("http://169.254.169.254/latest/meta-data", PEER, ()),
        ("http://127.0.0.1:7000", PEER, ()),
        ("http://localhost:7000", PEER, ()),
        ("http://[::1]:7000", PEER, ()),
        ("http://[::ffff:127.0.0.1]:7000", PEER, ()),
        ("http://0.0.0.0:7000", LOCAL, ()),
        ("http://[::]:7000", LOCAL, ()),
        ("http://203.0.113.7:7000", LOCAL, ()),
        ("http://203.0.113.7:7000", Peer(ip=None), ()),
        ("http://unknown.example:7000", PEER, ()),
        ("http://203.0.113.7.evil.example:7000", PEER, ()),
        ("https://gpu-2.example:7000", NAMED, ()),
        ("https://a.b.site.example:7000", NAMED, ()),
        ("https://site.example:7000", NAMED, ()),
        ("http://gpu-1.example:7000", NAMED, ()),
        # Every certificate may name these.
        ("https://localhost:7000", Peer(ip=PEER.ip, names=("localhost", "127.0.0.1"), is_tls=True), ()),
        ("https://127.0.0.1:7000", Peer(ip=PEER.ip, names=("localhost", "127.0.0.1"), is_tls=True), ()),
        ("http://evil-lan:7000", PEER, (".lan", "gpu-1")),
        ("http://xgpu-1:7000", PEER, (".lan", "gpu-1")),
        ("http://10.0.0.5:7000", PEER, ("192.168.0.0/16",)),
    ],
)
def test_an_address_of_another_peer_is_refused(url, peer, trusted):
    assert not is_taken(url, peer, *trusted)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "203.0.113.7:7000",
        "file:///etc/passwd",
        "ftp://203.0.113.7/",
        "HTTP//203.0.113.7",
        "http:///x",
        "http://203.0.113.7:0/",
        "http://203.0.113.7:65536/",
        "http://203.0.113.7:/",
        "http://203.0.113.7:x/",
        "http://user@203.0.113.7/",
        "http://10.0.0.5@203.0.113.7/",
        "http://10.0.0.5\\@203.0.113.7/",
        "http://203.0.113.7/?next=http://10.0.0.5",
        "http://203.0.113.7/#x",
        "http://203.0.113.7/ x",
        "http://203.0.113.7\n.evil.example/",
        "http://203.0.113.7\t/",
        "http://203.0.113.7\0/",
        "http://[::1/",
        "http://[fe80::1%25eth0]/",
        "http://ex%61mple.com/",
        "http://\u2460\u2461.example/",
        "http://-/",
        "http://" + "a" * 254 + "/",
        "http://203.0.113.7/" + "x" * 2048,
    ],
)
def test_what_is_no_plain_address_is_refused_regardless_of_who_registers_it(url):
    assert not is_taken(url, PEER, "0.0.0.0/0", "::/0")


MARKS = (
    "//",
    "/",
    ":",
    "@",
    "\\",
    "?",
    "#",
    "[",
    "]",
    "%",
    ".",
    "..",
    "\0",
    "\n",
    "\t",
    " ",
    "\u3002",
    "\u2024",
    "%00",
)
HOSTS = (
    "203.0.113.7",
    "own.example",
    "10.0.0.5",
    "inside.example",
    "localhost",
    "127.0.0.1",
    "::1",
    "0x7f.1",
    "2130706433",
)
OTHERS = (
    "http://",
    "https://",
    "HTTP://",
    "file://",
    "::ffff:10.0.0.5",
    "7000",
    "0",
    "65536",
    "user",
    "weights",
    "%2e",
)
PARTS = st.sampled_from((*MARKS, *HOSTS, *OTHERS))


STRINGS = st.one_of(st.text(max_size=60), st.lists(PARTS, max_size=8).map("".join))


@pytest.mark.slow
@pytest.mark.parametrize("num_strings", [2_500, pytest.param(10_000, marks=pytest.mark.grid)])
def test_of_thousands_of_strings_only_those_that_name_the_peer_are_taken(num_strings):
    @settings(max_examples=num_strings // 25)
    @given(st.lists(STRINGS, min_size=25, max_size=25))
    @example(["http://203.0.113.7:7000/weights"])
    def check(texts):
        urls = [url for text in texts for url in (text, f"http://203.0.113.7{text}", f"http://{text}203.0.113.7/")]
        for url in taken(urls, PEER):
            assert urlsplit(url).hostname in ("203.0.113.7", "own.example", "::ffff:203.0.113.7"), url
            assert "@" not in urlsplit(url).netloc

    check()


class Context:
    def __init__(self, peer, properties):
        self._peer, self._properties = peer, properties

    def peer(self):
        return self._peer

    def auth_context(self):
        return self._properties


@pytest.mark.parametrize(
    ("text", "ip"),
    [
        ("ipv4:203.0.113.7:50051", "203.0.113.7"),
        ("ipv6:%5B2001:db8::7%5D:50051", "2001:db8::7"),
        ("ipv6:[2001:db8::7]:50051", "2001:db8::7"),
        ("ipv6:[fe80::1%25eth0]:50051", "fe80::1"),
        ("ipv6:%5B::ffff:203.0.113.7%5D:50051", "203.0.113.7"),
        ("unix:", "127.0.0.1"),
    ],
)
def test_where_a_call_comes_from_is_read_as_grpc_says_it(text, ip):
    assert Peer.of(Context(text, {})) == Peer(ip=ip_address(ip))


def test_a_call_from_nowhere_known_has_no_address_and_a_certificate_has_names():
    properties = {"transport_security_type": [b"ssl"], "x509_subject_alternative_name": [b"a.example", b"10.0.0.1"]}
    peer = Peer.of(Context("vsock:3:1", properties))
    assert peer == Peer(ip=None, names=("a.example", "10.0.0.1"), is_tls=True)


@pytest.mark.parametrize("text", ["", ".", "10.0.0.0/33", "10.0.0.1/8", "a/b", "*.example", "http://a", "a b", "a:1"])
def test_what_names_no_host_cannot_be_trusted(text):
    with pytest.raises(ValueError, match="name a host"):
        TrustedHosts([text])


def test_an_address_with_a_query_is_for_contents_alone():
    assert check_url("manifest.urls", "https://store.example/c?signature=x", allows_query=True).query == "signature=x"
    with pytest.raises(InvalidFieldError, match="user"):
        check_url("manifest.urls", "https://user@store.example/c", allows_query=True)


async def test_a_name_is_asked_for_once_by_all_and_again_when_its_answer_is_old():
    asked, now_s = [], [0.0]

    def counted(name):
        asked.append(name)
        return look_up(name)

    resolver = Resolver(look_up=counted, now_s=lambda: now_s[0])
    answers = await asyncio.gather(*(resolver.addresses("own.example") for _ in range(5)))
    assert set(answers) == {look_up("own.example")}
    assert await resolver.addresses("own.example") == look_up("own.example")
    assert asked == ["own.example"]
    now_s[0] += resolving.LIFETIME_S
    await resolver.addresses("own.example")
    assert len(asked) == 2


async def test_an_unknown_name_is_resolved_again_soon(monkeypatch):
    now_s = [0.0]
    resolver = Resolver(look_up=look_up, now_s=lambda: now_s[0])
    assert await resolver.addresses("new.example") == frozenset()
    monkeypatch.setitem(DNS, "new.example", ["203.0.113.9"])
    assert await resolver.addresses("new.example") == frozenset()
    now_s[0] += resolving.FAILED_LIFETIME_S
    assert await resolver.addresses("new.example") == {ip_address("203.0.113.9")}


async def test_a_name_server_that_hangs_blocks_no_caller_and_the_loop_continues(monkeypatch):
    answers = threading.Event()

    def hanging(name):
        answers.wait(60)
        return look_up(name)

    monkeypatch.setattr(resolving, "MAX_PENDING", 6)
    resolver = Resolver(look_up=hanging, deadline_s=0.01)
    assert await resolver.addresses("own.example") == frozenset()
    names = [f"n{index}.example" for index in range(50)]
    assert not any(await asyncio.gather(*map(resolver.addresses, names)))
    assert len(resolver._pending) == 6
    late = resolver._pending["own.example"]
    answers.set()
    await late
    assert await resolver.addresses("own.example") == look_up("own.example")


async def test_names_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(resolving, "MAX_NAMES", 3)
    resolver = Resolver(look_up=look_up)
    for name in ("own.example", "a", "b", "c"):
        await resolver.addresses(name)
    assert list(resolver._known) == ["a", "b", "c"]


def test_a_refusal_names_the_value_the_caller_what_was_found_and_the_ways_out():
    own = OwnAddresses(setting="trusted_relay_hosts of the trainer", resolver=Resolver(look_up=look_up))
    with pytest.raises(InvalidFieldError) as caught:
        asyncio.run(own.check("relay_url", "http://inside.example:80/x", PEER))
    assert str(caught.value) == (
        "relay_url: 'http://inside.example:80/x' is not the caller's own: it calls from 203.0.113.7, and "
        "inside.example is 10.0.0.5; show a certificate that names inside.example, or add it to "
        "trusted_relay_hosts of the trainer"
    )
    assert caught.value.metadata["field"] == "relay_url"
