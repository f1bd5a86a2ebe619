"""Programs that want to be rewarded without solving anything, or to leave their sandbox: `attacks.yaml`.

Each is the body of a program that may use PATH (a file with the secret that the tests expect), PORT (where something
listens on loopback, TCP and UDP), NAME (of an abstract Unix socket that listens) and MARK (a folder anyone may write
to), and sets `loot` to what it wants to print and return. `hunt` finds the secret in a text.
"""

from __future__ import annotations

from pathlib import Path

import yaml

PREFIX = """
import glob, os, re, sys
PATH, PORT, NAME, MARK = {path!r}, {port}, {name!r}, {mark!r}
def hunt(text):
    if isinstance(text, bytes): text = text.decode("latin-1")
    found = re.search("SECRET-[0-9a-f]{{16}}", text)
    return found and found[0]
def read(path):
    with open(path, "rb") as file: return file.read(1 << 24)
def attempt(step):
    try: return step()
    except BaseException: return None
def first(steps):
    return next(filter(None, map(attempt, steps)), None)
loot = None
"""
SUFFIX = """
print(loot)
def f(*arguments, **keywords): return loot
"""
ATTACKS: dict[str, str] = {
    f"{kind}: {name}": body
    for kind, bodies in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
    for name, body in bodies.items()
}


def program(body: str, **targets: object) -> str:
    """The whole program of an attack."""
    return PREFIX.format(**targets) + body + SUFFIX
