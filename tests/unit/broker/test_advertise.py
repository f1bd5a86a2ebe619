"""Under which name and address a broker is known to the others of its Redis."""

from __future__ import annotations

import socket

import pytest
from pydantic import ValidationError

from services.broker.config import BrokerConfig

HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("0.0.0.0:7301", f"{HOST}:7301"),
        ("[::]:7301", f"{HOST}:7301"),
        ("10.0.0.7:7301", "10.0.0.7:7301"),
        ("gpu-3:7301", "gpu-3:7301"),
    ],
)
def test_by_default_it_is_the_listen_address_or_the_machine(listen: str, address: str) -> None:
    config = BrokerConfig(listen=listen)
    assert (config.address, config.broker_name) == (address, address)
    assert config.public_hosts == []


def test_what_it_advertises_is_its_name_and_must_be_in_its_certificate() -> None:
    config = BrokerConfig(listen="0.0.0.0:7301", advertise="broker-2.example.org:17301")
    assert config.address == config.broker_name == "broker-2.example.org:17301"
    assert config.public_hosts == ["broker-2.example.org"]


def test_the_loopback_addresses_of_two_machines_are_two_names() -> None:
    assert BrokerConfig(listen="127.0.0.1:7301").broker_name == f"{HOST}/127.0.0.1:7301"


@pytest.mark.parametrize(
    "advertise", ["0.0.0.0:7301", "[::]:7301", ":7301", "broker", "broker:0", "a:1,b:1", "http://a:1"]
)
def test_what_others_cannot_call_is_refused(advertise: str) -> None:
    with pytest.raises(ValidationError, match=r"advertise\n.*host:port"):
        BrokerConfig(advertise=advertise)
