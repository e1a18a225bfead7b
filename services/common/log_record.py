"""How an event's fields ride on a standard log record, for packages below or beside telemetry."""

from __future__ import annotations

import logging
from collections.abc import Mapping

FIELDS_ATTRIBUTE = "isthmus_fields"


def write_event(
    logger: logging.Logger,
    level: int,
    event: str,
    fields: Mapping[str, object],
    *,
    error: BaseException | bool = False,
) -> None:
    """Write one event; services.telemetry.logs renders and redacts it.

    `error` is an exception to add, or True for the one being handled.
    """
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={FIELDS_ATTRIBUTE: fields}, exc_info=error)
