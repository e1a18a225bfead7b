"""Names of models: aliases, canaries by weight, mirrors, and what is told of an unknown one."""

from __future__ import annotations

import pytest

from services.common.errors import ConfigError, RequestError
from services.router.api import ServedModel
from services.router.traffic import TrafficTable, mirror_of, names_of, parse_table, resolve


def served(*names: str) -> tuple[ServedModel, ...]:
    """Models whose digests begin with their names."""
    return tuple(ServedModel(n, 100, 10, n.encode().hex().ljust(64, "0"), (0,), 0) for n in names)


MODELS = served("old", "new")
KEYS = [f"key {i}".encode() for i in range(4000)]


def canary(new_weight: float) -> TrafficTable:
    """Give the new model a share of what asks for `chat`."""
    old = f"{{model: old, weight: {100 - new_weight}}}"
    return parse_table(f"aliases: {{chat: [{old}, {{model: new, weight: {new_weight}}}]}}", "test")


def chosen(table: TrafficTable, key: bytes) -> str:
    return resolve(table, "chat", key, MODELS).name


@pytest.mark.parametrize("percent", [5, 50, 95])
def test_canary_gets_its_share_and_keeps_its_keys(percent: int) -> None:
    """4,000 keys: three standard deviations of the share are 2.4 points at most."""
    table = canary(percent)
    new = {key for key in KEYS if chosen(table, key) == "new"}
    assert abs(len(new) / len(KEYS) * 100 - percent) < 2.4
    assert {key for key in KEYS if chosen(table, key) == "new"} == new


def test_larger_canary_takes_keys_and_gives_none_back() -> None:
    few, many = canary(10), canary(30)
    before = {key for key in KEYS if chosen(few, key) == "new"}
    assert before < {key for key in KEYS if chosen(many, key) == "new"}


def test_models_are_found_by_name_by_digest_or_as_the_first() -> None:
    by_digest = parse_table(f"aliases: {{x: [{{model: 'digest:{b'new'.hex()}000000'}}]}}", "test")
    assert resolve(by_digest, "x", b"", MODELS).name == "new"
    assert resolve(TrafficTable(), "new", b"", MODELS).name == "new"
    assert resolve(TrafficTable(), "", b"", MODELS).name == "old"


def test_alias_may_have_the_name_of_a_model_also_of_the_default_one() -> None:
    table = parse_table("aliases: {old: [{model: new}]}", "test")
    assert resolve(table, "old", b"", MODELS).name == "new"
    assert resolve(table, "", b"", MODELS).name == "new"


def test_share_of_a_target_nobody_serves_goes_to_the_others() -> None:
    table = parse_table("aliases: {chat: [{model: gone, weight: 99}, {model: old}]}", "test")
    assert {resolve(table, "chat", key, MODELS).name for key in KEYS[:50]} == {"old"}


def test_unknown_name_is_refused_with_all_that_are_known() -> None:
    table = parse_table("aliases: {chat: [{model: new}], lost: [{model: gone}]}", "test")
    assert names_of(table, MODELS) == ("old", "new", "chat")
    for name in ("other", "lost"):
        with pytest.raises(RequestError) as caught:
            resolve(table, name, b"", MODELS)
        assert caught.value.spec.code == "model_not_found"
        assert caught.value.message == f"model {name!r} is not served; served: old, new, chat"


def test_mirror_takes_its_share_of_one_model_and_never_of_itself() -> None:
    table = parse_table("mirrors: {old: {to: new, share: 0.25}, new: {to: new}}", "test")
    copied = [key for key in KEYS if mirror_of(table, "old", key, MODELS) is not None]
    assert abs(len(copied) / len(KEYS) - 0.25) < 0.024
    assert mirror_of(table, "new", b"", MODELS) is None
    assert mirror_of(table, "old", copied[0], served("old")) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("alias: {}", "alias"),
        ("aliases: {a: []}", "1 to 16 targets"),
        ("aliases: {a: [{model: m, weight: 0}]}", "greater than 0"),
        ("aliases: {a: [{model: m, weight: .inf}]}", "finite"),
        ("aliases: {a: [{model: m}, {model: m}]}", "twice"),
        ("aliases: {a: [{model: 'digest:ab'}]}", "digits of the digest"),
        ("aliases: {a: [{model: m, share: 1}]}", "share"),
        ("mirrors: {a: {to: b, share: 1.5}}", "less than or equal to 1"),
        ("aliases: {a: [{model: m}], a: [{model: n}]}", "given twice"),
        ("- a", "must hold sections"),
        ("{", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("[" * 20_000, "nested deeper"),
        ("- " * 20_000, "nested too deep"),
        ("a: 2020-99-99", "a value is not of its type"),
        ("? [a]\n: b", "a value is not of its type"),
        ("a: !!timestamp x", "a value is not of its type"),
        ("a: " + "9" * 5000, "a value is not of its type"),
    ],
)
def test_wrong_table_is_refused_with_the_place(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_table(text, "rules")
    assert str(caught.value).startswith("rules: ")
    assert why in str(caught.value)
