"""Reads what a name says about a server of the Model Context Protocol, and asks the server what tools it has."""

from __future__ import annotations

import asyncio
import os
import shlex
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mcp_types import Tool

from penstock.environments.imports.mcp_connection import McpServer, McpServerError, list_tools
from penstock.environments.imports.mcp_tools import McpLimits, McpTools
from penstock.environments.imports.server_options import checked_timeout, http_address

DEFAULT_MAX_CALLS, DEFAULT_MAX_CHARACTERS = 32, 16_384
_OPTIONS = ("env", "max_calls", "max_characters", "shared", "timeout_s", "token", "tools")


def mcp_tools(what: str, options: Mapping[str, Any]) -> McpTools:
    """The tools of the server at an address, or that a command starts. Raises ValueError."""
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(f"{name}: unknown; options are {', '.join(_OPTIONS)}")
    server = _server(what, options)
    limits = McpLimits(
        max_calls=_count("max_calls", options, default=DEFAULT_MAX_CALLS, highest=4096),
        max_characters=_count("max_characters", options, default=DEFAULT_MAX_CHARACTERS, highest=262_144),
    )
    is_shared = options.get("shared", False)
    if not isinstance(is_shared, bool):
        raise ValueError(f"shared: {is_shared!r}; must be true or false")
    return McpTools(server, _chosen(_listed(server), options.get("tools")), limits, is_shared=is_shared)


def _server(what: str, options: Mapping[str, Any]) -> McpServer:
    timeout_s = checked_timeout(options)
    if what.startswith(("http:", "https:")):
        if "env" in options:
            raise ValueError("env: is for a command; name the variable that holds the bearer token as token")
        token = _variable("token", str(options["token"])) if "token" in options else None
        return McpServer(url=http_address(what), token=token, timeout_s=timeout_s)
    if "token" in options:
        raise ValueError("token: is for an address; name variables of the command as env")
    names = [name for name in str(options.get("env", "")).split(",") if name]
    command = shlex.split(what)
    if not command:
        raise ValueError("names no command; write mcp:COMMAND or mcp:http://HOST:PORT/mcp")
    return McpServer(command=command, variables={each: _variable("env", each) for each in names}, timeout_s=timeout_s)


def _variable(option: str, name: str) -> str:
    if name not in os.environ:
        raise ValueError(f"{option}: the environment variable {name!r} is not set")
    return os.environ[name]


def _count(name: str, options: Mapping[str, Any], *, default: int, highest: int) -> int:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
        raise ValueError(f"{name}: {value!r}; must be 1 to {highest}")
    return value


def _listed(server: McpServer) -> list[Tool]:
    """What the server offers, asked in a thread, since a loop may run in this one."""
    found: list[Tool | BaseException] = []

    def ask() -> None:
        try:
            found.extend(asyncio.run(list_tools(server)))
        except (McpServerError, OSError) as error:
            found.append(error)

    asking = threading.Thread(target=ask, name="mcp-tools")
    asking.start()
    asking.join()
    if found and isinstance(error := found[0], BaseException):
        raise ValueError(str(error)) from error
    return [each for each in found if isinstance(each, Tool)]


def _chosen(tools: Sequence[Tool], wanted: object) -> Sequence[Tool]:
    """Those of the option `tools`, names with commas between, or all."""
    names = [tool.name for tool in tools]
    chosen = names if wanted is None else [each for each in str(wanted).split(",") if each]
    if unknown := sorted(set(chosen) - set(names)):
        raise ValueError(f"tools: the server has no {unknown[0]!r}; it has {', '.join(names) or 'none'}")
    if not chosen:
        raise ValueError("the server offers no tools")
    return [tool for tool in tools if tool.name in chosen]
