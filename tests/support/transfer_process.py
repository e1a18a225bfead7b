"""One transfer end as a process of its own, driven by lines of JSON; for kill tests."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.ids import BlockId
from services.transfer.api import Offer
from tests.support.groups import Gate, GatedDevice
from tests.support.transfer_ends import (
    BRISK,
    CALM,
    DecodeEnd,
    PrefillEnd,
    hashes,
    make_decode,
    make_prefill,
    outcome,
    wait_until,
    with_planes,
)


class EndProcess:
    """The parent's handle."""

    def __init__(
        self,
        role: str,
        times: str,
        plane: str,
        runtime_dir: Path,
        curve_key_file: Path | None = None,
        free_sends: int | None = None,
    ) -> None:
        """Start it; with `free_sends` its groups hold back every send after so many."""
        root = Path(__file__).parents[2]
        arguments = [role, times, plane, str(runtime_dir), str(curve_key_file or "")]
        arguments += [] if free_sends is None else [str(free_sends)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.transfer_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=root,
            text=True,
        )
        self.pid = self._process.pid
        assert self.read()["ready"]

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.tell(command, **arguments)
        return self.read()

    def tell(self, command: str, **arguments: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def wait_for(self, counter: str, at_least: int, timeout_s: float = 15.0) -> None:
        """Wait until a counter of the process's end has come that far."""
        wait_until(lambda: self.ask("counters")[counter] >= at_least, timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it if it lives, and reap it."""
        self._process.kill()
        self._process.wait(5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def content_hashes(end: PrefillEnd | DecodeEnd, blocks: Sequence[BlockId | None]) -> list[str]:
    """Return the SHA-256 of whole blocks."""
    return [
        hashlib.sha256(end.memory.blocks[block].tobytes()).hexdigest()
        for block in blocks
        if block is not None
    ]


def _prefill(end: PrefillEnd, ask: dict[str, Any]) -> dict[str, Any]:
    key = ask["key"]
    if ask["command"] == "offer":
        ticket, _ = end.offer(key, ask["num_tokens"])
        return {"ticket": ticket.hex()}
    if ask["command"] == "seal":
        return {"hashes": content_hashes(end, end.seal(key, ask["lo"], ask["count"]))}
    if ask["command"] == "finish":
        end.finish(key, ask["num_tokens"])
        return {}
    if ask["command"] == "free":
        end.free += end.lent.pop(key)
        return {}
    return {"outcome": outcome(end.events.wait(key))}


def _decode(end: DecodeEnd, ask: dict[str, Any]) -> dict[str, Any]:
    key, num_tokens = ask["key"], ask.get("num_tokens", 0)
    offer = Offer(key, "", num_tokens, hashes(num_tokens // 16), "")
    if ask["command"] == "open":
        end.open(key, bytes.fromhex(ask["ticket"]), offer)
        return {}
    if ask["command"] == "reserve":
        return {"blocks": end.reserve(key, offer)}
    if ask["command"] == "free":
        end.free += ask["blocks"]
        return {}
    event = end.events.wait(key)
    return {"outcome": outcome(event), "hashes": content_hashes(end, ask["blocks"])}


def _answer(end: PrefillEnd | DecodeEnd, ask: dict[str, Any]) -> dict[str, Any]:
    if ask["command"] == "counters":
        ends = end.source if isinstance(end, PrefillEnd) else end.sink
        return dataclasses.asdict(ends.counters)
    return _prefill(end, ask) if isinstance(end, PrefillEnd) else _decode(end, ask)


def main() -> None:
    """Serve commands until the input ends."""
    role, times, plane, runtime_dir, curve_key_file, *free_sends = sys.argv[1:]
    gate = Gate(passes_free=int(free_sends[0])) if free_sends else None
    device = GatedDevice(gate) if gate is not None else None
    config = with_planes({"calm": CALM, "brisk": BRISK}[times], *plane.split(","))
    config = dataclasses.replace(config, curve_key_file=curve_key_file or None)
    end: PrefillEnd | DecodeEnd
    if role == "prefill":
        end = make_prefill(Path(runtime_dir), config, device=device)
    else:
        end = make_decode(config)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if gate is not None and ask["command"] == "sends":
            answer: dict[str, Any] = {"sends": gate.num_sends}
        else:
            answer = _answer(end, ask)
        print(json.dumps(answer), flush=True)
    end.stop()


if __name__ == "__main__":
    main()
