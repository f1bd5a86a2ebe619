"""`python -m console` is the `penstock` command; the launcher starts services through it."""

from __future__ import annotations

from console.cli import main

if __name__ == "__main__":
    main()
