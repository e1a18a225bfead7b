from __future__ import annotations

import base64
import json
from urllib.parse import quote

from hypothesis import example, given
from hypothesis import strategies as st

from services.telemetry.redact import REDACTED, Redactor, is_private_key

SECRET = "Zq7/pa+ss w&rd#91"
PRIVATE_KEYS = [
    "prompt",
    "user_prompt",
    "promptText",
    "content",
    "messages",
    "api_key",
    "apiKey",
    "Authorization",
    "hf_access_token",
    "db.password",
    "token_ids",
    "completion",
    "curve_secret_key",
]


@given(st.text(min_size=1), st.sampled_from(PRIVATE_KEYS))
@example("x", "prompt")
def test_text_under_a_private_name_never_comes_out(value: str, key: str) -> None:
    """RB-118: user text and credentials are removed by the name of their field."""
    cleaned = Redactor().fields({"outer": {key: value}, key: [value], "n": 1})
    assert cleaned == {"outer": {key: REDACTED}, key: REDACTED, "n": 1}


def test_counts_under_private_looking_names_stay() -> None:
    fields = {"prompt_tokens": 12, "text_bytes": 3, "secret_count": 0, "ticket": None}
    assert Redactor().fields(fields) == fields


def test_ordinary_names_are_not_private() -> None:
    names = ["request_id", "context_length", "key", "tokens", "worker_id", "plane", "error"]
    assert [name for name in names if is_private_key(name)] == []


@given(st.text(max_size=40), st.text(max_size=40))
def test_known_secret_never_comes_out_in_any_encoding(before: str, after: str) -> None:
    """RB-118: plain, URL-encoded and base64 forms of a configured secret are removed."""
    redactor = Redactor([SECRET])
    plain = redactor.text(before + SECRET + after)
    assert SECRET not in plain
    assert quote(SECRET, safe="") not in redactor.text(before + quote(SECRET, safe="") + after)
    blob = base64.b64encode((before + SECRET + after).encode()).decode()
    core = base64.b64encode(SECRET.encode()).decode()[:12]
    cleaned = redactor.text(blob)
    assert core not in cleaned
    assert REDACTED in cleaned


_WORD = st.text(
    alphabet="abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    min_size=12,
    max_size=40,
)


@given(_WORD)
def test_credentials_are_known_by_their_shape(word: str) -> None:
    redactor = Redactor()
    for text in (
        f"redis://:{word}@10.0.0.1:6379/0",
        f"rediss://user:{word}@host",
        f"Authorization: Bearer {word}",
        f"key sk-{word} was used",
        f"isk_{word}",
        f"password={word}",
        f"api_key: '{word}'",
        f"-----BEGIN PRIVATE KEY-----\n{word}\n-----END PRIVATE KEY-----",
    ):
        assert word not in redactor.text(text), text


def test_a_url_keeps_its_host() -> None:
    assert Redactor().text("redis://:pw@db:6379/0") == f"redis://{REDACTED}@db:6379/0"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_result_is_always_valid_bounded_json(value: object) -> None:
    text = json.dumps(Redactor().fields({"value": value}), allow_nan=False)
    assert len(text) < 2_000_000


def test_long_values_are_cut_after_cleaning() -> None:
    text = Redactor([SECRET]).text("x" * 4_090 + SECRET + "y" * 100)
    assert SECRET[:6] not in text
    assert text.endswith("more]")
    assert len(text) < 4_200
