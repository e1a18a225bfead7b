"""HTML and SVG that cannot be broken out of: text is escaped unless it is markup already. Pure."""

from __future__ import annotations

import html
import re

# Not allowed in HTML or not in UTF-8: controls but tab and line feed, lone surrogates, nonchars.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_VOID = frozenset({"meta", "link", "br", "hr", "col"})


class Markup(str):
    """Text that is markup, made by the functions of this module only."""

    __slots__ = ()


def printable(text: str) -> str:
    """Replace what no document may hold."""
    return _UNPRINTABLE.sub("\ufffd", text)


def escape(text: str) -> Markup:
    """Make markup that shows a text; markup stays as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(printable(text), quote=True))


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """Make an element; `class_` is class, `_` in a name is `-`, None leaves an attribute out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{join(*children)}</{name}>")


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return html.escape(printable(value), quote=True)
    return f"{value:.2f}".rstrip("0").rstrip(".")


def join(*parts: str) -> Markup:
    """Put pieces one after another."""
    return Markup("".join(escape(part) for part in parts))
