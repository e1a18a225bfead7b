"""Text of the default model against the transformers library."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.text.output import ChoiceText
from services.text.template import ChatTurn
from services.text.tokenizer import TextModel

pytestmark = pytest.mark.integration

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Hi\n\n"}],
    [
        {"role": "user", "content": "Wer bist du? 🫠"},
        {"role": "assistant", "content": "日本語"},
        {"role": "user", "content": "{{ 7 * 7 }} <b>&amp;</b> 'q' \"d\""},
    ],
]
TEXTS = [
    "Hello world",
    " dďábel 🫠 龜 ש",
    "1234567 + 89",
    "\tdef f():\n    return 1\n",
    "<|im_end|>",
]


@pytest.fixture(scope="module")
def text_model(smollm2_dir: Path) -> TextModel:
    return TextModel.load(smollm2_dir)


@pytest.fixture(scope="module")
def theirs(smollm2_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.mark.parametrize("chat", CHATS)
def test_chats_become_the_same_prompt_and_ids(
    text_model: TextModel, theirs: Any, chat: list[dict[str, str]]
) -> None:
    assert text_model.template is not None
    prompt = text_model.template.render([ChatTurn(m["role"], m["content"]) for m in chat])
    assert prompt == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text_model.encode(prompt, False).tolist() == theirs.encode(
        prompt, add_special_tokens=False
    )


@pytest.mark.parametrize("text", TEXTS)
def test_text_makes_the_same_ids_and_comes_back(
    text_model: TextModel, theirs: Any, text: str
) -> None:
    ids = text_model.encode(text, True).tolist()
    assert ids == theirs.encode(text)
    assert text_model.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_token_by_token_text_joins_to_the_whole(text_model: TextModel, text: str) -> None:
    choice = ChoiceText(text_model, ())
    pieces = [choice.push([int(i)]).text for i in text_model.encode(text, False)]
    assert "".join(pieces) + choice.finish().text == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", ["ab" * (2 << 20), " " * (4 << 20), "lorem ipsum " * 350_000])
def test_hopelessly_long_text_is_refused_soon(text_model: TextModel, text: str) -> None:
    """RB-080: the work is bounded by the context, not by the prompt."""
    started = time.monotonic()
    assert text_model.encode_at_most(text, True, text_model.manifest.context_length) is None
    assert time.monotonic() - started < 2.0


def test_text_that_just_fits_is_taken(text_model: TextModel) -> None:
    text = "hello world this is text " * 1200
    ids = text_model.encode(text, True)
    taken = text_model.encode_at_most(text, True, len(ids))
    assert taken is not None
    assert taken.tolist() == ids.tolist()
    assert text_model.encode_at_most(text, True, len(ids) - 1) is None
