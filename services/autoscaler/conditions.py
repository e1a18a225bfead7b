"""What is claimed of the autoscaler after a tick, by the HPA's names where it has one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.autoscaler.backoff import is_waiting
from services.autoscaler.decision import Condition, PoolDecision
from services.autoscaler.policy import Mode, PolicySpec, PredictiveMode
from services.autoscaler.sizing import Sizing

_BY_STEP = {"ScalingLimited": ("bounds", "rate"), "BudgetLimited": ("budget",)}


def conditions_of(
    spec: PolicySpec,
    sizings: Sequence[Sizing],
    decisions: Sequence[PoolDecision],
    ratio_violation: str | None,
    now: float,
) -> tuple[Condition, ...]:
    """Return every condition, true or not, each with its reason."""
    return (
        _able(spec, sizings, now),
        _active(sizings),
        *(_limited(name, steps, sizings) for name, steps in _BY_STEP.items()),
        Condition("RatioLimited", ratio_violation is not None, ratio_violation or "kept"),
        _predicting(spec, sizings),
        _claim("Draining", [d.pool for d in decisions if d.drain] + [
            s.pool.name for s in sizings if s.staff.draining
        ]),
        _claim("Stale", [s.pool.name for s in sizings if not s.may_shrink]),
    )  # fmt: skip


def _able(spec: PolicySpec, sizings: Sequence[Sizing], now: float) -> Condition:
    if spec.mode is not Mode.AUTO:
        return Condition("AbleToScale", False, f"mode {spec.mode.value}")
    failing = [s for s in sizings if is_waiting(s, now)]
    if failing:
        told = (f"{s.pool.name}: {s.state.failures} starts in a row failed" for s in failing)
        return Condition("AbleToScale", False, "; ".join(told))
    waits = _of_step(sizings, ("stabilization", "panic"))
    return Condition("AbleToScale", True, f"stabilized: {waits}" if waits else "ready to scale")


def _active(sizings: Sequence[Sizing]) -> Condition:
    if all(s.desired == 0 for s in sizings):
        return Condition("ScalingActive", False, "no pool has a replica")
    blind = [s.pool.name for s in sizings if all(p.value is None for p in s.proposals)]
    return Condition(
        "ScalingActive", not blind, f"no figure of {', '.join(blind)}" if blind else "has figures"
    )


def _limited(name: str, steps: tuple[str, ...], sizings: Sequence[Sizing]) -> Condition:
    found = _of_step(sizings, steps)
    return Condition(name, bool(found), found or "within limits")


def _predicting(spec: PolicySpec, sizings: Sequence[Sizing]) -> Condition:
    if spec.predictive.mode is PredictiveMode.OFF:
        return Condition("Predicting", False, "mode Off")
    unknown = [s.pool.name for s in sizings if s.forecast is None]
    reason = f"not known yet for {', '.join(unknown)}" if unknown else "every pool has a forecast"
    return Condition("Predicting", not unknown, reason)


def _of_step(sizings: Sequence[Sizing], steps: tuple[str, ...]) -> str:
    return "; ".join(
        f"{s.pool.name}: {c.reason}" for s in sizings for c in s.clamps if c.step in steps
    )


def _claim(name: str, pools: Sequence[str]) -> Condition:
    return Condition(name, bool(pools), ", ".join(dict.fromkeys(pools)) or "no pool")
