"""Asks a cloud's metadata server whether it will take this machine away.

Each question takes TIMEOUT_S at most, is never sent through a proxy and follows no redirect. Sources: AWS, "Spot
Instance interruption notices" and IMDSv2; Google Cloud, "Preempted instances"; Azure, "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

TIMEOUT_S = 2.0
MAX_BYTES = 256 * 1024
OK = 200

Announcement = Callable[[], bool]
"""Whether the end of this machine is announced. Raises OSError or ValueError without a valid answer."""

LINK_LOCAL = "http://169.254.169.254"
GOOGLE = "http://metadata.google.internal"


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A metadata server has no reason to send anyone elsewhere."""


_opener = build_opener(ProxyHandler({}), _NoRedirect())


def plain_announcement(url: str) -> Announcement:
    """Status 200 announces the end, any other answer does not."""
    return lambda: _ask(url)[0] == OK


def aws() -> bool:
    """A spot instance that is to be stopped or terminated has an `instance-action`, two minutes ahead."""
    status, token = _ask(f"{LINK_LOCAL}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    if status != OK:
        raise ValueError(f"status {status} instead of a token")
    return _ask(f"{LINK_LOCAL}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})[0] == OK


def gcp() -> bool:
    """A preemptible or spot VM gets TRUE, 30 s ahead."""
    status, text = _ask(f"{GOOGLE}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if status != OK:
        raise ValueError(f"status {status} instead of TRUE or FALSE")
    return text.strip().upper() == "TRUE"


def azure() -> bool:
    """A spot VM is named by an event of the type Preempt or Terminate, 30 s ahead or more."""
    name = _azure("instance/compute/name?api-version=2021-02-01&format=text")
    document = json.loads(_azure("scheduledevents?api-version=2020-07-01"))
    events = document.get("Events", []) if isinstance(document, dict) else []
    return any(
        event.get("EventType") in ("Preempt", "Terminate") and name in event.get("Resources", [])
        for event in events
        if isinstance(event, dict)
    )


def _azure(path: str) -> str:
    status, text = _ask(f"{LINK_LOCAL}/metadata/{path}", {"Metadata": "true"})
    if status != OK:
        raise ValueError(f"status {status} of {path}")
    return text


CLOUDS: Mapping[str, Announcement] = {"aws": aws, "gcp": gcp, "azure": azure}


def _ask(url: str, headers: Mapping[str, str] | None = None, *, method: str = "GET") -> tuple[int, str]:
    """Status and text of an answer. Raises OSError if there is none."""
    request = Request(url, headers=dict(headers or {}), method=method)
    try:
        with _opener.open(request, timeout=TIMEOUT_S) as answer:
            return int(answer.status), answer.read(MAX_BYTES).decode("utf-8", errors="replace")
    except HTTPError as error:
        error.close()
        return error.code, ""
