"""Asks a server for its health: exit code 0 when it serves. Made for container health checks.

python -m penstock.healthcheck HOST:PORT [SERVICE]
"""

from __future__ import annotations

import asyncio
import sys

from penstock.rpc import wait_until_serving
from penstock.security import Security

TIMEOUT_S = 3.0


def main() -> int:
    """0 when the server reports SERVING, 1 when not, 2 on wrong usage."""
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    target, service = sys.argv[1], (sys.argv[2] if len(sys.argv) == 3 else "")
    is_serving = asyncio.run(
        wait_until_serving(target, service=service, timeout_s=TIMEOUT_S, security=Security.from_environment())
    )
    return 0 if is_serving else 1


if __name__ == "__main__":
    sys.exit(main())
