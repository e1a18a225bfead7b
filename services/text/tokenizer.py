"""Tokenizer of a resolved model: text to ids, ids to text, and the exact bytes of every token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from services.common.errors import ModelFileError, RequestError
from services.common.model_manifest import ModelManifest, read_manifest
from services.text.control_tokens import ControlTokenGuard, without_marker
from services.text.detokenizer import whole_text
from services.text.template import ChatTemplate, ChatTurn, load_chat_template
from services.text.token_bytes import TokenBytes

TOKENIZER_NAME = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 128 << 20
_FIRST_TRY_CHARS = 8  # a token: most text has fewer, so the first try decides
_CUT_SLACK = 64  # tokens


class TextModel:
    """Everything text about one model; safe to use from several threads."""

    def __init__(
        self,
        manifest: ModelManifest,
        tokenizer: Tokenizer,
        token_bytes: TokenBytes,
        template: ChatTemplate | None,
        max_token_bytes: int | None = None,
    ) -> None:
        """`max_token_bytes`: longest stretch of text one token can take; None = no bound."""
        self.manifest = manifest
        self.template = template
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        self._max_token_bytes = max_token_bytes
        self._guard = ControlTokenGuard(token_bytes.special_texts())
        # A table's own look-up: this is asked for every token.
        self.whole_text: Callable[[int], str | None] = _WholeTexts(
            manifest.vocab_size, self.text_bytes
        ).__getitem__

    @staticmethod
    def load(model_dir: Path) -> TextModel:
        """Read a resolved model directory; raise ModelFileError that says what is wrong."""
        manifest = read_manifest(model_dir)
        raw = _read_tokenizer(model_dir, manifest)
        try:
            tokenizer = Tokenizer.from_buffer(raw)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelFileError(f"{TOKENIZER_NAME} of {manifest.name}: {error}") from None
        # A file may carry the truncation and padding of its training run; serving wants neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        size = tokenizer.get_vocab_size(with_added_tokens=False)
        if size > manifest.vocab_size:
            raise ModelFileError(
                f"{TOKENIZER_NAME} of {manifest.name} has {size} tokens, "
                f"the model's embedding has {manifest.vocab_size} rows"
            )
        description: dict[str, Any] = json.loads(raw)
        token_bytes = TokenBytes.from_description(description, tokenizer.id_to_token)
        template = load_chat_template(model_dir)
        # A normalizer may drop text, and then a long text may have few tokens.
        is_bounded = tokenizer.normalizer is None
        longest = max(map(_utf8_length, tokenizer.get_vocab()), default=1) if is_bounded else None
        return TextModel(manifest, tokenizer, token_bytes, template, longest)

    def encode(self, text: str, add_special: bool) -> npt.NDArray[np.uint32]:
        """Turn text into ids; `add_special` puts what the model wants around raw text."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        bos = self.manifest.bos_token_id
        if add_special and bos is not None and (not ids or ids[0] != bos):
            ids.insert(0, bos)
        return np.asarray(ids, dtype=np.uint32)

    def encode_at_most(
        self, text: str, add_special: bool, max_tokens: int
    ) -> npt.NDArray[np.uint32] | None:
        """Turn text into ids, or give None if they are more than `max_tokens`.

        The work is bounded by `max_tokens`, not by the text: growing starts of a long text are
        tried first, so that megabytes of prompt are refused after a few kilobytes of them.
        """
        if self._is_long(text, max_tokens):
            return None
        ids = self.encode(text, add_special)
        return ids if len(ids) <= max_tokens else None

    def _is_long(self, text: str, max_tokens: int) -> bool:
        """Say whether a start of the text has more tokens already; False does not mean it fits."""
        if self._least_tokens(text) > max_tokens:
            return True
        # A cut may split a token and so make a few more of it.
        limit = max_tokens + _CUT_SLACK
        size = _FIRST_TRY_CHARS * limit
        while size < len(text):
            if len(self._tokenizer.encode(text[:size], add_special_tokens=False).ids) > limit:
                return True
            size *= 2
        return False

    def encode_chat_at_most(
        self, turns: Sequence[ChatTurn], max_tokens: int
    ) -> npt.NDArray[np.uint32] | None:
        """Turn a chat into ids by the template, or give None if they are more than `max_tokens`.

        Control tokens that stand in the messages are read as ordinary text.

        Raises:
            RequestError: template_error.
        """
        if self.template is None:
            message = "the model has no chat template; send a plain prompt"
            raise RequestError("template_error", message, param="messages")
        if self._guard.is_any_in(turn.role for turn in turns):
            raise RequestError("template_error", "a role holds a control token", param="messages")
        try:
            contents, marker = self._guard.guard([turn.content for turn in turns])
            if not marker:
                # The template writes the special tokens itself.
                return self.encode_at_most(self.template.render(turns), False, max_tokens)
            pairs = zip(turns, contents, strict=True)
            text = self.template.render([ChatTurn(turn.role, text) for turn, text in pairs])
            # Markers are tokens more, three at most for each.
            if self._is_long(text, max_tokens + 3 * text.count(marker)):
                return None
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            ids = without_marker(text, encoding.ids, encoding.offsets, marker)
        except ValueError:
            message = "the messages hold control tokens of the model, and cannot be told from text"
            raise RequestError("template_error", message, param="messages") from None
        return np.asarray(ids, dtype=np.uint32) if len(ids) <= max_tokens else None

    def decode(self, token_ids: Iterable[int], skip_special: bool = False) -> str:
        """Turn ids into text; bytes that are not UTF-8 become U+FFFD."""
        table = self._token_bytes
        ids = [int(token_id) for token_id in token_ids]
        raw = b"".join(
            table.bytes_of(token_id)
            for token_id in ids
            if not (skip_special and table.is_special(token_id))
        )
        return table.strip_start(raw).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Give the exact bytes a token stands for; ids without a token have none."""
        return self._token_bytes.bytes_of(token_id)

    def text_bytes(self, token_id: int) -> bytes:
        """Give the bytes a token adds to an answer: nothing for special tokens."""
        if self._token_bytes.is_special(token_id):
            return b""
        return self._token_bytes.bytes_of(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, never shown to clients."""
        return self._token_bytes.is_special(token_id)

    def _least_tokens(self, text: str) -> int:
        """Give a lower bound on the tokens of a text without tokenising it."""
        return -(-len(text.encode()) // self._max_token_bytes) if self._max_token_bytes else 0


class _WholeTexts(dict[int, str | None]):
    """What a token adds to an answer, as text; None where it begins or ends within a character.

    Filled as tokens come, with no more than the vocabulary.
    """

    def __init__(self, vocab_size: int, text_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._text_bytes = text_bytes

    def __missing__(self, token_id: int) -> str | None:
        text = whole_text(self._text_bytes(token_id))
        if 0 <= token_id < self._vocab_size:
            self[token_id] = text
        return text


def _utf8_length(token: str) -> int:
    return len(token.encode())


def _read_tokenizer(model_dir: Path, manifest: ModelManifest) -> bytes:
    path = model_dir / TOKENIZER_NAME
    try:
        size = path.stat().st_size
        if size > _MAX_TOKENIZER_BYTES:
            raise ModelFileError(
                f"{TOKENIZER_NAME} of {manifest.name} has {size} bytes, "
                f"limit {_MAX_TOKENIZER_BYTES}"
            )
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ModelFileError(f"{manifest.name} has no {TOKENIZER_NAME}") from None
    digest = hashlib.sha256(raw).hexdigest()
    if digest != manifest.tokenizer_digest:
        raise ModelFileError(
            f"{TOKENIZER_NAME} of {manifest.name} is not the one its manifest names "
            f"(SHA-256 {digest[:16]}…, expected {manifest.tokenizer_digest[:16]}…)"
        )
    return raw
