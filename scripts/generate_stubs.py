"""Generate Python stubs, or check that the committed ones are current.

The contract in `protos/` goes to `penstock/v1`, with services; stubs of a service's private records stay beside their
proto.

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
CONTRACT = Path("penstock/v1")
RECORDS = Path("services/broker")


def generate(target: Path) -> None:
    """Write the stubs of every proto below `target`."""
    scripts = Path(sys.executable).parent
    compiler = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "protos"), f"--python_out={target}"]
    compiler += [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    compiler += [f"--mypy_out=quiet:{target}"]
    with_services = [f"--grpc_python_out={target}", f"--mypy_grpc_out=quiet:{target}"]
    contract = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos" / CONTRACT).glob("*.proto"))
    subprocess.run([*compiler, *with_services, *contract], check=True, cwd=ROOT)
    records = sorted(str(path.relative_to(ROOT)) for path in (ROOT / RECORDS).glob("*.proto"))
    subprocess.run([*compiler, "-I", str(ROOT), *records], check=True, cwd=ROOT)


def outdated(fresh: Path) -> list[str]:
    """Stubs that differ from those in `fresh`, are missing, or no longer have a proto."""
    names: list[str] = []
    for folder in (CONTRACT, RECORDS):
        committed = {path.name for path in (ROOT / folder).glob("*_pb2*")}
        wanted = {path.name for path in (fresh / folder).glob("*_pb2*")}
        _, differing, missing = filecmp.cmpfiles(fresh / folder, ROOT / folder, sorted(wanted), shallow=False)
        names += [str(folder / name) for name in sorted({*differing, *missing, *(committed - wanted)})]
    return names


def main() -> int:
    """Generate, or with --check compare; exit code 1 if the committed stubs are not current."""
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if not sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        names = outdated(Path(folder))
    for name in names:
        print(f"{name}: not what protos/ generate; run `make proto`", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
