from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.config import IsthmusConfig, load_config
from services.common.config_source import dump_yaml, iter_fields, public_values
from services.common.errors import ConfigError
from services.common.settings import Section, setting
from services.transfer.planes import DEFAULT_PLANES, PLANES_BEST_FIRST

SENTINEL = "s3ntinel-passw0rd"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "isthmus.yaml"
    path.write_text(text)
    return path


def test_defaults_are_complete_and_loopback_only() -> None:
    config = load_config(None, {}, {})
    assert config == IsthmusConfig()
    assert config.router.http_host == config.worker.bind_host == "127.0.0.1"
    assert not config.auth.allow_unauthenticated
    assert not config.transfer.allow_plaintext_kv


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, "router:\n  http_port: 1\n  grpc_port: 2\nworker:\n  threads: 3\n")
    environ = {"ISTHMUS_ROUTER__GRPC_PORT": "20", "ISTHMUS_WORKER__THREADS": "30"}
    config = load_config(path, environ, {"worker.threads": 300, "worker.role": None})
    assert (config.router.http_port, config.router.grpc_port, config.worker.threads) == (1, 20, 300)
    assert config.worker.role == "decode"


@pytest.mark.parametrize("section", list(IsthmusConfig.model_fields))
def test_a_file_may_give_nothing_of_a_section(tmp_path: Path, section: str) -> None:
    """Every default is judged like text of a file, so all of them must pass as such."""
    path = tmp_path / "isthmus.yaml"
    path.write_text(f"{section}: {{}}\n")
    assert load_config(path, {}, {}) == IsthmusConfig()


def test_unknown_key_names_file_and_close_word(tmp_path: Path) -> None:
    path = write(tmp_path, "router:\n  grpc_prot: 7\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {}, {})
    assert str(caught.value) == f'router.grpc_prot: unknown key ({path}); did you mean "grpc_port"?'


def test_unknown_section_in_file_and_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "ruoter: 5\n")
    with pytest.raises(ConfigError, match="unknown section 'ruoter'; did you mean \"router\""):
        load_config(path, {}, {})
    with pytest.raises(ConfigError, match=r"ISTHMUS_WROKER__ROLE.*did you mean \"worker\""):
        load_config(None, {"ISTHMUS_WROKER__ROLE": "decode"}, {})


def test_environment_error_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"^worker\.threads: .*ISTHMUS_WORKER__THREADS\)$"):
        load_config(None, {"ISTHMUS_WORKER__THREADS": "many"}, {})


def test_variables_without_section_are_not_settings() -> None:
    assert load_config(None, {"ISTHMUS_CACHE": "/x", "HOME__X": "y"}, {}) == IsthmusConfig()


def test_lists_come_comma_separated_from_the_environment() -> None:
    config = load_config(None, {"ISTHMUS_TRANSFER__PLANES": "zmq, memfd"}, {})
    assert config.transfer.planes == ("zmq", "memfd")


def aliases(value: str, num: int) -> str:
    """A file whose every line is made of the line before it."""
    return "a0: &a0 {x: y}\n" + "".join(
        f"a{i}: &a{i} {value.format(f'*a{i - 1}')}\n" for i in range(1, num)
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('router:\n  http_port: "80"\n', "router.http_port"),
        ("router:\n  http_port: true\n", "router.http_port"),
        ("worker:\n  role: both\n", "worker.role"),
        ("worker:\n  role: decode\n  role: prefill\n", "line 3: the key 'role' is given twice"),
        ("router: [1, 2]\n", "must hold keys and values"),
        ("- a\n", "must hold sections"),
        ("router: {\n", "not valid YAML"),
        ("x: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("a: &a [*a]\n", "line 1: a value holds itself"),
        ("a: &a {b: *a}\n", "line 1: a value holds itself"),
        (aliases("[{0},{0},{0},{0},{0},{0},{0},{0}]", 9), "line 8: too much"),
        (aliases("{{<<: [{0},{0},{0},{0},{0},{0},{0},{0}]}}", 9), "line 8: too much"),
        (aliases("[{0}]", 99), "nested too deep"),
        ("transfer:\n  planes: []\n", "transfer.planes"),
        ("transfer:\n  verify_digest: never\n", "transfer.verify_digest"),
        ("transfer:\n  zmq_advertise: somewhere\n", "transfer.zmq_advertise"),
    ],
)
def test_wrong_files_are_refused_with_a_place(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), {}, {})
    assert fault in str(caught.value)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "nope.yaml", {}, {})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"router.http_host": "0.0.0.0"}, "without API keys"),
        ({"router.http_host": "0.0.0.0", "auth.keys_file": "k"}, "without TLS"),
        ({"worker.bind_host": "10.0.0.1"}, "unencrypted"),
        ({"worker.bind_host": "10.0.0.1", "transfer.allow_plaintext_kv": True}, "without TLS"),
        (
            {
                "worker.bind_host": "10.0.0.1",
                "transfer.allow_plaintext_kv": True,
                "worker.metrics_port": 9,
            },
            "/metrics on 10.0.0.1 to everyone",
        ),
        (
            {"router.metrics_port": 9, "router.metrics_host": "10.0.0.1"},
            "10.0.0.1 without API keys",
        ),
        ({"lease.heartbeat_ms": 1000}, "3 x lease.heartbeat_ms"),
        ({"limits.default_timeout_ms": 9_000_000}, "max_timeout_ms"),
    ],
)
def test_dangerous_or_contradictory_settings_are_refused(
    overrides: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {}, overrides)


def test_network_address_works_when_said_in_so_many_words() -> None:
    config = load_config(
        None,
        {},
        {
            "router.http_host": "0.0.0.0",
            "auth.allow_unauthenticated": True,
            "auth.allow_plaintext": True,
        },
    )
    assert config.router.http_host == "0.0.0.0"


def test_secrets_are_in_no_repr_error_or_public_view(tmp_path: Path) -> None:
    """RB-118: a password in the store URL reaches no text anybody prints."""
    url = f"redis://:{SENTINEL}@127.0.0.1/0"
    config = load_config(None, {"ISTHMUS_STORE__URL": url}, {})
    assert config.store.url.get_secret_value() == url
    shown = [repr(config), str(config), config.model_dump_json(), str(public_values(config))]
    assert not [text for text in shown if SENTINEL in text]
    path = write(tmp_path, f"store:\n  url: ['{url}']\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {}, {})
    assert SENTINEL not in str(caught.value)
    path = write(tmp_path, f"store:\n  url: '{url}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {}, {})
    assert SENTINEL not in str(caught.value)


def test_new_text_fields_are_redacted_until_marked_public() -> None:
    """RB-119: a field nobody thought about does not leak."""

    class Extra(Section):
        foo_secret: str = setting(SENTINEL, "a new field")
        size: int = setting(7, "a number", unit="bytes")

    class Root(Section):
        extra: Extra = Extra()

    assert public_values(Root()) == {"extra.foo_secret": "[redacted]", "extra.size": 7}


def test_dump_reads_back_to_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(None, {}, {"store.url": f"redis://:{SENTINEL}@h/0", "worker.threads": 2})
    path = write(tmp_path, dump_yaml(config))
    os.chmod(path, 0o600)
    assert load_config(path, {}, {}) == config


def test_every_field_says_what_it_is() -> None:
    docs = list(iter_fields(IsthmusConfig))
    assert len(docs) > 50
    assert [d.key for d in docs if not d.description] == []
    numbers = [d for d in docs if d.type_name in ("integer", "number")]
    ports = ("router.grpc_port", "router.http_port", "worker.grpc_port", "transfer.zmq_port")
    assert {d.key for d in numbers if not d.unit} <= {*ports, "telemetry.sample_ratio"}


@pytest.mark.parametrize("name", ["model.speculative_model", "model.draft", "worker.speculative"])
def test_what_is_not_built_is_refused_at_start(name: str) -> None:
    """RB-035: no draft model whose state a handoff would lose can be asked for."""
    with pytest.raises(ConfigError, match=name.partition(".")[2]):
        load_config(None, {}, {name: "x"})


def test_every_plane_can_be_asked_for_and_the_defaults_are_those_of_the_transfer_layer() -> None:
    """The file that checks configurations is below the one that knows planes."""
    every = load_config(None, {}, {"transfer.planes": PLANES_BEST_FIRST})
    assert every.transfer.planes == PLANES_BEST_FIRST
    assert load_config(None, {}, {}).transfer.planes == DEFAULT_PLANES
    with pytest.raises(ConfigError, match="Input should be"):
        load_config(None, {}, {"transfer.planes": ("fault",)})


def test_a_wrong_list_is_one_fault_and_not_also_too_short() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"ISTHMUS_TRANSFER__PLANES": "carrier,pigeon"}, {})
    [line] = str(caught.value).splitlines()
    assert line.startswith("transfer.planes: Input should be 'attach', 'memfd'")
