"""From a spec to a call: template and tokenizer, off the event loop when they take long."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from services.common.clock import Clock
from services.common.errors import RequestError
from services.common.limits import Limits
from services.gateway.spec import ChatInput, GenerateSpec, PromptInput, TokenIds, TokenInput
from services.gateway.traffic_control import TrafficControl, traffic_key
from services.gateway.validate import (
    Arrival,
    build_call,
    check_spec,
    check_token_ids,
    deadline_of,
)
from services.router.api import GenerateCall, RouterPort, ServedModel
from services.router.traffic import TrafficTable, mirror_of, names_of, resolve
from services.text.tokenizer import TextModel

T = TypeVar("T")
_NO_RULES = TrafficTable()


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
        self,
        router: RouterPort,
        texts: Mapping[str, TextModel],
        limits: Limits,
        pool: TextPool,
        clock: Clock,
        traffic: TrafficControl,
    ) -> None:
        """`texts`: the text side of every model, by the name it is served under."""
        self._router = router
        self._texts = texts
        self._limits = limits
        self._pool = pool
        self._clock = clock
        self._traffic = traffic

    # -- which model -------------------------------------------------------------------------

    def models(self) -> tuple[ServedModel, ...]:
        """Every name a request may give: models, and aliases as the model most get."""
        table, served = self._traffic.table(), self._router.served_models()
        return tuple(
            replace(resolve(table, name, b"", served), name=name)
            for name in names_of(table, served)
        )

    def model(self, name: str = "") -> ServedModel:
        """Return the model behind a name or an alias; empty = the default one."""
        return resolve(self._traffic.table(), name, b"", self._router.served_models())

    def resolved(self, spec: GenerateSpec, arrival: Arrival) -> GenerateSpec:
        """Put the name of the model that is to answer in the place of what the client said."""
        table = self._traffic.table()
        if not table.aliases and not table.mirrors:
            return spec  # names are those of models: the check that follows looks them up
        key, served = traffic_key(spec, arrival), self._router.served_models()
        return replace(spec, model=resolve(table, spec.model, key, served).name)

    def mirrored(self, spec: GenerateSpec, arrival: Arrival) -> GenerateSpec | None:
        """Return a request for the model that mirrors a resolved one, if one does."""
        table = self._traffic.table()
        if not table.mirrors:
            return None
        served = self._router.served_models()
        model = mirror_of(table, spec.model, traffic_key(spec, arrival), served)
        return None if model is None else replace(spec, model=model.name)

    def exactly(self, spec: GenerateSpec) -> ServedModel:
        """Return the model of a resolved request."""
        return resolve(_NO_RULES, spec.model, b"", self._router.served_models())

    # -- requests ----------------------------------------------------------------------------

    def check(self, spec: GenerateSpec) -> None:
        """Check all of a resolved request that needs no tokens."""
        check_spec(spec, self._limits, self.exactly(spec))

    async def call(self, spec: GenerateSpec, arrival: Arrival) -> GenerateCall:
        """Make a tokenised call from a resolved spec that was checked."""
        model = self.exactly(spec)
        deadline = deadline_of(spec.timeout_ms, arrival, self._limits)
        token_ids = await self.tokenize(spec.prompt, True, deadline, spec.names.prompt, model)
        return build_call(
            spec, token_ids, arrival, self._limits, model, lambda: secrets.randbits(63)
        )

    async def tokenize(
        self,
        prompt: PromptInput,
        add_special: bool,
        deadline: float,
        param: str,
        model: ServedModel,
    ) -> npt.NDArray[np.uint32]:
        """Turn a checked prompt into ids of a model."""
        if isinstance(prompt, TokenInput):
            return prompt.token_ids.astype(np.uint32, copy=False)
        text_model = self._texts[model.name]
        if isinstance(prompt, ChatInput):
            return await self._pool.run(
                lambda: _tokenize_chat(text_model, prompt, param), deadline - self._clock.now()
            )
        text = prompt.text
        if len(text.encode()) <= self._limits.inline_tokenize_bytes:
            return _encode(text_model, text, add_special, param)
        return await self._pool.run(
            lambda: _encode(text_model, text, add_special, param), deadline - self._clock.now()
        )

    def detokenize(self, token_ids: TokenIds, param: str, model: ServedModel) -> str:
        """Turn ids of a model into text, special tokens included."""
        if token_ids.size > model.context_length:
            raise RequestError(
                "context_length_exceeded",
                f"{param} has {token_ids.size} tokens, limit {model.context_length}",
                param=param,
            )
        ids = check_token_ids(token_ids, model.vocab_size, param)
        return self._texts[model.name].decode(ids.tolist())


def _tokenize_chat(text: TextModel, prompt: ChatInput, param: str) -> npt.NDArray[np.uint32]:
    context = text.manifest.context_length
    return _fitting(text.encode_chat_at_most(prompt.turns, context), context, param)


def _encode(
    text_model: TextModel, text: str, add_special: bool, param: str
) -> npt.NDArray[np.uint32]:
    context = text_model.manifest.context_length
    return _fitting(text_model.encode_at_most(text, add_special, context), context, param)


def _fitting(
    token_ids: npt.NDArray[np.uint32] | None, context: int, param: str
) -> npt.NDArray[np.uint32]:
    if token_ids is None:
        raise RequestError(
            "context_length_exceeded",
            f"{param} has {context + 1} tokens at least; the model's context of {context} "
            "tokens must hold it and the answer; shorten it",
            param=param,
        )
    return token_ids
