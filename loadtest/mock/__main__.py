"""A server with known timing in a process of its own: OpenAI's HTTP, and our gRPC.

    python -m loadtest.mock SETTINGS

SETTINGS is a `MockSettings` as JSON. Writes one line with both ports, and ends when its input does.
"""

from __future__ import annotations

import os
import sys

import uvloop
from pydantic import ValidationError

from loadtest.mock.settings import MockSettings
from services.runtime.grpc_polling import poll_where_it_is_awaited


def main() -> None:
    """Read the settings and serve."""
    try:
        settings = MockSettings.model_validate_json(sys.argv[1] if len(sys.argv) > 1 else "{}")
    except ValidationError as error:
        sys.exit(f"the settings are no MockSettings: {error}")
    # As routers do: a client must not be blamed for threads the server's requests wait for.
    poll_where_it_is_awaited(os.environ)
    from loadtest.mock.server import serve

    uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
