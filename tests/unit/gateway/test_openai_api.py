"""Bodies of the OpenAI API, away from any door."""

from __future__ import annotations

import pytest

from services.common.errors import RequestError
from services.common.limits import Limits
from services.gateway.openai_api import parse_completion


def test_names_are_bounded_in_bytes_not_characters() -> None:
    limits = Limits(max_id_bytes=8)
    parse_completion({"prompt": "x", "user": "é" * 4}, limits)
    with pytest.raises(RequestError, match="user has 10 bytes, limit 8"):
        parse_completion({"prompt": "x", "user": "é" * 5}, limits)


def test_half_a_surrogate_pair_in_a_name_is_refused() -> None:
    with pytest.raises(RequestError, match="user holds half a surrogate pair"):
        parse_completion({"prompt": "x", "user": "\ud800"}, Limits())
