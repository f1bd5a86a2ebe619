"""Runs the `penstock` command as `python -m console`; the launcher starts services this way."""

from __future__ import annotations

from console.cli import main

if __name__ == "__main__":
    main()
