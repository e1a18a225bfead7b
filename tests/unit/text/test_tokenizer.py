"""TextModel over a real tokenizer file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common.errors import ModelFileError
from services.text.template import ChatTurn
from services.text.tokenizer import TextModel
from tests.support.toy_model import make_toy_model

TEXTS = ["hello world", "dďábel 🫠 龜 ש", " leading", "a\n\n b\t1234567", "<not special>"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def text_model(model_dir: Path) -> TextModel:
    return TextModel.load(model_dir)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(text_model: TextModel, text: str) -> None:
    ids = text_model.encode(text, add_special=False)
    assert ids.dtype.name == "uint32"
    assert text_model.decode(ids) == text
    assert b"".join(text_model.token_bytes(int(i)) for i in ids) == text.encode()


def test_chat_ends_with_special_tokens_that_answers_never_show(text_model: TextModel) -> None:
    assert text_model.template is not None
    prompt = text_model.template.render([ChatTurn("user", "Hi")])
    ids = text_model.encode(prompt, add_special=False)
    special = [int(i) for i in ids if text_model.is_special(int(i))]
    assert special
    assert all(text_model.text_bytes(token_id) == b"" for token_id in special)
    assert text_model.decode(ids) == prompt
    assert text_model.decode(special, skip_special=True) == ""


def copy_model(source: Path, target: Path) -> Path:
    for name in ("isthmus.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def test_changed_tokenizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    copy_model(model_dir, tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ModelFileError, match="not the one its manifest names"):
        TextModel.load(tmp_path)


def test_vocabulary_larger_than_the_embedding_is_refused(model_dir: Path, tmp_path: Path) -> None:
    copy_model(model_dir, tmp_path)
    path = tmp_path / "isthmus.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 10}))
    with pytest.raises(ModelFileError, match="10 rows"):
        TextModel.load(tmp_path)


def test_missing_tokenizer_is_named(model_dir: Path, tmp_path: Path) -> None:
    copy_model(model_dir, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        TextModel.load(tmp_path)


@pytest.mark.parametrize("max_tokens", [1, 5, 50, 51, 52, 500])
def test_bounded_encoding_agrees_with_the_whole(text_model: TextModel, max_tokens: int) -> None:
    for text in ("a b" * 17, "x" * 51, "the and of " * 900, "🫠" * 13, " " * 5000):
        ids = text_model.encode(text, True).tolist()
        taken = text_model.encode_at_most(text, True, max_tokens)
        assert (None if taken is None else taken.tolist()) == (
            ids if len(ids) <= max_tokens else None
        )
