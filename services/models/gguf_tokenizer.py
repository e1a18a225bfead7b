"""Building a tokenizer.json from the vocabulary, merges and special tokens in a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from services.common.errors import ModelFileError
from services.models.gguf_file import GgufFile

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_MAX_VOCAB = 1 << 21
_MAX_TOKEN_CHARS = 4096  # long runs of spaces are tokens; work per token grows with its length

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Contractions, words with one leading mark, numbers, punctuation, line ends, spaces.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _Pre:
    """How text is cut before merging, for one value of `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    is_nfc: bool = False


_PRE_KINDS = {
    "gpt-2": _Pre((_GPT2_PATTERN,)),
    "smollm": _Pre((r"\p{N}", _GPT2_PATTERN)),
    "llama-bpe": _Pre((_LLAMA3_PATTERN,), ignore_merges=True),
    "qwen2": _Pre((_QWEN2_PATTERN,), is_nfc=True),
    # What files without a named kind get: punctuation apart, digits in threes.
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
_PRE_KINDS["llama3"] = _PRE_KINDS["llama-v3"] = _PRE_KINDS["llama-bpe"]


def write_tokenizer(file: GgufFile, path: Path) -> None:
    """Write the tokenizer.json of a GGUF file."""
    _build(file).save(str(path), pretty=False)


def tokenizer_config(file: GgufFile, context_length: int) -> dict[str, Any]:
    """Return the tokenizer_config.json of a GGUF file: special tokens and chat template."""
    tokens = _strings(file, "tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "add_bos_token": _adds_bos(file),
        "clean_up_tokenization_spaces": False,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(file, f"{theirs}_token_id", len(tokens))
        config[f"{ours}_token"] = None if token_id is None else tokens[token_id]
    template = file.text("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _bad(file: GgufFile, why: str) -> ModelFileError:
    return ModelFileError(f"{file.name}: {why}")


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:  # Any: element type is `kind`
    value = file.fields.get(_PREFIX + key)
    if not isinstance(value, list) or not all(type(element) is kind for element in value):
        raise _bad(file, f"{_PREFIX}{key} is missing or not a list of {kind.__name__}")
    return value


def _strings(file: GgufFile, key: str) -> list[str]:
    return _list(file, key, str)


def _token_id(file: GgufFile, key: str, vocab_size: int) -> int | None:
    token_id = file.integer(_PREFIX + key)
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise _bad(file, f"{_PREFIX}{key} {token_id} is outside the vocabulary of {vocab_size}")
    return token_id


def _adds_bos(file: GgufFile) -> bool:
    declared = file.flag(_PREFIX + "add_bos_token")
    if declared is not None:
        return declared
    return file.text(_PREFIX + "model") == "llama" or file.text(_PREFIX + "pre") == "llama-bpe"


def _build(file: GgufFile) -> Tokenizer:
    kind = file.text(_PREFIX + "model")
    builders: dict[str, Callable[[GgufFile, dict[str, int]], Tokenizer]] = {
        "gpt2": _byte_level_bpe,
        "llama": _sentencepiece_bpe,
    }
    if kind not in builders:
        raise _bad(file, f"tokenizer kind {kind!r} is not supported ({', '.join(builders)} are)")
    tokens = _strings(file, "tokens")
    if not 0 < len(tokens) <= _MAX_VOCAB:
        raise _bad(file, f"a vocabulary of {len(tokens)} tokens is not supported")
    if max(map(len, tokens)) > _MAX_TOKEN_CHARS:
        raise _bad(file, f"a token is longer than {_MAX_TOKEN_CHARS} characters")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise _bad(file, "the vocabulary holds a token twice")
    tokenizer = builders[kind](file, vocab)
    _add_special_tokens(file, tokenizer, tokens)
    bos_id = _token_id(file, "bos_token_id", len(tokens))
    if _adds_bos(file) and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _token_kinds(file: GgufFile, num_tokens: int) -> list[int]:
    if _PREFIX + "token_type" not in file.fields:
        return [_NORMAL] * num_tokens
    kinds = _list(file, "token_type", int)
    if len(kinds) != num_tokens:
        raise _bad(file, f"{len(kinds)} token types for {num_tokens} tokens")
    return kinds


def _add_special_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    kinds = _token_kinds(file, len(tokens))
    pairs = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if token]
    special = [token for token, kind in pairs if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    user = [token for token, kind in pairs if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user])


def _byte_level_bpe(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    """GPT-2 style: bytes shown as letters, merges by rank."""
    name = file.text(_PREFIX + "pre") or "default"
    pre = _PRE_KINDS.get(name)
    if pre is None:
        known = ", ".join(_PRE_KINDS)
        raise _bad(file, f"pre-tokenizer {name!r} is not supported ({known} are)")
    merges = [_merge(file, text, vocab) for text in _strings(file, "merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _merge(file: GgufFile, text: str, vocab: dict[str, int]) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise _bad(file, f"merge {text[:64]!r} does not fit the vocabulary")
    return left, right


def _sentencepiece_bpe(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    """Llama 2 style: spaces as U+2581, unknown characters as bytes, merges ranked by score."""
    scores = _list(file, "scores", float)
    if len(scores) != len(vocab):
        raise _bad(file, f"{len(scores)} scores for {len(vocab)} tokens")
    merges = _merges_by_score(vocab, scores, _token_kinds(file, len(vocab)))
    unknown_id = _token_id(file, "unknown_token_id", len(vocab))
    unknown = None if unknown_id is None else next(t for t, i in vocab.items() if i == unknown_id)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = file.flag(_PREFIX + "add_space_prefix") is not False
    prepend = [normalizers.Prepend("▁")] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(
    vocab: dict[str, int], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """List every pair of tokens that joins to an ordinary token, best score first."""
    ranked: list[tuple[float, int, int, int]] = []
    for token, token_id in vocab.items():
        if kinds[token_id] != _NORMAL:
            continue  # control and byte tokens are never the result of a merge
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], token_id, left, right))
    texts = list(vocab)
    return [(texts[left], texts[right]) for _, _, left, right in sorted(ranked)]
