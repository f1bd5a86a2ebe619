"""python -m benchmarks.gpu [--page FILE] [TEST_FILE ...]: the page on stdout, what the tests print on stderr.

Exit status: 0 nothing failed, 1 a check failed or none could run, 2 usage, 3 there is no NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.checks import files_with_checks, is_good, run_file
from benchmarks.gpu.page import page, versions
from console.devices.nvidia_smi import NvidiaSmiError, read_devices
from services.generator.engines.vllm.config import VllmEngineConfig

EXIT_FAILED, EXIT_NO_GPU = 1, 3


def main(arguments: list[str] | None = None) -> int:
    """Check, and print the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--page", type=Path, help="also write the page there")
    parser.add_argument("files", nargs="*", metavar="TEST_FILE", help="only these; by default every one with a check")
    options = parser.parse_args(arguments)
    if problem := _missing():
        print(f"gpu-check: {problem}", file=sys.stderr)
        return EXIT_NO_GPU
    begun_s = time.time()
    devices = read_devices() or ()
    checks = []
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        for file in options.files or files_with_checks():
            print(f"gpu-check: {file}", file=sys.stderr, flush=True)
            checks += run_file(file, folder=Path(folder))
    text = page(checks, devices, versions(), now_s=begun_s)
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0 if is_good(checks) else EXIT_FAILED


def _missing() -> str:
    """Why nothing can be checked here, in one line."""
    try:
        devices = read_devices()
    except NvidiaSmiError as error:
        return str(error)
    if not devices:
        why = "no nvidia-smi" if devices is None else "nvidia-smi lists no device"
        return f"no NVIDIA GPU on this machine ({why}); nothing was run"
    if not VllmEngineConfig.decodes_on_gpus():
        return "vLLM is not installed, or for CPUs; run `make gpu-check`, which installs the GPU builds into .venv-gpu"
    return ""


if __name__ == "__main__":
    sys.exit(main())
