"""Chat templates: only the model's own, in a sandbox, with limits on time and size."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.clock import Clock, SystemClock
from services.common.errors import ModelFileError, RequestError

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
_MAX_CONFIG_BYTES = 64 << 20  # tokenizer_config.json of some models repeats every added token
_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_QUOTE = 300  # characters of a template's own message that clients see
_MAX_POWER_BITS = 4096


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat, its content already plain text."""

    role: str
    content: str


class _RefusedByTemplate(TemplateError):
    """The template called raise_exception."""


class _OverLimit(TemplateError):
    """Rendering took too long or made too much."""


class _Budget(threading.local):
    """Deadline and size cap of the rendering that runs on this thread."""

    deadline = float("inf")
    max_chars = 1 << 62


class _Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox that looks at the budget wherever a template can spend time or memory."""

    intercepted_binops = frozenset(["*", "**", "+"])

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self.clock = clock
        self.budget = _Budget()
        self.globals = {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "namespace": self.globals["namespace"],
            "dict": dict,
            "range": self._range,
        }
        self.filters["tojson"] = _to_json

    def check(self) -> None:
        """Raise when the rendering on this thread is out of time."""
        if self.clock.now() > self.budget.deadline:
            raise _OverLimit("rendering took too long")

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in the sandbox, and a place where time is checked."""
        self.check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As in the sandbox, and a place where time is checked."""
        self.check()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse operations whose result would be larger than the budget."""
        self.check()
        if operator == "**" and _power_bits(left, right) > _MAX_POWER_BITS:
            raise _OverLimit("a number grew too large")
        if operator != "**" and _result_length(operator, left, right) > self.budget.max_chars:
            raise _OverLimit("a value grew too large")
        return super().call_binop(context, operator, left, right)

    def _range(self, *args: int) -> Iterator[int]:
        for value in range(*args):
            self.check()
            yield value

    def _strftime_now(self, pattern: str) -> str:
        now = datetime.fromtimestamp(self.clock.unix_ms() / 1000, tz=UTC)
        return now.strftime(str(pattern)[:64])


class ChatTemplate:
    """A compiled template; `digest` pins it. Rendering is pure and safe from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],  # bos_token, eos_token, ...
        *,
        max_chars: int = 8 << 20,
        time_limit_s: float = 2.0,
        clock: Clock | None = None,
    ) -> None:
        self.digest = hashlib.sha256(source.encode()).hexdigest()
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._time_limit_s = time_limit_s
        self._environment = _Sandbox(clock or SystemClock())
        try:
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelFileError(f"the chat template, line {error.lineno}: {error}") from None

    def render(self, turns: Sequence[ChatTurn]) -> str:
        """Write the prompt text for a chat; raise `template_error` quoting the template."""
        budget = self._environment.budget
        budget.deadline = self._environment.clock.now() + self._time_limit_s
        budget.max_chars = self._max_chars
        try:
            return self._render(turns)
        except _RefusedByTemplate as error:
            _refuse(f"the model's chat template refused the messages: {_quote(error)}")
        except _OverLimit as error:
            _refuse(f"the model's chat template was stopped: {error}")
        except TemplateError as error:
            _refuse(f"the model's chat template failed: {_quote(error)}")
        # A template is a program: on messages it was not written for it meets any of these.
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            _refuse(f"the model's chat template failed: {type(error).__name__}")
        except (RecursionError, MemoryError, AssertionError) as error:
            _refuse(f"the model's chat template was stopped: {type(error).__name__}")
        finally:
            budget.deadline = float("inf")

    def _render(self, turns: Sequence[ChatTurn]) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(
            messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens
        ):
            self._environment.check()
            num_chars += len(piece)
            if num_chars > self._max_chars:
                raise _OverLimit(f"it wrote more than {self._max_chars} characters")
            pieces.append(piece)
        return "".join(pieces)


def load_chat_template(model_dir: Path) -> ChatTemplate | None:
    """Read a model's template, or None if it has none (a base model)."""
    config = _read_config(model_dir / TOKENIZER_CONFIG_NAME)
    source = _template_source(model_dir, config)
    if source is None:
        return None
    if len(source.encode()) > _MAX_TEMPLATE_BYTES:
        raise ModelFileError(f"the chat template is larger than {_MAX_TEMPLATE_BYTES} bytes")
    special = {
        name: _token_content(config[name])
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if config.get(name) is not None
    }
    return ChatTemplate(source, special)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelFileError(f"{path.name} is larger than {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelFileError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelFileError(f"{path.name} is not a JSON object")
    return config


def _template_source(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    path = model_dir / TEMPLATE_NAME
    if path.is_file():
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ModelFileError(f"{TEMPLATE_NAME} is larger than {_MAX_TEMPLATE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates; "default" is the one for chats
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_content(token: Any) -> str:  # JSON: a string, or an object with its `content`
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _raise_exception(message: object = "") -> NoReturn:
    raise _RefusedByTemplate(str(message))


def _refuse(message: str) -> NoReturn:
    raise RequestError("template_error", message, param="messages") from None


def _quote(error: TemplateError) -> str:
    message = " ".join((error.message or type(error).__name__).split())
    return message if len(message) <= _MAX_QUOTE else message[:_MAX_QUOTE] + "…"


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    # Models were trained on plain JSON, not on the HTML-safe kind of Jinja's own filter.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _power_bits(base: Any, exponent: Any) -> int:
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * abs(exponent)
    return 0


def _result_length(operator: str, left: Any, right: Any) -> int:
    sizes = [
        len(value) if isinstance(value, str | list | tuple) else None for value in (left, right)
    ]
    if operator == "+":
        return sum(size or 0 for size in sizes)
    if sizes[0] is not None and isinstance(right, int):
        return sizes[0] * right
    if sizes[1] is not None and isinstance(left, int):
        return sizes[1] * left
    return 0
