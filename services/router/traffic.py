"""Which model a name means: aliases, canaries by weight, mirrors. Pure.

A request's share of the traffic is drawn from its own key, so that a conversation keeps its model
and all routers agree. When weights change, only as many keys change their model as must.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.common.config_source import parse_yaml
from services.common.errors import ConfigError, RequestError
from services.router.api import ServedModel

DIGEST = "digest:"  # names a model by the beginning of its weights digest
MIN_DIGEST_CHARS = 8
MAX_TEXT_BYTES = 256 << 10

Name = Annotated[str, Field(min_length=1, max_length=128)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Target(_Strict):
    """A model behind an alias, by name or by digest, and its share of the requests."""

    model: Name
    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)


class MirrorRule(_Strict):
    """Requests of one model that are answered by another one too, for nobody."""

    to: Name
    share: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)


class TrafficTable(_Strict):
    """All rules; an empty table means that names are those of the models."""

    aliases: dict[Name, tuple[Target, ...]] = Field(default={}, max_length=256)
    mirrors: dict[Name, MirrorRule] = Field(default={}, max_length=256)  # by the model's own name

    @model_validator(mode="after")
    def _check(self) -> TrafficTable:
        for alias, targets in self.aliases.items():
            if not 1 <= len(targets) <= 16:
                raise ValueError(f"alias {alias!r} must have 1 to 16 targets")
            if len({target.model for target in targets}) != len(targets):
                raise ValueError(f"alias {alias!r} names a target twice")
        names = [t.model for targets in self.aliases.values() for t in targets]
        for name in (*names, *(rule.to for rule in self.mirrors.values())):
            if name.startswith(DIGEST) and len(name) < len(DIGEST) + MIN_DIGEST_CHARS:
                raise ValueError(f"{name!r} needs {MIN_DIGEST_CHARS} digits of the digest at least")
        return self


# Where the checker speaks of Python to people who write YAML.
_PLAIN = {
    "tuple_type": "must be a list of {model, weight}",
    "dict_type": "must hold names, each with its rule",
    "model_type": "must hold keys and values, as {model, weight} or {to, share}",
    "extra_forbidden": "unknown key",
}


def parse_table(text: str, where: str) -> TrafficTable:
    """Read a table from YAML or JSON; raises ConfigError."""
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise ConfigError(f"{where}: larger than {MAX_TEXT_BYTES} bytes")
    try:
        return TrafficTable.model_validate(parse_yaml(text, where))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        message = _PLAIN.get(first["type"]) or first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {f'{place}: ' if place else ''}{message}") from None


def resolve(
    table: TrafficTable, name: str, key: bytes, served: Sequence[ServedModel]
) -> ServedModel:
    """Return the model a request runs on.

    Args:
        name: what the client asked for; empty = the first model served.
        key: equal keys get equal models.
        served: what this router can run.

    Raises:
        RequestError: model_not_found, listing what is served.
    """
    if not served:
        raise RequestError("no_workers", "no model is served yet", retry_after_ms=1000)
    wanted = name or served[0].name
    targets = [
        (target, found)
        for target in table.aliases.get(wanted, ())
        if (found := _find(target.model, served)) is not None
    ]
    if targets:
        # A target nobody serves leaves its share to the others.
        _, model = max(targets, key=lambda pair: _rank(key, pair[0]))
        return model
    model_named = _find(wanted, served)
    if model_named is None or wanted in table.aliases:
        raise _not_found(name, table, served)
    return model_named


def mirror_of(
    table: TrafficTable, model: str, key: bytes, served: Sequence[ServedModel]
) -> ServedModel | None:
    """Return the model that answers this request for nobody; None where none does."""
    rule = table.mirrors.get(model)
    if rule is None or _uniform(key, "mirror", model) >= rule.share:
        return None
    found = _find(rule.to, served)
    return found if found is not None and found.name != model else None


def names_of(table: TrafficTable, served: Sequence[ServedModel]) -> tuple[str, ...]:
    """Return every name a request may give: those of models, then aliases of them."""
    names = dict.fromkeys(model.name for model in served)
    for alias, targets in table.aliases.items():
        found = any(_find(target.model, served) is not None for target in targets)
        if found:
            names[alias] = None
        else:
            names.pop(alias, None)  # it hides the model of its name
    return tuple(names)


def is_named(name: str, model: str, weights_digest: str) -> bool:
    """Say whether a rule's name stands for a model: its own name, or how its digest begins."""
    if name.startswith(DIGEST):
        return weights_digest.startswith(name.removeprefix(DIGEST))
    return model == name


def _find(name: str, served: Sequence[ServedModel]) -> ServedModel | None:
    return next((m for m in served if is_named(name, m.name, m.weights_digest)), None)


def _rank(key: bytes, target: Target) -> float:
    """Weighted rendezvous: the highest rank wins, each with its share of all keys."""
    return -target.weight / math.log(_uniform(key, "alias", target.model))


def _uniform(key: bytes, purpose: str, name: str) -> float:
    """Draw from (0, 1)."""
    parts = (purpose.encode(), name.encode(), key)
    named = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    drawn = int.from_bytes(hashlib.blake2b(named, digest_size=6).digest(), "little")
    return (drawn + 0.5) / (1 << 48)


def _not_found(name: str, table: TrafficTable, served: Sequence[ServedModel]) -> RequestError:
    names = ", ".join(names_of(table, served))
    return RequestError(
        "model_not_found", f"model {name[:128]!r} is not served; served: {names}", param="model"
    )
