"""`isthmus chat`: one answer streamed to the terminal, and where it ran."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits
from services.cli.router_options import DEFAULT_SERVER, ApiKey, CaFile, Server, Tls
from services.common.wording import counted

if TYPE_CHECKING:
    import grpc

    from services.pb import common_pb2, inference_pb2

_HIDDEN_US = 100  # of a handoff; less is not worth a figure


def chat(
    prompt: Annotated[
        str | None, typer.Option(help="Ask once and end; - reads the prompt from stdin.")
    ] = None,
    server: Server = DEFAULT_SERVER,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    model: Annotated[str, typer.Option(help="Model; empty = the one that is served.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 = greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.")] = 300.0,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca_file: CaFile = None,
    show_timing: Annotated[
        bool, typer.Option("--show-timing", help="Print every stage, not the summary only.")
    ] = False,
) -> int:
    """Chat with the served model; without --prompt, line by line until end of input."""
    from services.cli.client import connect

    with connect(server, tls, ca_file) as channel:
        session = _Session(channel, api_key, timeout_s)
        session.shape(model, max_tokens, temperature, seed)
        if system:
            session.add("system", system)
        if prompt is not None:
            text = sys.stdin.read() if prompt == "-" else prompt
            return session.ask(text, show_timing)
        return _interactive(session, show_timing)


def _interactive(session: _Session, show_timing: bool) -> int:
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return exits.OK
        if text.strip():
            session.ask(text, show_timing)  # a failed answer does not end the conversation


class _Session:
    """The messages so far and how to send them."""

    def __init__(self, channel: grpc.Channel, api_key: str, timeout_s: float) -> None:
        from services.cli.client import credentials
        from services.pb import inference_pb2, inference_pb2_grpc

        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._request = inference_pb2.GenerateRequest()
        self._metadata = credentials(api_key)
        self._timeout_s = timeout_s

    def shape(self, model: str, max_tokens: int, temperature: float, seed: int | None) -> None:
        """Say what every answer is to be like."""
        self._request.model = model
        self._request.max_tokens = max_tokens
        self._request.sampling.temperature = temperature
        if seed is not None:
            self._request.sampling.seed = seed

    def add(self, role: str, content: str) -> None:
        """Append a message."""
        self._request.chat.messages.add(role=role, content=content)

    def ask(self, text: str, show_timing: bool) -> int:
        """Send the conversation, print the answer as it comes, then where it ran."""
        import grpc

        from services.cli.client import explain_rpc_error
        from services.common.clock import SystemClock

        self.add("user", text)
        clock = SystemClock()
        started = clock.now()
        parts: list[str] = []
        last: inference_pb2.GenerateFrame | None = None
        try:
            for frame in self._stub.Generate(
                self._request, timeout=self._timeout_s, metadata=self._metadata
            ):
                parts.append(frame.text)
                sys.stdout.write(frame.text)
                sys.stdout.flush()
                last = frame
        except grpc.RpcError as error:
            waited_s = clock.now() - started
            why = explain_rpc_error(error, self._timeout_s, waited_s)
            # What was printed of the answer ends without a newline.
            typer.echo(("\n" if parts else "") + f"isthmus: {why}", err=True)
            del self._request.chat.messages[-1]
            return exits.FAILED
        typer.echo()
        if last is None or last.HasField("error") or not last.HasField("timing"):
            code = last.error.code if last is not None and last.HasField("error") else "no end"
            typer.echo(f"isthmus: the answer was cut off ({code})", err=True)
            del self._request.chat.messages[-1]
            return exits.FAILED
        self.add("assistant", "".join(parts))
        for line in timing_lines(last.timing, last.usage, show_timing):
            typer.echo(line, err=True)
        return exits.OK


def timing_lines(
    timing: common_pb2.Timing, usage: inference_pb2.Usage, show_all: bool
) -> list[str]:
    """Say where a request ran and how long its parts took."""
    lines = [_where(timing), _how_long(timing, usage)]
    if show_all:
        lines += [f"  {name:<16}{value_us / 1e3:10.2f} ms" for name, value_us in _stages(timing)]
    return lines


def _where(timing: common_pb2.Timing) -> str:
    from services.pb import common_pb2

    mode = common_pb2.Mode.Name(timing.mode).removeprefix("MODE_")
    plane = _plane(timing.plane)
    text = f"mode {mode}"
    if timing.prefill_worker:
        text += f" · prefill on {timing.prefill_worker}"
    if timing.decode_worker:
        text += f" · decode on {timing.decode_worker}"
    if timing.handoff_blocks or timing.handoff_bytes or timing.handoff_blocks_attached:
        text += " · handoff " + _crossed(
            timing.handoff_blocks, timing.handoff_bytes, timing.handoff_blocks_attached, plane
        )
        text += (
            f", {timing.handoff_us / 1e3:.1f} ms of it after the first token"
            if timing.handoff_us >= _HIDDEN_US
            else ", hidden under the prefill"
        )
    if timing.migrations:
        text += _migrated(timing)
    if timing.recomputed:
        text += " · KV did not come over: decode computed the prompt again (see its log)"
    return text


def _migrated(timing: common_pb2.Timing) -> str:
    text = (
        " · migrated once" if timing.migrations == 1 else f" · migrated {timing.migrations} times"
    )
    if not timing.migration_blocks and not timing.migration_blocks_attached:
        return text  # it was started over
    crossed = _crossed(
        timing.migration_blocks,
        timing.migration_bytes,
        timing.migration_blocks_attached,
        _plane(timing.migration_plane),
    )
    return f"{text}, {crossed}"


def _crossed(num_moved: int, num_bytes: int, num_attached: int, plane: str) -> str:
    moved = f"{counted(num_moved, 'block')}, {num_bytes / 2**20:.1f} MiB over {plane}"
    if not num_attached:
        return moved
    in_place = f"{counted(num_attached, 'block')} read in place"
    return f"{in_place} and {moved}" if num_moved else in_place


def _plane(plane: common_pb2.Plane.ValueType) -> str:
    from services.pb import common_pb2

    return common_pb2.Plane.Name(plane).removeprefix("PLANE_").lower()


def _how_long(timing: common_pb2.Timing, usage: inference_pb2.Usage) -> str:
    seconds_after_first = (timing.e2e_us - timing.ttft_us) / 1e6
    rate = (usage.completion_tokens - 1) / seconds_after_first if seconds_after_first > 0 else 0.0
    return (
        f"TTFT {timing.ttft_us / 1e3:.0f} ms · {usage.completion_tokens} tokens"
        f" at {rate:.1f} tok/s · prompt {usage.prompt_tokens} tokens"
        f" ({usage.cached_tokens} cached) · total {timing.e2e_us / 1e3:.0f} ms"
    )


def _stages(timing: common_pb2.Timing) -> list[tuple[str, int]]:
    """Stages in order; they add up to the total."""
    return [
        ("router", timing.router_us),
        *([("queue", timing.queue_us)] if timing.queue_us else []),
        ("queue prefill", timing.queue_prefill_us),
        ("prefill", timing.prefill_us),
        ("handoff", timing.handoff_us),
        ("queue decode", timing.queue_decode_us),
        *([("migration", timing.migration_us)] if timing.migrations else []),
        ("decode", timing.decode_us),
        ("unattributed", timing.unattributed_us),
        ("total", timing.e2e_us),
    ]
