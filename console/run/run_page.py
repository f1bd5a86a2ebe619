"""Serves the page of a run under way in its console's process. Whatever goes wrong here, the run goes on without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module

from console.config.page_section import PageSection
from console.config.run_folder import RunFolder
from console.view.run_view import RunView
from penstock.security import Security

FREE_PORT = "127.0.0.1:0"


async def serve_run_page(
    section: PageSection, folder: RunFolder, view: RunView, *, security: Security, note: Callable[[str], None]
) -> None:
    """Serve it until cancelled, and tell its address by `note`, or why there is none."""
    if not section.serve:
        return
    try:
        # aiohttp takes a while to import, in which nothing else would happen here.
        page = await asyncio.to_thread(import_module, "console.page.server")
        data = (await asyncio.to_thread(import_module, "console.page.run_data")).RunData(folder, live=lambda: view.run)
        listen = section.listen or FREE_PORT
        async with page.serving_page([data], listen, security=security, setting="page.listen", is_live=True) as link:
            note(f"page: {link}")
            await asyncio.Event().wait()
    except Exception as error:  # the run is worth more than its page
        note(f"page: not served: {error}")
