"""Pin requirements/*.in into requirements/*.txt: one complete lock, and one subset of it for each image.

python scripts/lock.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
IMAGES = ("broker", "generator", "reward", "trainer", "scheduler", "console")
GPU_IMAGES = ("generator-gpu", "trainer-gpu")


def compile_lock(name: str, *options: str) -> str:
    """The pinned requirements of `name`.in, as pip reads them."""
    command = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", "3.11", *options, f"{name}.in"]
    text = subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, text=True).stdout
    # The local version names a build; the installing machine chooses which one fits.
    return "\n".join(line.split("+cpu")[0] for line in text.splitlines()) + "\n"


def main() -> None:
    """Write every lock file."""
    options = ["--override", "excluded.in", *sys.argv[1:]]
    complete = compile_lock("all", *options)
    (FOLDER / "all.txt").write_text(complete)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(complete.replace("torch==2.13.0\n", ""))
        constraints.flush()
        for name in IMAGES:
            (FOLDER / f"{name}.txt").write_text(compile_lock(name, "--constraint", constraints.name, *options))
    for name in GPU_IMAGES:
        (FOLDER / f"{name}.txt").write_text(compile_lock(name))
    # `make gpu-check` is to check what the generator's image holds.
    (FOLDER / "gpu-check.txt").write_text(compile_lock("gpu-check", "--constraint", "generator-gpu.txt"))


if __name__ == "__main__":
    main()
