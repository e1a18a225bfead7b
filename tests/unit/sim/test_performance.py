from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.sim.performance import PerformanceModel, default_model, parse_model, read_model


def written(**changes: Any) -> str:
    """Write the default model with some sections changed."""
    return json.dumps({**default_model().model_dump(), **changes})


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(default_model().model_dump_json(exclude_none=True))
    assert read_model(path) == default_model()


def test_prompts_and_steps_take_what_the_formulas_say() -> None:
    text = written(
        prefill={"fixed_s": 0.5, "token_s": 0.01, "context_s": 0.001},
        decode={"fixed_s": 1.0, "request_s": 0.1, "token_s": 0.01, "max_batch": 4},
    )
    model = parse_model(text, "m")
    assert model.prefill_s(100, 50) == pytest.approx(0.5 + 1.0 + 0.001 * 100 * (50 + 50))
    assert model.decode_s(3, 200) == pytest.approx(1.0 + 0.3 + 2.0)
    assert default_model().prefill_tok_s == pytest.approx(20_000)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"format": 2}, "format"),
        ({"kv_block": 7}, "kv_block"),
        ({"prefill": {"token_s": 0.0}}, "prefill.token_s"),
        ({"prefill": {"token_s": float("nan")}}, "prefill.token_s"),
        ({"prefill": {"token_s": float("inf")}}, "prefill.token_s"),
        ({"decode": {"fixed_s": 0.01, "max_batch": 0}}, "decode.max_batch"),
        ({"network": {"token_bytes": 1, "bytes_s": 0}}, "network.bytes_s"),
        ({"chunk_tokens": "many"}, "chunk_tokens"),
    ],
)
def test_a_fault_is_named_by_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^there: {key}: "):
        parse_model(written(**changes), "there")


def test_what_is_no_model_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"m: "):
        parse_model("[", "m")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model(tmp_path / "absent.json")
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_model(path)
    path.write_bytes(b" " * 100_000)
    with pytest.raises(ConfigError, match="larger than"):
        read_model(path)


def test_every_field_says_what_it_is() -> None:
    """A model file is written by hand too: its schema is what documents it."""
    schema = PerformanceModel.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for name, field in section["properties"].items():
            is_section = "$ref" in field or "$ref" in str(field.get("anyOf"))
            assert is_section or field.get("description"), name
