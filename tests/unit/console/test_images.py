"""What each image runs needs no package but those installed in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.console import ROOT, environment

SERVICES = ("broker", "scheduler", "reward", "generator", "trainer")
# What compose files, deployments and docs run by `penstock` in each image, beside its service.
ALSO = {
    "console": ("console.run.run_commands", "console.inspect.status", "console.page.report", "console.page.server"),
    "trainer": ("console.run.run_commands",),
    "generator": ("console.node.node",),
}
IMPORTER = """
import importlib, importlib.metadata, re, sys
installed = {re.split("[=<>; ]", line)[0].lower().replace("_", "-") for line in open(sys.argv[1])}
packages = importlib.metadata.packages_distributions()

class OnlyInstalled:
    def find_spec(self, name, path=None, target=None):
        owners = {owner.lower().replace("_", "-") for owner in packages.get(name.partition(".")[0], ())}
        if owners and not owners & (installed | {"penstock"}):
            raise ModuleNotFoundError(f"{name} is not in {sys.argv[1]}", name=name)

sys.meta_path.insert(0, OnlyInstalled())
for module in sys.argv[2:]:
    importlib.import_module(module)
"""


@pytest.mark.parametrize("image", [*SERVICES, "console"])
def test_an_image_has_what_its_commands_import(image: str) -> None:
    own = (f"services.{image}.server", "console.serve.serve") if image in SERVICES else ()
    modules = ("console.cli", "penstock.healthcheck", *own, *ALSO.get(image, ()))
    lock = f"requirements/{image}.txt"
    command = (sys.executable, "-P", "-c", IMPORTER, lock, *modules)
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
