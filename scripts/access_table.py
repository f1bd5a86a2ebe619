"""Write the table of calls and roles in docs/security.md, or check that it is current.

python scripts/access_table.py
python scripts/access_table.py --check
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.security.roles import Role, allowed_roles, role_name
from penstock.v1 import (
    broker_pb2,
    critic_pb2,
    environment_pb2,
    generator_pb2,
    reward_pb2,
    sandbox_pb2,
    scheduler_pb2,
    sessions_pb2,
    shards_pb2,
    speed_pb2,
    trainer_pb2,
    weights_pb2,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
BEGIN, END = "<!-- calls and roles: begin -->", "<!-- calls and roles: end -->"
MODULES = (
    broker_pb2,
    sessions_pb2,
    shards_pb2,
    trainer_pb2,
    critic_pb2,
    speed_pb2,
    weights_pb2,
    generator_pb2,
    reward_pb2,
    sandbox_pb2,
    environment_pb2,
    scheduler_pb2,
)
ROLES = [role for role in Role.values() if role not in (Role.ACCESS_ROLE_UNSPECIFIED, Role.ACCESS_ROLE_OPERATOR)]


def rows() -> Iterator[tuple[str, list[str]]]:
    """Each call, and whether each role, in the order of ROLES, may make it."""
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                allowed = allowed_roles(method)
                yield f"`{service.name}.{method.name}`", ["x" if role in allowed else "" for role in ROLES]


def table() -> str:
    """The table as Markdown."""
    head = ["call", "operator", *(role_name(role) for role in ROLES)]
    lines = [head, ["---"] * len(head), *([name, "x", *marks] for name, marks in rows())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(page: str) -> str:
    """The page with the current table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def main() -> int:
    """Write, or with --check compare; exit code 1 if the page is not current."""
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    page = PAGE.read_text()
    current = with_table(page)
    if not sys.argv[1:]:
        PAGE.write_text(current)
        return 0
    if page != current:
        print(f"{PAGE.name}: its table is not what the protos say; run `make proto`", file=sys.stderr)
    return int(page != current)


if __name__ == "__main__":
    sys.exit(main())
