"""The two sites of docs/two_sites.md, to try it on one machine: `python -m tests.helpers.sites FOLDER`, as root.

Makes the hosts and stays until the end of its standard input. FOLDER/HOST COMMAND... runs a command on a host; each has
/srv and /etc/penstock for itself. `cut` and `heal` on standard input are for the link; any line shows what it carried.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

from tests.helpers.sites.hosts import find_obstacle, two_sites

NEAR = ("control.a.example", "train-0.a.example", "train-1.a.example")
FAR = ("gpu-0.b.example", "gpu-1.b.example")
OWN = (Path("/srv"), Path("/etc/penstock"))


def main() -> None:
    """Make the sites and take commands."""
    if (obstacle := find_obstacle()) is not None:
        sys.exit(f"two sites cannot be made here: {obstacle}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with two_sites(NEAR, FAR, folder=folder, folders=OWN, bits_per_second=200e6, delay_s=0.02) as sites:
        for name, host in sites.hosts.items():
            script = folder / name.partition(".")[0]
            script.write_text(f'#!/bin/sh\nexec {shlex.join(host.command())} "$@"\n')
            script.chmod(0o755)
        print(f"hosts: {', '.join(name.partition('.')[0] for name in sites.hosts)}; see {folder}", flush=True)
        for line in sys.stdin:
            sites.link.is_cut = {"cut": True, "heal": False}.get(line.strip(), sites.link.is_cut)
            inbound, outbound = sites.link_bytes()
            state = "cut" if sites.link.is_cut else "whole"
            print(f"the link is {state}; into the far site {inbound:,} bytes, out of it {outbound:,}", flush=True)
            print(f"by host and port: {dict(sites.link.inbound_bytes)}; refused: {sites.link.refused}", flush=True)


if __name__ == "__main__":
    main()
