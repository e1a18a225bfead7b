"""Whatever is drawn of the chart's values renders to what holds together, or is refused."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kubernetes_validate
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.helm.rendering import Manifest, Refused, Rendered, render
from tests.helm.test_cluster_rules import FOREIGN
from tests.helm.test_review_list import POLICY
from tests.helm.test_settings import loaded, processes

POOL = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(0, 20),
        "scaledExternally": st.booleans(),
        "kvMemory": st.sampled_from(("", "512Mi", "24Gi")),
        "accelerator": st.fixed_dictionaries(
            {"type": st.sampled_from(("none", "nvidia", "amd"))},
            optional={"count": st.integers(1, 8)},
        ),
        "dra": st.fixed_dictionaries({"enabled": st.booleans()}),
        "preStopSeconds": st.integers(0, 30),
        "drainSeconds": st.integers(0, 600),
        "nodeSelector": st.dictionaries(st.sampled_from(("a", "b/c")), st.just("x"), max_size=2),
        "serviceAccount": st.fixed_dictionaries({"create": st.booleans()}),
    },
)
VALUES = st.fixed_dictionaries(
    {"auth": st.fixed_dictionaries({"allowUnauthenticated": st.booleans()})},
    optional={
        "nameOverride": st.sampled_from(("", "chat", "n" * 40)),
        "commonLabels": st.just({"team": "a"}),
        "router": st.fixed_dictionaries(
            {},
            optional={
                "replicas": st.integers(0, 20),
                "processes": st.integers(1, 8),
                "bindHost": st.sampled_from(("", "0.0.0.0", "::")),
                "hpa": st.fixed_dictionaries({"enabled": st.booleans()}),
            },
        ),
        "pools": st.fixed_dictionaries(
            {}, optional={"kind": st.sampled_from(("Deployment", "LeaderWorkerSet")),
                          "prefill": POOL, "decode": POOL}
        ),
        "model": st.fixed_dictionaries(
            {"volume": st.fixed_dictionaries(
                {
                    "type": st.sampled_from(("none", "emptyDir", "existingClaim", "pvc", "image")),
                    "existingClaim": st.just("c"),
                    "imageReference": st.just("r/m:1"),
                },

            )}
        ),
        "transfer": st.fixed_dictionaries(
            {"rdma": st.fixed_dictionaries({"enabled": st.booleans()})}
        ),
        "autoscaler": st.fixed_dictionaries(
            {"enabled": st.booleans()}, optional={"policy": st.just(POLICY)}
        ),
        "operator": st.fixed_dictionaries({"enabled": st.booleans()}),
        "monitoring": st.fixed_dictionaries({"enabled": st.booleans()}),
        "otel": st.just({"endpoint": "http://collector:4317"}),
    },
)  # fmt: skip


def check(rendered: Rendered) -> None:
    """Names, schemas, references to one another, settings and grace."""
    ids = [(each["kind"], each["metadata"]["name"]) for each in rendered.manifests]
    assert len(ids) == len(set(ids))
    for each in rendered.manifests:
        assert len(each["metadata"]["name"]) <= 63
        if not each["apiVersion"].split("/")[0].endswith(FOREIGN):
            kubernetes_validate.validate(each, "1.35", strict=True)
    made: set[Any] = set(ids)
    for pod in rendered.pods:
        for volume in pod.spec.get("volumes", ()):
            name = volume.get("configMap", {}).get("name")
            assert name is None or ("ConfigMap", name) in made
        mounted = {each["name"] for c in pod.containers for each in c.get("volumeMounts", ())}
        assert mounted == {each["name"] for each in pod.spec.get("volumes", ())}
    with TemporaryDirectory() as folder:
        for pod, container in processes(rendered):
            config = loaded(rendered, pod, container, Path(folder))
            is_worker = pod.component in ("prefill", "decode")
            drain_s = config.worker.drain_s if is_worker else config.router.drain_s
            if is_worker or pod.component == "router":
                wait = container.get("lifecycle", {"preStop": {"exec": {"command": ["", "0"]}}})
                before = float(wait["preStop"]["exec"]["command"][1])
                assert pod.spec["terminationGracePeriodSeconds"] > before + drain_s + 5


def rendered_or_why(values: Manifest) -> Rendered | str:
    """Render them, or tell why not."""
    try:
        return render((), values)
    except Refused as refused:
        return str(refused)


@examples(max_examples=10, derandomize=True)
@given(VALUES)
def test_drawn_values_render_to_what_holds_together_or_are_refused(values: Manifest) -> None:
    """RB-110: with any of them, no pod has less time than its wait, its drain and 5 seconds."""
    found = rendered_or_why(values)
    if isinstance(found, Rendered):
        check(found)
    else:  # in our own words: no fault of a template
        assert re.search(r"execution error at .* (pools|autoscaler)[.a-zA-Z]*:? ", found), found
