"""Ask one address once, for a container's health check: exit 0 for 200, else 1 with the reason.

python -m services.runtime.http_probe http://127.0.0.1:8000/ready
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

_TIMEOUT_S = 2.0
_REASON_BYTES = 500


def ask(url: str, timeout_s: float = _TIMEOUT_S) -> tuple[bool, str]:
    """Give whether it answered 200, and what it said."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout_s) as answer:
            return answer.status == 200, _text(answer.read(_REASON_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return False, f"{error.code} {_text(error.read(_REASON_BYTES))}"
    except OSError as error:
        return False, str(error)


def _text(body: bytes) -> str:
    return body.decode(errors="replace").strip()


def main(arguments: Sequence[str]) -> int:
    """Return the exit status."""
    if len(arguments) != 1 or not arguments[0].startswith("http://"):
        sys.stderr.write("usage: python -m services.runtime.http_probe http://HOST:PORT/PATH\n")
        return 2
    is_well, said = ask(arguments[0])
    sys.stdout.write(f"{said}\n")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
