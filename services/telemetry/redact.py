"""What never leaves the process in a log line or a span: secrets, and what people wrote."""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, quote_plus

REDACTED = "[redacted]"
_MAX_TEXT = 4_096  # characters of one value; longer ones are cut
_MAX_ITEMS = 64
_MAX_DEPTH = 4
_MIN_SECRET = 6  # shorter values would blank out ordinary words

# A field whose name has one of these words holds user text or a credential. Numbers pass:
# prompt_tokens=12 is a count, prompt="..." is not.
_PRIVATE_WORDS = frozenset({
    "prompt", "prompts", "completion", "completions", "text", "texts", "content", "contents",
    "messages", "password", "passwd", "passphrase", "secret", "secrets", "authorization",
    "apikey", "cookie", "cookies", "credential", "credentials", "bearer", "ticket", "curve",
    "hmac",
})  # fmt: skip
_PRIVATE_PAIRS = frozenset(
    {("api", "key"), ("access", "token"), ("auth", "token"), ("token", "ids")}
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_PATTERNS = (
    # user:password@ of a URL; the user name goes too, it is often a token
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{0,31}://)[^/?#\s]*@"), r"\1" + REDACTED + "@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), r"\1 " + REDACTED),
    (re.compile(r"\b(?:sk|isk)[-_][A-Za-z0-9_-]{12,}"), REDACTED),
    (re.compile(r"\b(?:hf|ghp|gho|ghs)_[A-Za-z0-9]{16,}"), REDACTED),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), REDACTED),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), REDACTED),
    (re.compile(r"-----BEGIN [A-Z ]{0,40}KEY-----[\s\S]*?(?:-----END [A-Z ]{0,40}KEY-----|\Z)"),
     REDACTED),
    (
        re.compile(
            r"(?i)\b(password|passwd|secret|api[-_]?key|token)(\s*[=:]\s*)"
            r"['\"]?[^\s'\",;&]{4,}"
        ),
        r"\1\2" + REDACTED,
    ),
)  # fmt: skip


def is_private_key(key: str) -> bool:
    """Whether a field of this name may hold user text or a credential."""
    words = [word.lower() for word in _WORD.findall(key)]
    if not _PRIVATE_WORDS.isdisjoint(words):
        return True
    return any(pair in _PRIVATE_PAIRS for pair in itertools.pairwise(words))


class Redactor:
    """Removes private fields by name, credentials by shape, and known secrets by value."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms = {
            form for secret in secrets if len(secret) >= _MIN_SECRET for form in _forms(secret)
        }
        ordered = sorted(forms, key=len, reverse=True)  # the longest form of a secret goes first
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def text(self, value: str) -> str:
        """Clean one string, and bound its length."""
        if self._known is not None:
            value = self._known.sub(REDACTED, value)
        for pattern, replacement in _PATTERNS:
            value = pattern.sub(replacement, value)
        if len(value) > _MAX_TEXT:
            value = f"{value[:_MAX_TEXT]}...[{len(value) - _MAX_TEXT} more]"
        return value

    def fields(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Clean the fields of a record; the result holds only JSON values."""
        return {self.text(key): self._field(key, value, 0) for key, value in fields.items()}

    def _field(self, key: str, value: object, depth: int) -> object:
        if is_private_key(key) and not _is_number(value) and value is not None:
            return REDACTED
        return self._value(value, depth)

    def _value(self, value: object, depth: int) -> object:
        if value is None or _is_number(value):
            return value if not isinstance(value, float) or _is_finite(value) else str(value)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"<{len(value)} bytes>"
        if depth >= _MAX_DEPTH:
            return "..."
        if isinstance(value, Mapping):
            items = list(value.items())[:_MAX_ITEMS]
            return {self.text(str(k)): self._field(str(k), v, depth + 1) for k, v in items}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self._value(item, depth + 1) for item in list(value)[:_MAX_ITEMS]]
        return self.text(str(value))


def _forms(secret: str) -> set[str]:
    """The secret as it is, URL-encoded and in base64 (all three byte alignments)."""
    forms = {secret, quote(secret, safe=""), quote_plus(secret)}
    raw = secret.encode()
    for shift in range(3):
        padded = b"\0" * shift + raw
        # Characters that also hold bits of neighbouring bytes are left out at both ends.
        first = -(-shift * 8 // 6)
        last = len(padded) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            form = encode(padded).decode()[first:last]
            if len(form) >= _MIN_SECRET:
                forms.add(form)
    return forms


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float))


def _is_finite(value: float) -> bool:
    return value - value == 0.0
