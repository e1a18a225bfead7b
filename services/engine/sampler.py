"""Draws tokens from logits, row by row: nothing depends on the batch, the worker or a retry.

Randomness is a function of (seed, choice, index of the token), so the same request gives the
same draws wherever and whenever it runs. Ties go to the lowest token id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.common.sampling import SamplingParams
from services.engine.api import TokenLogprobs
from services.engine.plan import Sampled, SampleTask

Logits = npt.NDArray[np.float32]  # [vocab_size]

_MASK = (1 << 64) - 1
_SUM_WIDTH = 256  # probabilities are summed in runs of this many, in float64
_RUN_WIDTH = 64  # values whose maximum stands for them while the highest are looked for
_MAX_LOGIT = 1e38  # the difference of two of them is still a float32
# Probabilities, relative to the highest, down to which tokens are candidates for top-p, in turn.
_NUCLEUS_BOUNDS = (2.0**-8, 2.0**-13, 2.0**-18, 0.0)


class BadLogits(Exception):
    """A row is not finite, or has no token that may be drawn."""


def uniform(seed: int, choice: int, index: int) -> float:
    """Return a number in [0, 1) that depends on the three arguments only."""
    state = _mix(seed & _MASK)
    state = _mix(state ^ (choice & _MASK))
    state = _mix(state ^ (index & _MASK))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """One output of the splitmix64 generator at state `value`."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def is_plain_greedy(task: SampleTask, eos_token_ids: tuple[int, ...]) -> bool:
    """Say whether the task is the argmax of the raw logits and nothing else."""
    params = task.params
    return (
        params.is_greedy
        and not params.logprobs
        and not _has_penalties(params)
        and not _suppressed(task, eos_token_ids)
    )


def sample(logits: Logits, task: SampleTask, eos_token_ids: tuple[int, ...]) -> Sampled:
    """Draw one token.

    Log probabilities are those of the model: before penalties, masks and temperature.

    Raises:
        BadLogits: the row cannot be sampled from.
    """
    if not np.isfinite(logits.max()):  # max carries a NaN from anywhere in the row
        raise BadLogits("the model gave logits that are not finite")
    adjusted = _adjust(logits, task, eos_token_ids)
    if adjusted is not logits and adjusted.max() == -np.inf:
        raise BadLogits("no token may be drawn")
    params = task.params
    if params.is_greedy:
        token_id = int(adjusted.argmax())
    else:
        token_id = _draw(adjusted, params, uniform(params.seed, task.choice, task.index))
    logprobs = _logprobs(logits, token_id, params.top_logprobs) if params.logprobs else None
    return Sampled(token_id, logprobs)


# -- penalties and masks ------------------------------------------------------------------------


def _has_penalties(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def _suppressed(task: SampleTask, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that would end the choice before min_tokens."""
    if task.index + 1 >= task.params.min_tokens:
        return ()
    eos = () if task.params.ignore_eos else eos_token_ids
    return (*eos, *task.params.stop_token_ids)


def _adjust(logits: Logits, task: SampleTask, eos_token_ids: tuple[int, ...]) -> Logits:
    suppressed = _suppressed(task, eos_token_ids)
    if not suppressed and not _has_penalties(task.params):
        return logits
    adjusted = logits.copy()
    if _has_penalties(task.params):
        _penalise(adjusted, task)
    if suppressed:
        ids = np.array(suppressed, dtype=np.int64)
        adjusted[ids[(ids >= 0) & (ids < len(adjusted))]] = -np.inf
    return adjusted


def _penalise(logits: Logits, task: SampleTask) -> None:
    """Repetition over prompt and output; presence and frequency over output only."""
    params = task.params
    generated = np.array(task.generated, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((task.prompt.astype(np.int64), generated)))
        values, factor = logits[seen], np.float64(params.repetition_penalty)
        penalised = np.where(values > 0, values / factor, values * factor)
        # Near 0 the factor carries logits out of float32; what is infinite cannot be drawn from.
        logits[seen] = np.clip(penalised, -_MAX_LOGIT, _MAX_LOGIT).astype(np.float32)
    if len(generated) and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(generated, return_counts=True)
        cost = params.presence_penalty + params.frequency_penalty * counts
        logits[ids] -= cost.astype(np.float32)


# -- drawing ------------------------------------------------------------------------------------


def _draw(logits: Logits, params: SamplingParams, u: float) -> int:
    """Invert the distribution function at `u`, over token ids in ascending order."""
    # Dividing first would overflow at tiny temperatures; the maximum is subtracted before.
    with np.errstate(over="ignore"):  # to -inf, whose probability is the right one: 0
        # In one array: a fresh one of this size costs more in page faults than the arithmetic.
        probs = logits - logits.max()
        probs /= np.float32(max(params.temperature, 1e-5))
        np.exp(probs, out=probs)  # relative to the most probable token, which has 1
    ids: npt.NDArray[np.int64] | None = None
    if params.min_p > 0.0:
        probs[probs < params.min_p] = 0.0
    if 0 < params.top_k < len(probs):
        ids = _top(probs, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(probs, ids, params.top_p)
    if ids is None:
        return _invert_all(probs, u)
    ids = np.sort(ids)
    sums = np.cumsum(probs[ids], dtype=np.float64)
    position = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return int(ids[min(position, _last_positive(probs[ids]))])


def _top(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Ids of the `count` highest values, highest first, lowest id first on ties.

    The count-th highest of the maxima of runs bounds the count-th highest value from below, so
    only what reaches it is looked at closely.
    """
    num_runs = len(values) // _RUN_WIDTH
    if count <= num_runs // 2:
        highest = values[: num_runs * _RUN_WIDTH].reshape(num_runs, _RUN_WIDTH).max(axis=1)
    else:
        highest = values
    bound = np.partition(highest, len(highest) - count)[len(highest) - count]
    return _descending(values, np.flatnonzero(values >= bound))[:count]


def _descending(
    values: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Sort `ids` by value, highest first, lowest id first on ties.

    One sort of integers, whose high half falls with the value and whose low half is the id: much
    faster than a stable sort by value.
    """
    bits = (values[ids] + np.float32(0)).view(np.int32)  # the addition makes -0.0 equal to 0.0
    # Floats as integers are in order, but for the negative ones, which run backwards.
    rising = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).astype(np.int64)
    keys = (~rising << 32) | ids
    keys.sort()
    return keys & 0xFFFFFFFF


def _nucleus(
    probs: npt.NDArray[np.float32], ids: npt.NDArray[np.int64] | None, top_p: float
) -> npt.NDArray[np.int64]:
    """The fewest most probable tokens that hold `top_p` of what `ids` (or all tokens) hold.

    Args:
        ids: most probable first.

    Returns:
        Their ids, in no particular order.
    """
    if ids is not None:
        sums = np.cumsum(probs[ids], dtype=np.float64)
        return ids[: _shortest(sums, top_p * float(sums[-1]))]
    wanted = top_p * float(probs.sum(dtype=np.float64))
    for bound in _NUCLEUS_BOUNDS:
        found = np.flatnonzero(probs >= bound)
        values = probs[found]
        if bound and values.sum(dtype=np.float64) < wanted:
            continue
        # All tokens down to some probability are the beginning of the order of all tokens, so
        # the answer does not depend on the bound.
        ordered = np.sort(values)[::-1]
        sums = np.cumsum(ordered, dtype=np.float64)
        if sums[-1] >= wanted:
            break
    length = _shortest(sums, wanted)
    is_above = values > ordered[length - 1]
    ties = found[values == ordered[length - 1]]  # of those the lowest ids
    return np.concatenate((found[is_above], ties[: length - np.count_nonzero(is_above)]))


def _shortest(sums: npt.NDArray[np.float64], wanted: float) -> int:
    """Number of leading terms that reach `wanted`, at least one."""
    return min(int(np.searchsorted(sums, wanted, side="left")) + 1, len(sums))


def _invert_all(probs: npt.NDArray[np.float32], u: float) -> int:
    """Find the token over the whole vocabulary: first its run, then the token in the run."""
    starts = np.arange(0, len(probs), _SUM_WIDTH)
    runs = np.cumsum(np.add.reduceat(probs, starts, dtype=np.float64))
    goal = u * runs[-1]
    run = min(int(np.searchsorted(runs, goal, side="right")), len(runs) - 1)
    if run > 0:
        goal -= runs[run - 1]
    inside = probs[run * _SUM_WIDTH : (run + 1) * _SUM_WIDTH]
    position = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), goal, side="right"))
    return run * _SUM_WIDTH + min(position, _last_positive(inside))


def _last_positive(probs: npt.NDArray[np.float32]) -> int:
    """Index of the last token with a probability: where rounding may carry the search past it."""
    return int(np.flatnonzero(probs)[-1])


# -- log probabilities --------------------------------------------------------------------------


def _logprobs(logits: Logits, token_id: int, num_top: int) -> TokenLogprobs:
    wide = logits.astype(np.float64)
    top = wide.max()
    norm = top + np.log(np.exp(wide - top).sum())
    ids: Sequence[int] = _top(logits, min(num_top, len(logits))).tolist() if num_top else ()
    return TokenLogprobs(
        token_id,
        float(wide[token_id] - norm),
        tuple((other, float(wide[other] - norm)) for other in ids),
    )
