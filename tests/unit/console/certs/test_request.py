"""What may stand in a certificate."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.certs.request import checked_request, read_validity
from penstock.config import ConfigError

GOOD = {"run": "math-7b", "site": "*", "name": "waw-0", "hosts": ["gpu_1.example.org", "::1"]}
BAD_NAMES = ["", ".", "..", "a" * 65, "a b", "a/b", "a\n", "a\0", "ä", "a+b", "**"]


@pytest.mark.parametrize(
    ("option", "value"),
    [(option, value) for option in ("run", "site", "name") for value in BAD_NAMES] + [("name", "*")],
)
def test_a_name_that_is_none_is_refused(option: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        checked_request(["trainer"], **GOOD | {option: value})
    shown = repr(value[:80])
    assert str(raised.value).startswith(f"--{option} {shown}: must be 1 to 64 characters of [A-Za-z0-9._-]")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("", "must be a DNS name or an IP address"),
        ("gpu-1:7301", "without port"),
        ("https://gpu-1", "without port, scheme"),
        ("[::1]", "brackets"),
        ("gpu..1", "must be a DNS name"),
        ("-gpu", "must be a DNS name"),
        ("gpu.", "must be a DNS name"),
        ("10.0.0.256", "must be a DNS name"),
        ("gpü.example.org", "must be a DNS name"),
        ("gpu\n", "must be a DNS name"),
        ("a" * 64, "must be a DNS name"),
        (".".join(["a" * 60] * 5), "must be a DNS name"),
        ("*.example.org", "must be a DNS name"),
        ("0.0.0.0", "at which others reach this machine"),
        ("::", "at which others reach this machine"),
        ("fe80::1%eth0", "leave out the %"),
    ],
)
def test_a_host_that_is_none_is_refused(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        checked_request(["trainer"], **GOOD | {"hosts": ["good", host]})
    assert "\n" not in str(raised.value)


def test_every_mistake_is_a_line_of_its_own() -> None:
    with pytest.raises(ConfigError) as raised:
        checked_request(["root", "trainer", "README.md"], run="a b", site="", name="*", hosts=["a:1", "b:1"])
    assert [line.split(":")[0] for line in str(raised.value).splitlines()] == [
        "ROLE 'root'",
        "ROLE 'README.md'",
        "--run 'a b'",
        "--site ''",
        "--name '*'",
        "--host 'a",
        "--host 'b",
    ]


@given(run=st.text(max_size=70), site=st.text(max_size=70), name=st.text(max_size=70), host=st.text(max_size=300))
def test_whatever_is_asked_for_only_plain_words_get_through(run: str, site: str, name: str, host: str) -> None:
    message = ""
    try:
        request = checked_request(["trainer"], run=run, site=site, name=name, hosts=[host])
    except ConfigError as error:
        message = str(error)
    else:
        said = f"{request.run} {request.site} {request.name} {request.hosts[0]}"
        assert re.fullmatch(r"[A-Za-z0-9._*-]+ [A-Za-z0-9._*-]+ [A-Za-z0-9._-]+ [a-z0-9._:-]+", said)
    assert all(line.isprintable() and len(line) < 500 for line in message.split("\n"))


@pytest.mark.parametrize(
    ("days", "valid", "validity"),
    [
        (None, None, timedelta(days=30)),
        (7, None, timedelta(days=7)),
        (None, "90s", timedelta(seconds=90)),
        (None, "1m", timedelta(minutes=1)),
        (None, "12h", timedelta(hours=12)),
        (None, "366d", timedelta(days=366)),
    ],
)
def test_how_long_a_certificate_is_valid(days: int | None, valid: str | None, validity: timedelta) -> None:
    assert read_validity(days=days, valid=valid) == validity


@pytest.mark.parametrize(
    ("days", "valid", "words"),
    [
        (1, "1d", "--days and --valid are both given; leave one of them out"),
        (0, None, "--days 0: must be 1 s to 366 days"),
        (-1, None, "--days -1: must be"),
        (10**30, None, "must be 1 s to 366 days"),
        (None, "0s", "--valid 0s: must be"),
        (None, "367d", "--valid 367d: must be"),
        (None, "999999999d", "--valid 999999999d: must be"),
        (None, "12", "--valid '12': must be a number and one of s, m, h, d"),
        (None, "1h30m", "must be a number and one of"),
        (None, "-1h", "must be a number and one of"),
        (None, "\N{ARABIC-INDIC DIGIT ONE}h", "must be a number and one of"),
    ],
)
def test_a_time_that_is_none_is_refused(days: int | None, valid: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_validity(days=days, valid=valid)
