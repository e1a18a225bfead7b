"""How a configuration section is written: strict, frozen, every field with unit and description."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class Section(BaseModel):
    """Base of every configuration section: unknown keys are errors, values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True
    )


# Any: pydantic's Field is typed as its default's type, which a wrapper cannot know.
def setting(
    default: Any, description: str, *, unit: str = "", public: bool = False, **bounds: Any
) -> Any:
    """Declare one field. `public` text may be shown to an operator; other text is redacted."""
    extra: dict[str, JsonValue] = {"unit": unit, "public": public}
    return Field(default, description=description, json_schema_extra=extra, **bounds)
