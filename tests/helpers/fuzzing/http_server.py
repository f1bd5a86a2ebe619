"""Every HTTP listener, with a token for each role, in a process of its own whose memory can be looked at.

python -m tests.helpers.fuzzing.http_server FOLDER: writes the port of each, and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from penstock.network.metrics_server import serve_metrics
from penstock.process.log_setup import configure_logging
from penstock.transfer.content_server import serving_contents
from tests.helpers.fuzzing.server import SECURITY
from tests.helpers.fuzzing.watched_server import PORTS
from tests.helpers.generators.openai_endpoint import endpoint_bench, save_chat_model
from tests.helpers.ports import free_port


async def main(folder: Path) -> None:
    """Serve."""
    configure_logging("fuzz")
    content = folder / "content"
    content.write_bytes(b"w" * 1_000_000)
    metrics_port = free_port()
    serve_metrics(f"127.0.0.1:{metrics_port}", SECURITY)
    async with (
        serving_contents(
            lambda run_id, name: content if (run_id, name) == ("r", "x") else None,
            listen="127.0.0.1:0",
            setting="listen",
            security=SECURITY,
        ) as weights,
        endpoint_bench(save_chat_model(folder / "model"), security=SECURITY) as bench,
    ):
        openai_port = bench.base_url.removesuffix("/v1").rpartition(":")[2]
        print(PORTS, weights.rpartition(":")[2], metrics_port, openai_port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
