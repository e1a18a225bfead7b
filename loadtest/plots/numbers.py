"""Numbers as people read them: three significant digits, units that fit. Pure."""

from __future__ import annotations

import math

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_MINUTE_MS = 60_000.0
_PLAIN_BELOW = 10_000.0


def significant(value: float, digits: int = 3) -> str:
    """Round to significant digits, never in scientific notation."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(value: float) -> str:
    """A number of things or a rate: 12, 3.4, 12.3k."""
    if abs(value) < _PLAIN_BELOW:
        return f"{value:.0f}" if value == round(value) else significant(value)
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return significant(value / size) + prefix
    return significant(value)


def milliseconds(value: float) -> str:
    """A time: 850 µs, 12.3 ms, 4.56 s, 3.2 min."""
    size = abs(value)
    if size < 1e-6:  # what is under a nanosecond is left of sums, and no time
        return "0 ms"
    # Bounds are where three digits would be rounded up to the next unit.
    if size < 0.9995:
        return f"{significant(value * 1e3)} µs"
    if size < 999.5:
        return f"{significant(value)} ms"
    if size < 0.9995 * _MINUTE_MS:
        return f"{significant(value / 1e3)} s"
    return f"{significant(value / _MINUTE_MS)} min"


def percent(share: float) -> str:
    """A share: 95.2 %; what is not all never reads as all."""
    shown = round(share * 100, 2 if share > _NEARLY_ALL else 1)
    if share < 1 and shown >= 100:
        return "> 99.99 %"
    return f"{shown:g} %"


_NEARLY_ALL = 0.9995


def seconds_axis(value: float) -> str:
    """A point of a run: 30 s, 2:30 min."""
    whole = round(value)
    if abs(value) < 120:
        return f"{significant(value)} s"
    return f"{whole // 60} min" if whole % 60 == 0 else f"{whole // 60}:{whole % 60:02d} min"


CLOCK_STEPS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)


def unit_of(name: str) -> str:
    """The unit a figure's name ends with, as its key in `figure`."""
    if name.startswith("usd_per_"):  # a price, whatever it is for
        return "_usd"
    for ending in ("_ms", "_s", "_rps", "_tok_s", "_share", "_bytes", "_usd"):
        if name.endswith(ending):
            return ending
    return ""


def figure(name: str, value: float) -> str:
    """Write a figure in the unit that its name ends with."""
    match unit_of(name):
        case "_ms":
            return milliseconds(value)
        case "_share":
            return percent(value)
        case "_rps":
            return f"{count(value)}/s"
        case "_s" if name.endswith("_tok_s"):
            return f"{count(value)} tok/s"
        case "_s":
            return milliseconds(value * 1e3)
        case "_bytes":
            return f"{count(value)}B"
        case "_usd":
            return f"${significant(value)}"
    return count(value)


def title_of(name: str) -> str:
    """A figure's name in words, without its unit: ttft_sent_ms becomes `TTFT sent`."""
    ending = "_tok_s" if name.endswith("_tok_s") else unit_of(name)
    words = (name if ending == "_share" else name.removesuffix(ending)).split("_")
    first = " ".join(_ACRONYMS.get(word, word) for word in words)
    return first[:1].upper() + first[1:]


_ACRONYMS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "isl": "ISL",
    "osl": "OSL",
    "slo": "SLO",
    "gpu": "GPU",
    "p50": "p50",
    "usd": "$",
}
