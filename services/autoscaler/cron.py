"""When the five cron fields of a schedule say that it begins, in a time zone. Pure.

As cron of Debian has it: a start that falls into an hour which is skipped comes right after it, and
one in an hour that comes twice is the first of both.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from services.common.config_source import did_you_mean

_NUM_FIELDS = 5
_ANY_DAY = datetime(2000, 1, 1, tzinfo=UTC)


def checked_cron(text: str) -> str:
    """Return it; ValueError where a text is not five cron fields, or never comes true."""
    fields = text.split()
    if len(fields) != _NUM_FIELDS:
        raise ValueError(
            f"{len(fields)} fields, not five: minute, hour, day of the month, month, weekday"
        )
    try:
        next(CronSim(text, _ANY_DAY))
    except CronSimError as error:
        raise ValueError(f"not five cron fields: {str(error).lower()}") from None
    except StopIteration:
        raise ValueError("no day of the calendar fits it") from None
    return text


def checked_zone(name: str) -> str:
    """Return it; ValueError where the time zone is not known here."""
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        zones = sorted(available_timezones())
        hint = did_you_mean(name, zones) if zones else "; none is installed"
        raise ValueError(f"no such time zone{hint if len(hint) < 100 else ''}") from None
    return name


def first_start(cron: str, zone: str, after: datetime) -> datetime:
    """Return the first start later than a moment; text and zone are checked ones."""
    local = after.astimezone(ZoneInfo(zone))
    # One more second back: a moment may be the very start of a minute and its fraction is lost.
    for start in CronSim(cron, local - timedelta(seconds=1)):
        # Where clocks are set back the same hour is walked through twice.
        if start > after:
            return start.astimezone(UTC)
    raise ValueError(f"{cron!r} never starts")
