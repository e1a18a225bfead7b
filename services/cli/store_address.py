"""The store's address as people may see it."""

from __future__ import annotations

from urllib.parse import urlsplit

HIDDEN = "[redacted]"


def shown_url(url: str) -> str:
    """Give the address with user, password and query hidden; all of it if they cannot be told."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return HIDDEN
    # An unescaped / or # in a password puts the rest of it, up to its @, where the path is.
    if "@" in parts.path + parts.query + parts.fragment or parts.fragment:
        return HIDDEN
    if not host:
        return f"{parts.scheme}://{parts.path}" if parts.scheme == "unix" else HIDDEN
    place = f"[{host}]" if ":" in host else host
    place += f":{port}" if port is not None else ""
    secret = f"{HIDDEN}@" if "@" in parts.netloc else ""
    query = f"?{HIDDEN}" if parts.query else ""
    return f"{parts.scheme}://{secret}{place}{parts.path}{query}"
