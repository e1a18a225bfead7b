"""Chat templates: pinned, sandboxed, bounded, and their refusals quoted."""

from __future__ import annotations

import pytest

from services.common.clock import ManualClock
from services.common.errors import ModelFileError, RequestError
from services.text.template import ChatTemplate, ChatTurn

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be first') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = ChatTurn("user", "Hi")


def render(source: str, *turns: ChatTurn, max_chars: int = 10_000) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, max_chars=max_chars).render(turns or (USER,))


def refusal(source: str, *turns: ChatTurn, max_chars: int = 10_000) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(source, *turns, max_chars=max_chars)
    assert caught.value.spec.code == "template_error"
    assert caught.value.param == "messages"
    return caught.value


def test_renders_turns_and_the_generation_prompt() -> None:
    assert render(CHATML, USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_are_known_by_name() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>Hi"


def test_content_is_data_and_not_a_template() -> None:
    """RB-123: what a client sends is never evaluated."""
    assert render("{{ messages[0].content }}", ChatTurn("user", "{{ 7 * 7 }}")) == "{{ 7 * 7 }}"


def test_refusal_of_the_template_is_quoted() -> None:
    """RB-077: role order."""
    error = refusal(CHATML, USER, ChatTurn("system", "late"))
    assert "System message must be first" in error.message


def test_program_errors_are_not_quoted() -> None:
    error = refusal("{{ messages[0].content + 1 }}", ChatTurn("user", "secret text"))
    assert "secret" not in error.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_sandbox_refuses_escapes_and_writes(source: str) -> None:
    refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "{% for i in range(10**9) %}xxxxxxxxxx{% endfor %}",
    ],
)
def test_size_is_bounded(source: str) -> None:
    """RB-123: a template that would fill memory is stopped."""
    refusal(source)


def test_time_is_bounded_without_any_output() -> None:
    """RB-123: nested loops that write nothing end at the time limit."""

    class TickingClock(ManualClock):
        def now(self) -> float:
            self.advance(0.001)
            return super().now()

    loop = "{% for a in range(10**6) %}{% for b in range(10**6) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(loop, {}, clock=TickingClock())
    with pytest.raises(RequestError, match="too long"):
        template.render([USER])


def test_broken_template_is_refused_when_the_model_is_loaded() -> None:
    with pytest.raises(ModelFileError, match="line 1"):
        ChatTemplate("{% for %}", {})


def test_digest_pins_the_source() -> None:
    assert ChatTemplate("a", {}).digest != ChatTemplate("b", {}).digest
