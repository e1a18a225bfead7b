"""What every command does first: find the configuration file, lay flags over it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.progress import Progress

if TYPE_CHECKING:
    from services.common.config import IsthmusConfig

DEFAULT_FILE = Path("isthmus.yaml")


def find_config(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: the flag, $ISTHMUS_CONFIG, ./isthmus.yaml, or none."""
    from services.common.config_source import CONFIG_VARIABLE

    if path is not None:
        return path
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE])
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def load(path: Path | None, overrides: Mapping[str, object]) -> IsthmusConfig:
    """Load the configuration for a command; raises ConfigError."""
    from services.common.config import load_config

    return load_config(find_config(path, os.environ), os.environ, overrides)


def load_serving(path: Path | None, overrides: Mapping[str, object]) -> IsthmusConfig:
    """Load it for a process that serves a model; an empty name becomes the default model's."""
    config = load(path, overrides)
    if config.model.name:
        return config
    from services.models.catalog import DEFAULT_MODEL

    model = config.model.model_copy(update={"name": DEFAULT_MODEL})
    return config.model_copy(update={"model": model})


def check_files(config: IsthmusConfig) -> None:
    """Look at the files settings name; raises ConfigError."""
    from services.common.clock import SystemClock
    from services.gateway.access_setup import check_access_files
    from services.gateway.traffic_control import TrafficControl
    from services.runtime.tls import cluster_identity, door_identity
    from services.transfer.key_ring import check_key_file

    check_access_files(config.auth)
    for read in (door_identity, cluster_identity):
        read(config.tls, SystemClock())
    if config.router.traffic_file:
        TrafficControl(Path(config.router.traffic_file), SystemClock())
    if config.transfer.curve_key_file:
        check_key_file(Path(config.transfer.curve_key_file))


def resolve_model(config: IsthmusConfig) -> Path:
    """Turn the configured model into a directory processes can load, telling what happens."""
    from services.models.catalog import resolve

    cache_dir = Path(config.model.cache_dir) if config.model.cache_dir else None
    return resolve(config.model.name, cache_dir, progress=Progress())
