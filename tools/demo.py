"""`make demo`: a cluster on this machine, one chat through both pools, and where it ran."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import grpc

from services.bench.local_cluster import ClusterFailed, LocalCluster
from services.cli.chat import timing_lines
from services.pb import common_pb2, inference_pb2, inference_pb2_grpc

CALL_TIMEOUT_S = 120.0

SYSTEM = "You are a helpful assistant."
# A few hundred tokens: long enough that the handoff moves a fair number of blocks.
QUESTION = """\
Here is the story of a canal.

For two hundred years, goods that came up the western coast were unloaded on a narrow neck of \
land, carried over the hill by mules, and loaded again on the eastern shore. The mules were slow, \
and in winter the path was closed for weeks. Merchants on both sides kept large warehouses, \
because nobody could say when the next load would arrive. A glassmaker on the eastern shore wrote \
that she had once waited forty days for a crate of sand, and that when it came the crate was dry \
and the sand was gone.

Then the two towns dug a canal. It took nine years and it was not wide: one boat at a time could \
pass, and it had to take its turn at the lock in the middle. But a boat that had a ticket for the \
lock could start at once on the first stretch while the lock was still being filled, so that \
hardly any time was lost. The western town loaded, the eastern town unloaded, and each of them \
became good at one thing. The warehouses grew smaller and the boats grew more. When the western \
town had a storm, the eastern town could for a while load its own boats, and the other way round; \
it was slower, but nothing stopped.

Summarize this story in two sentences."""


NEXT = (
    'next: source .venv/bin/activate && isthmus up, then `isthmus chat --prompt "What is the '
    'capital of France?"` in another terminal'
)


class DemoFailed(Exception):
    """The demo did not show what it is there to show."""


def main(arguments: Sequence[str]) -> int:
    """Start, chat, report, stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="name, directory or .gguf file")
    parser.add_argument("--max-tokens", type=int, default=80)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    print("starting a store, a router, a prefill worker and a decode worker ...", flush=True)
    try:
        with LocalCluster(options.model, prefill=1, decode=1) as cluster:
            print(f"ready after {time.monotonic() - began:.1f} s\n", flush=True)
            last = stream_chat(cluster.grpc, options.max_tokens)
            lines = report(last)
        if cluster.returncode != 0:
            raise DemoFailed(f"the cluster ended with exit status {cluster.returncode}")
    except (ClusterFailed, DemoFailed) as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    print("\n" + "\n".join(lines))
    print(f"stopped; {time.monotonic() - began:.1f} s in all")
    print(NEXT)
    return 0


def stream_chat(address: str, max_tokens: int) -> inference_pb2.GenerateFrame:
    """Send the question, print the answer as it comes, return the last frame."""
    request = inference_pb2.GenerateRequest(max_tokens=max_tokens)
    request.sampling.temperature = 0.0
    request.chat.messages.add(role="system", content=SYSTEM)
    request.chat.messages.add(role="user", content=QUESTION)
    last = inference_pb2.GenerateFrame()
    print(
        f"user> {QUESTION.splitlines()[0]} [...] {QUESTION.splitlines()[-1]}\nassistant> ", end=""
    )
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for last in stub.Generate(request, timeout=CALL_TIMEOUT_S):
            print(last.text, end="", flush=True)
    print(flush=True)
    return last


def report(last: inference_pb2.GenerateFrame) -> list[str]:
    """Lines about where it ran; raises DemoFailed if it did not run through both pools."""
    timing, usage = last.timing, last.usage
    if not usage.completion_tokens:
        raise DemoFailed("no tokens came")
    if timing.mode != common_pb2.MODE_REMOTE:
        raise DemoFailed(f"mode {common_pb2.Mode.Name(timing.mode)} instead of MODE_REMOTE")
    if not timing.handoff_bytes or timing.prefill_worker == timing.decode_worker:
        raise DemoFailed("no KV crossed between two workers")
    return timing_lines(timing, usage, show_all=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
