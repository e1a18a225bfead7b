"""Write tests/golden/smollm2_greedy.json: what one worker process answers to the fixed prompts.

Run `python -m tools.make_golden` in the checkout when the default model's weights change, never
to make a failing test pass.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from services.bench.local_cluster import LocalCluster as Cluster
from services.models.catalog import resolve
from services.text.tokenizer import TextModel
from tests.support.generate import generate, request
from tests.support.prompts import MAX_TOKENS, fixed_prompts

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "golden" / "smollm2_greedy.json"


def main() -> int:
    """Ask a cluster of one worker, one prompt at a time."""
    model_dir = resolve("smollm2")
    text = TextModel.load(model_dir)
    prompts = fixed_prompts(lambda s: [int(t) for t in text.encode(s, add_special=False)])
    with Cluster(model_dir, prefill=0, decode=1) as cluster:
        answers = {
            p.name: generate(cluster.grpc, request(p.token_ids, max_tokens=MAX_TOKENS)).token_ids[0]
            for p in prompts
        }
    golden = {"weights_digest": text.manifest.weights_digest, "answers": answers}
    TARGET.write_text(json.dumps(golden) + "\n")
    print(f"{len(answers)} answers written to {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
