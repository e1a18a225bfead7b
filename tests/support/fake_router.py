"""A RouterPort whose answers are scripted, for tests of the front doors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common.errors import RequestError
from services.router.api import (
    ChoiceDelta,
    ChoiceEnd,
    GenerateCall,
    RequestEnd,
    RequestTiming,
    RouterOutput,
    ServedModel,
    WriteOutputs,
)
from services.text.output import ChoiceText
from services.text.tokenizer import TextModel

TIMING = RequestTiming(
    prefill_us=1200,
    handoff_us=300,
    handoff_blocks=2,
    mode="REMOTE",
    plane="memfd",
    prefill_worker="prefill-0",
    decode_worker="decode-0",
)

# A float waits that many seconds; a list is written at once.
Step = RouterOutput | list[RouterOutput] | Exception | BaseException | float
Script = Callable[[GenerateCall], Sequence[Step]]


@dataclass(slots=True)
class FakeRouter:
    """Answers with `text`, one token a chunk, unless a `script` says otherwise."""

    text_model: TextModel
    text: str = "Hello wörld 🫠!"
    script: Script | None = None
    ready: tuple[bool, str] = (True, "")
    degraded: tuple[bool, str] = (False, "")
    max_pool_tokens: int = 0
    calls: list[GenerateCall] = field(default_factory=list)
    num_open: int = 0
    num_cancelled: int = 0
    gate: asyncio.Event | None = None  # waited for before the first output
    model_gates: dict[str, asyncio.Event] = field(default_factory=dict)  # the same by model
    more_names: tuple[str, ...] = ()  # of further models, alike but for their digests

    def served_models(self) -> tuple[ServedModel, ...]:
        manifest = self.text_model.manifest
        digests = {manifest.name: manifest.weights_digest}
        digests |= {name: name.encode().hex().ljust(64, "0") for name in self.more_names}
        return tuple(
            ServedModel(
                name=name,
                context_length=manifest.context_length,
                vocab_size=manifest.vocab_size,
                weights_digest=digest,
                eos_token_ids=manifest.eos_token_ids,
                max_pool_tokens=self.max_pool_tokens,
            )
            for name, digest in digests.items()
        )

    def is_ready(self) -> tuple[bool, str]:
        return self.ready

    @property
    def is_degraded(self) -> tuple[bool, str]:
        return self.degraded

    async def generate(self, call: GenerateCall, write: WriteOutputs) -> None:
        self.calls.append(call)
        self.num_open += 1
        is_finished = False
        try:
            for gate in (self.gate, self.model_gates.get(call.model)):
                if gate is not None:
                    await gate.wait()
            steps = self.script(call) if self.script else self.answer(call)
            for step in steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, BaseException):
                    raise step
                else:
                    # The last output may never be asked past: count it as finished before.
                    outputs = step if isinstance(step, list) else [step]
                    is_finished = isinstance(outputs[-1], RequestEnd)
                    await write(outputs)
                    await asyncio.sleep(0)
        except RequestError:
            is_finished = True
            raise
        finally:
            self.num_open -= 1
            self.num_cancelled += not is_finished

    def answer(self, call: GenerateCall) -> list[RouterOutput]:
        """Give the scripted text as the real router would: stop strings, length, usage."""
        outputs: list[RouterOutput] = []
        total = 0
        for choice in range(call.sampling.n):
            ids = [int(i) for i in self.text_model.encode(self.text, add_special=False)]
            made, reason, stop = self._choice(call, choice, ids)
            outputs += made
            num_tokens = sum(len(chunk.token_ids) for chunk in made)
            total += num_tokens
            outputs.append(ChoiceEnd(choice, reason, stop, num_tokens))
        outputs.append(RequestEnd(len(call.token_ids), 0, total, TIMING))
        return outputs

    def _choice(
        self, call: GenerateCall, choice: int, ids: list[int]
    ) -> tuple[list[ChoiceDelta], str, str | None]:
        text = ChoiceText(self.text_model, call.stop)
        chunks: list[ChoiceDelta] = []
        for index, token_id in enumerate(ids[: call.sampling.max_tokens]):
            delta = text.push([token_id])
            chunks.append(ChoiceDelta(choice, index, (token_id,), delta.text))
            if delta.stop is not None:
                return chunks, "stop", delta.stop
        is_cut = len(ids) > call.sampling.max_tokens
        tail = text.finish().text
        if tail:
            chunks.append(ChoiceDelta(choice, len(chunks), (), tail))
        return chunks, "length" if is_cut else "stop", None
