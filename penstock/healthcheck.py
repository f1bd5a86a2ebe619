"""Asks a server for its health: exit code 0 when it serves. Made for container health checks.

python -m penstock.healthcheck HOST:PORT [SERVICE]
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from penstock.config import ConfigError
from penstock.network.rpc import wait_until_serving
from penstock.security import Security
from penstock.security.checks.troubles import TROUBLES

TIMEOUT_S = 3.0


def main() -> int:
    """0 when the server reports SERVING, 1 when not, 2 on wrong usage or credentials."""
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    target, service = sys.argv[1], (sys.argv[2] if len(sys.argv) == 3 else "")
    try:
        # Health needs no token, so none is shown; whether plain text is allowed is the service's own configuration.
        security = replace(Security.from_environment(insecure=True), token=None)
        is_serving = asyncio.run(wait_until_serving(target, service=service, timeout_s=TIMEOUT_S, security=security))
        if not is_serving:
            # What Docker and others keep of a failed check.
            print(asyncio.run(TROUBLES.trouble_with(target)) or f"{target} is not serving", file=sys.stderr)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if is_serving else 1


if __name__ == "__main__":
    sys.exit(main())
