"""A model without weights: KV that depends on every token before it, tokens that depend on all KV.

The KV of a token is spread over its whole slot from one 64-bit state, and the state is chained
over the prefix by reading the KV of the token before. The next token is drawn from a hash of every
byte of the context, read through the block table. One wrong byte anywhere gives another token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.ids import BlockId
from services.common.model_manifest import ModelManifest
from services.common.sampling import SamplingParams
from services.engine.plan import SampleTask
from services.engine.sampler import sample
from services.kv.attached import AttachedKv
from services.kv.block_table import MAX_POOL_BLOCKS, POOL_SHIFT
from services.kv.digest import block_digests
from services.kv.layout import BLOCK_TOKENS, KvLayout
from services.kv.memory import KvPoolMemory
from services.models.resolved import file_digest, write_manifest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAME = "scripted"
CONTEXT = 4096
EOS_ID = 0
_SPECIAL = ("<|endoftext|>",)
_WORD_BYTES = 8
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that every word is a bijection of the state
_MASK = (1 << 64) - 1

TokenIds = npt.NDArray[np.uint32]
BlockIds = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScriptedShape:
    """Size of a scripted model's KV, and what its tokens are."""

    context: int = CONTEXT
    num_layers: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32  # 32 KiB a block in float32
    is_ascii: bool = False  # printable tokens only: each is a character of its own


# Next to no work for workers: what is measured with it is in front of them.
SLIM = ScriptedShape(context=32_768, num_layers=1, num_kv_heads=1, head_dim=8, is_ascii=True)


def make_scripted_model(model_dir: Path, shape: ScriptedShape | None = None) -> Path:
    """Write the files routers and scripted workers read; equal every time, no weights."""
    shape = shape or ScriptedShape()
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_tokenizer(is_ascii=shape.is_ascii)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    settings = {"bos_token": None, "eos_token": _SPECIAL[0], "model_max_length": shape.context}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    manifest = ModelManifest(
        format=1,
        name=NAME,
        family=NAME,
        revision="",
        source=NAME,
        bos_token_id=None,
        weights_digest="0" * 64,
        config_digest="0" * 64,
        tokenizer_digest=file_digest(model_dir / "tokenizer.json"),
        context_length=shape.context,
        vocab_size=tokenizer.get_vocab_size(),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope="{}",
        eos_token_ids=(EOS_ID,),
    )
    write_manifest(model_dir, manifest)
    return model_dir


def _byte_tokenizer(*, is_ascii: bool) -> Tokenizer:
    # Here, because workers never need it: they are sent token ids.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if is_ascii:
        alphabet = [token for token in alphabet if "!" <= token <= "~"]
    tokens = [*_SPECIAL, *alphabet]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return tokenizer


class ScriptedModel:
    """Writes KV into a pool and draws logits from it; also the pool's BlockContent."""

    def __init__(self, memory: KvPoolMemory, vocab_size: int) -> None:
        layout = memory.layout
        row_bytes = layout.head_dim * layout.itemsize
        if row_bytes % _WORD_BYTES:
            raise ValueError("a head's row must be a whole number of 64-bit words")
        self._memory = memory
        self._peers: dict[int, KvPoolMemory] = {}  # pools that rows read in place, by number
        planes = layout.num_layers * 2 * layout.num_kv_heads
        width = row_bytes // _WORD_BYTES
        # [num_blocks, layers x K/V x heads, block_size, words of a head's row]
        self._words: Words = memory.blocks.view(np.uint64).reshape(
            memory.num_blocks, planes, layout.block_size, width
        )
        count = np.arange(planes * width, dtype=np.uint64)
        multipliers = count * np.uint64(2 * (_MULTIPLIER >> 1)) + np.uint64(1)  # first one is 1
        self._multipliers = multipliers.reshape(planes, width)
        self._vocab = np.arange(vocab_size, dtype=np.uint64)

    def write(self, start: int, token_ids: TokenIds, slots: npt.NDArray[np.int64],
              block_ids: BlockIds) -> None:  # fmt: skip
        """Write the KV of tokens [start, start + len(token_ids)) of one sequence."""
        state = self._state_at(start - 1, block_ids) if start else 0
        states = np.empty(len(token_ids), dtype=np.uint64)
        for idx, token_id in enumerate(token_ids.tolist()):
            state = _next_state(state, token_id)
            states[idx] = state
        spread = states[:, None, None] * self._multipliers  # [num_tokens, planes, width]
        blocks, offsets = np.divmod(slots, BLOCK_TOKENS)
        self._words[blocks, :, offsets, :] = spread

    def _state_at(self, position: int, block_ids: BlockIds) -> int:
        block, offset = divmod(position, BLOCK_TOKENS)
        row = self._block(int(block_ids[block])).view(np.uint64)
        planes, width = self._multipliers.shape
        return int(row.reshape(planes, BLOCK_TOKENS, width)[0, offset, 0])

    def read_also(self, kv: AttachedKv) -> None:
        """Block tables may name blocks of this peer's pool from now on."""
        self._peers[kv.pool_id] = kv.pool

    def _block(self, entry: int) -> npt.NDArray[np.uint8]:
        number, block = entry >> POOL_SHIFT, entry % MAX_POOL_BLOCKS
        pool = self._peers[number] if number else self._memory
        row: npt.NDArray[np.uint8] = pool.blocks[block]
        return row

    def logits(self, num_tokens: int, block_ids: BlockIds) -> Logits:
        """Return logits [vocab_size] that depend on every KV byte of the context."""
        full, rest = divmod(num_tokens, BLOCK_TOKENS)
        digest = xxhash.xxh3_64(seed=num_tokens)
        for entry in block_ids[:full].tolist():
            digest.update(self._block(entry).data)
        if rest:
            tail = self._words[block_ids[full], :, :rest, :]
            digest.update(np.ascontiguousarray(tail).data)
        return _spread_logits(self._vocab, digest.intdigest())

    # -- BlockContent ------------------------------------------------------------------------

    def seal(self, block_id: BlockId) -> None:
        """Store the digests of a full block."""
        memory = self._memory
        memory.digests[block_id] = block_digests(memory.layout, memory.blocks[block_id])

    def freeze(self, block_id: BlockId) -> None:
        """Nothing to do: the bytes are where the sender reads them."""

    def copy(self, src: BlockId, dst: BlockId) -> None:
        """Copy a block."""
        self._memory.blocks[dst] = self._memory.blocks[src]

    def fetch(self, block_ids: Sequence[BlockId]) -> None:
        """Nothing to do: the bytes are where the model reads them."""

    def copy_home(self, kv: AttachedKv, at: int, dst: BlockId, *, verify: bool) -> bool:
        """Copy an attached block into ours."""
        return kv.copy_home(at, self._memory, dst, verify=verify)


def _next_state(state: int, token_id: int) -> int:
    message = state.to_bytes(8, "little") + token_id.to_bytes(4, "little")
    digest: int = xxhash.xxh3_64_intdigest(message)
    return digest


def _spread_logits(vocab: Words, digest: int) -> Logits:
    """Uniform in [-8, 8), one splitmix64 output per token id."""
    value = vocab * np.uint64(_MULTIPLIER) + np.uint64(digest)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return ((value >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-20)) - np.float32(8.0)


class ScriptedReference:
    """The right answers, computed with neither scheduler nor handoff."""

    def __init__(self, manifest: ModelManifest, kv_dtype: str = "float32") -> None:
        layout = KvLayout(manifest.num_layers, manifest.num_kv_heads, manifest.head_dim, kv_dtype)
        num_blocks = layout.blocks_for(manifest.context_length)
        self._eos = manifest.eos_token_ids
        memory = KvPoolMemory.create(layout, num_blocks, kind="anonymous")
        self._model = ScriptedModel(memory, manifest.vocab_size)
        self._block_ids = np.arange(num_blocks, dtype=np.int32)

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:
        """Return the tokens of every choice; requests with `ignore_eos` only."""
        if not params.ignore_eos:
            raise ValueError("the reference answers requests of a fixed length")
        tokens = np.array(prompt, dtype=np.uint32)
        self._write(0, tokens)
        return [self._choice(choice, tokens, params) for choice in range(params.n)]

    def _write(self, start: int, tokens: TokenIds) -> None:
        slots = np.arange(start, start + len(tokens), dtype=np.int64)
        self._model.write(start, tokens, slots, self._block_ids)

    def _choice(self, choice: int, prompt: TokenIds, params: SamplingParams) -> list[int]:
        generated: list[int] = []
        while True:
            index = len(generated)
            logits = self._model.logits(len(prompt) + index, self._block_ids)
            task = SampleTask(choice, index, params, prompt, generated)
            generated.append(sample(logits, task, self._eos).token_id)
            if len(generated) == params.max_tokens:
                return generated
            self._write(len(prompt) + index, np.array(generated[-1:], dtype=np.uint32))
