"""`python -m loadtest`."""

from __future__ import annotations

from loadtest.cli import main

if __name__ == "__main__":
    main()
