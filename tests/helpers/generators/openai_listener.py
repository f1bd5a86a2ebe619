"""An OpenAI-compatible endpoint as a process of its own, logging as a service does: `MODEL_DIR`; prints its address."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from penstock.process.log_setup import configure_logging
from tests.helpers.generators.openai_endpoint import endpoint_bench, save_chat_model


async def main(directory: Path) -> None:
    """Serve until killed."""
    async with endpoint_bench(save_chat_model(directory)) as bench:
        print(bench.base_url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    configure_logging("generator")
    asyncio.run(main(Path(sys.argv[1])))
