"""Generate the Python stubs of `protos/` into `penstock/v1`, or check that those committed are current.

python scripts/generate_stubs.py
python scripts/generate_stubs.py --check
"""

from __future__ import annotations

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("penstock/v1")


def generate(target: Path) -> None:
    """Write the stubs of every proto below `target`."""
    scripts = Path(sys.executable).parent
    protos = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos" / PACKAGE).glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "protos")]
    command += [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    command += [f"--{kind}={target}" for kind in ("python_out", "grpc_python_out")]
    command += [f"--{kind}=quiet:{target}" for kind in ("mypy_out", "mypy_grpc_out")]
    subprocess.run([*command, *protos], check=True, cwd=ROOT)


def outdated(fresh: Path) -> list[str]:
    """Names of stubs that differ from those in `fresh`, are missing, or have no proto any more."""
    committed = {path.name for path in (ROOT / PACKAGE).glob("*_pb2*")}
    wanted = {path.name for path in fresh.glob("*_pb2*")}
    _, differing, missing = filecmp.cmpfiles(fresh, ROOT / PACKAGE, sorted(wanted), shallow=False)
    return sorted({*differing, *missing, *(committed - wanted)})


def main() -> int:
    """Generate, or with --check compare; exit code 1 when the committed stubs are not current."""
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if not sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        names = outdated(Path(folder) / PACKAGE)
    for name in names:
        print(f"{PACKAGE / name}: not what protos/ generate; run `make proto`", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
