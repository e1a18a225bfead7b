"""From a spec to a call: template and tokenizer, off the event loop when they take long."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from services.common.clock import Clock
from services.common.errors import RequestError
from services.common.limits import Limits
from services.gateway.spec import ChatInput, GenerateSpec, PromptInput, TextInput
from services.gateway.validate import (
    Arrival,
    build_call,
    check_spec,
    check_token_ids,
    check_vocabulary,
    deadline_of,
)
from services.router.api import GenerateCall, RouterPort, ServedModel
from services.text.tokenizer import TextModel

T = TypeVar("T")


class TextPool:
    """A few threads for text work, with a bound on what waits for them."""

    def __init__(self, num_threads: int, max_jobs: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="isthmus-text")
        self._max_jobs = max_jobs
        self._num_jobs = 0

    async def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """Run `work` in a thread; raise `overloaded` when too much waits already."""
        if timeout_s <= 0:
            raise RequestError("deadline_exceeded", "the deadline passed before tokenising")
        if self._num_jobs >= self._max_jobs:
            raise RequestError(
                "overloaded", "too many prompts wait to be tokenised", retry_after_ms=1000
            )
        self._num_jobs += 1
        future = self._executor.submit(work)
        # Counted until the thread is done with it, also when the waiting client has left.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_soon(loop, self._job_done))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise RequestError(
                "deadline_exceeded", "the deadline passed while tokenising"
            ) from None

    def close(self) -> None:
        """Drop what waits; running work ends by its own limits."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _job_done(self) -> None:
        self._num_jobs -= 1


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)


class Preparer:
    """Checks requests, writes prompts and tokenises them, for both front doors."""

    def __init__(
        self, router: RouterPort, text: TextModel, limits: Limits, pool: TextPool, clock: Clock
    ) -> None:
        self._router = router
        self._text = text
        self._limits = limits
        self._pool = pool
        self._clock = clock

    @property
    def text(self) -> TextModel:
        """The text side of the model."""
        return self._text

    def models(self) -> tuple[ServedModel, ...]:
        """Every model of this cluster."""
        return self._router.served_models()

    def model(self) -> ServedModel:
        """The model this cluster serves."""
        models = self._router.served_models()
        if not models:
            raise RequestError("no_workers", "no model is served yet", retry_after_ms=1000)
        return models[0]

    def check(self, spec: GenerateSpec) -> None:
        """Check all that needs no tokens."""
        check_spec(spec, self._limits, self.model())

    async def call(self, spec: GenerateSpec, arrival: Arrival) -> GenerateCall:
        """Make a tokenised call from a spec that was checked."""
        model = self.model()
        deadline = deadline_of(spec.timeout_ms, arrival, self._limits)
        token_ids = await self.tokenize(spec.prompt, True, deadline, spec.names.prompt)
        return build_call(
            spec, token_ids, arrival, self._limits, model, lambda: secrets.randbits(63)
        )

    async def tokenize(
        self, prompt: PromptInput, add_special: bool, deadline: float, param: str
    ) -> npt.NDArray[np.uint32]:
        """Turn a checked prompt into ids."""
        if isinstance(prompt, ChatInput):
            return await self._pool.run(
                lambda: self._tokenize_chat(prompt, param), deadline - self._clock.now()
            )
        if isinstance(prompt, TextInput):
            text = prompt.text
            if len(text.encode()) <= self._limits.inline_tokenize_bytes:
                return self._encode(text, add_special, param)
            return await self._pool.run(
                lambda: self._encode(text, add_special, param), deadline - self._clock.now()
            )
        return check_token_ids(prompt.token_ids, self.model().vocab_size, param)

    def detokenize(self, token_ids: npt.NDArray[np.int64], param: str) -> str:
        """Turn ids into text, special tokens included."""
        model = self.model()
        if token_ids.size > model.context_length:
            raise RequestError(
                "context_length_exceeded",
                f"{param} has {token_ids.size} tokens, limit {model.context_length}",
                param=param,
            )
        ids = check_token_ids(token_ids, model.vocab_size, param)
        check_vocabulary(ids, model.vocab_size, param)
        return self._text.decode(ids.tolist())

    def _tokenize_chat(self, prompt: ChatInput, param: str) -> npt.NDArray[np.uint32]:
        context = self._text.manifest.context_length
        return self._fitting(self._text.encode_chat_at_most(prompt.turns, context), param)

    def _encode(self, text: str, add_special: bool, param: str) -> npt.NDArray[np.uint32]:
        context = self._text.manifest.context_length
        return self._fitting(self._text.encode_at_most(text, add_special, context), param)

    def _fitting(
        self, token_ids: npt.NDArray[np.uint32] | None, param: str
    ) -> npt.NDArray[np.uint32]:
        context = self._text.manifest.context_length
        if token_ids is None:
            raise RequestError(
                "context_length_exceeded",
                f"{param} has {context + 1} tokens at least; the model's context of {context} "
                "tokens must hold it and the answer; shorten it",
                param=param,
            )
        return token_ids
