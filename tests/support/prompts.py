"""The fixed prompt set of the same-answers tests: every shape that has broken such systems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_TOKENS = 16  # generated per prompt
Encode = Callable[[str], list[int]]

_PASSAGE = (
    "The harbour wakes before the town. Ropes are checked, nets are folded, and the first boat "
    "leaves while the lamps along the quay are still lit. A clerk writes down its name, the hour "
    "and the number of people aboard, because a boat that is written down is a boat that is "
    "looked for. By noon the wind has turned and the gulls stand on the roofs. Children count "
    "the masts from the school window and argue about which of them is the tallest. When the "
    "boats come back the clerk crosses out one line for each, and the page is closed only when "
    "every line is crossed. "
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A named prompt as token ids."""

    name: str
    token_ids: tuple[int, ...]


def chat(turns: list[tuple[str, str]]) -> str:
    """Lay turns out as ChatML, open for the assistant."""
    body = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return body + "<|im_start|>assistant\n"


def fixed_prompts(encode: Encode) -> list[Prompt]:
    """Build the set with a tokenizer that turns text into ids (special tokens parsed)."""
    passage = encode(_PASSAGE * 8)
    shared = encode(chat([("system", _PASSAGE), ("user", "How many lines are crossed?")]))
    shared_too = encode(chat([("system", _PASSAGE), ("user", "What do the children argue over?")]))
    multi_turn = chat(
        [
            ("user", "Name a colour."),
            ("assistant", "Blue."),
            ("user", "Name another one, and say why you like it."),
        ]
    )
    texts = {
        "short_chat": chat([("user", "What is the capital of France?")]),
        "multi_turn": multi_turn,
        "non_latin": "Здравствуйте! 东京是日本的首都。 القاهرة مدينة كبيرة. ประเทศไทย",
        "emoji": "Party time 🎉🎊👩‍👩‍👧‍👦🏳️‍🌈 and then",
        "digits_and_code": "def add(a, b):\n    return a + b\n\nprint(add(12345, 678",
    }
    prompts = [Prompt(name, tuple(encode(text))) for name, text in texts.items()]
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 160)
    prompts.extend(Prompt(f"len_{length}", tuple(passage[:length])) for length in lengths)
    prompts.append(Prompt("many_chunks", tuple(passage[:901])))
    prompts.append(Prompt("shared_prefix_a", tuple(shared)))
    prompts.append(Prompt("shared_prefix_b", tuple(shared_too)))
    return prompts
