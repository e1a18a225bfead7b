from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.models.gguf_convert import convert_gguf
from services.models.resolved import build_manifest
from tests.support.toy_gguf import write_toy_gguf
from tests.support.toy_model import make_toy_model

TEXTS = (
    "Hello, the  world!\n\n\tis it 12345?",
    "Съешь ещё этих мягких французских булок",
    "漢字かな交じり文 and 한국어",
    "👩‍👩‍👧‍👦 flags 🇳🇱, é vs e\u0301",
    "I'll don't WE'RE  'quoted'   \r\n end ",
    "\x00\x7f\u200b\ufeff",
)


def converted(tmp_path: Path, pre: str = "gpt-2", fields: dict[str, Any] | None = None) -> Path:
    write_toy_gguf(
        tmp_path / "toy.gguf", make_toy_model(tmp_path / "source"), pre=pre, fields=fields
    )
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "toy.gguf", out)
    return out


def load(out: Path) -> Tokenizer:
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def test_ids_equal_those_of_the_source_tokenizer(tmp_path: Path) -> None:
    tokenizer = load(converted(tmp_path))
    source = load(tmp_path / "source")
    for text in (*TEXTS, "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.encode(text).ids == source.encode(text).ids


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"])
def test_every_kind_gives_the_text_back(tmp_path: Path, pre: str) -> None:
    tokenizer = load(converted(tmp_path, pre))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected = text.replace("e\u0301", "é") if pre == "qwen2" else text  # Qwen composes
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ll", "Ġbuy", "Ġ1234", "Ġof", "Ġ", "Ġ'", "em", "'", "Ċ"]),
        ("smollm", ["I", "'ll", "Ġbuy", "Ġ", "1", "2", "3", "4", "Ġof", "Ġ", "Ġ'", "em", "'", "Ċ"]),
        ("llama-bpe", ["I", "'ll", "Ġbuy", "Ġ", "123", "4", "Ġof", "Ġ", "Ġ'", "em", "'Ċ"]),
        ("qwen2", ["I", "'ll", "Ġbuy", "Ġ", "1", "2", "3", "4", "Ġof", "Ġ", "Ġ'", "em", "'Ċ"]),
    ],
)
def test_text_is_cut_as_the_kind_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = load(converted(tmp_path, pre))
    assert tokenizer.pre_tokenizer is not None
    cut = tokenizer.pre_tokenizer.pre_tokenize_str("I'll buy 1234 of  'em'\n")
    assert [piece for piece, _ in cut] == pieces


def test_special_tokens_are_one_id_and_never_made_of_text(tmp_path: Path) -> None:
    tokenizer = load(converted(tmp_path))
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode([2], skip_special_tokens=True) == ""
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_a_leading_bos_is_added_only_where_the_file_says_so(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    out = converted(tmp_path, fields=fields)
    assert load(out).encode("a").ids[0] == 1
    assert build_manifest(out, name="m", source="s").bos_token_id == 1


def test_a_bos_that_is_never_used_is_not_in_the_manifest(tmp_path: Path) -> None:
    """config.json names a bos id though the tokenizer adds none."""
    out = converted(tmp_path, fields={"tokenizer.ggml.bos_token_id": 1})
    assert load(out).encode("a").ids[0] != 1
    assert build_manifest(out, name="m", source="s").bos_token_id is None


def test_every_end_id_of_the_file_ends_a_sequence(tmp_path: Path) -> None:
    out = converted(tmp_path, fields={"tokenizer.ggml.eot_token_id": 0})
    assert build_manifest(out, name="m", source="s").eos_token_ids == (2, 0)


def sentencepiece_fields() -> dict[str, Any]:
    """A Llama 2 style vocabulary: unknown, bos, eos, 256 bytes, pieces with scores."""
    pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "▁h", "el", "lo", "▁hel", "▁hello", "▁w"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    padding = [f"[{i}]" for i in range(300 - len(tokens))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces), *[5] * len(padding)]
    # The earlier a piece was learnt the higher its score; single letters come last.
    scores = [0.0] * 259 + [-100.0] * 8 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores + [0.0] * len(padding),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = load(converted(tmp_path, fields=sentencepiece_fields()))
    assert tokenizer.encode("hello w", add_special_tokens=False).tokens == ["▁hello", "▁w"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("he").tokens == ["<s>", "▁h", "e"]
    for text in ("hello world", "  two  spaces ", "日本 😀"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
