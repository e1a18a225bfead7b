"""What `isthmus status` prints, from answers of a router and of workers."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from services.cli.status import FROZEN, UNREACHABLE, about_worker, tls_hint, worker_table
from services.pb import admin_pb2, worker_pb2

PREFILL = admin_pb2.WorkerView(
    worker_id="prefill-0-0a1b2c", role="prefill", state="live", address="127.0.0.1:40000"
)
DECODE = admin_pb2.WorkerView(
    worker_id="decode-0-0a1b2c", role="decode", state="incompatible",
    address="127.0.0.1:40001", reason="other weights",
)  # fmt: skip
ANSWER = worker_pb2.StatusResponse(
    requests_open=12,
    blocks_in_use=1_234,
    blocks_total=12_345,
    blocks_cached=9_876,
    kernel_path="cpp",
    planes={"decode-1": "zmq", "decode-0": "memfd"},
)


def test_names_and_addresses_are_whole_in_80_columns() -> None:
    out = StringIO()
    cluster = admin_pb2.ClusterStatusResponse(workers=[PREFILL, DECODE])
    table = worker_table(cluster, {"prefill-0-0a1b2c": ANSWER, "decode-0-0a1b2c": FROZEN})
    Console(file=out, width=80).print(table)

    head, prefill, decode = out.getvalue().splitlines()
    assert max(len(head), len(prefill), len(decode)) <= 80
    assert "KV blocks" in head
    assert prefill.split() == [
        "prefill-0-0a1b2c", "prefill", "live", "127.0.0.1:40000", "12", "1234/12345", "9876",
    ]  # fmt: skip
    assert decode.split() == ["decode-0-0a1b2c", "decode", "incompatible", "127.0.0.1:40001"]


def test_line_of_a_worker_has_its_kernels_and_planes_or_that_it_is_silent() -> None:
    assert about_worker(PREFILL, ANSWER) == (
        "prefill-0-0a1b2c: kernels: cpp · planes: decode-0 memfd, decode-1 zmq"
    )
    assert about_worker(DECODE, FROZEN) == (
        "decode-0-0a1b2c: other weights · frozen: does not answer"
    )
    assert about_worker(DECODE, UNREACHABLE) == (
        "decode-0-0a1b2c: other weights · unreachable; being restarted?"
    )


def test_workers_that_do_not_answer_one_without_a_certificate_may_want_one() -> None:
    silent, answers = {"d0": UNREACHABLE}, {"d0": worker_pb2.StatusResponse()}
    assert "tls.cluster_*" in tls_hint(silent, speaks_tls=True, has_certificate=False)
    assert tls_hint(answers, speaks_tls=True, has_certificate=False) == ""
    assert tls_hint(silent, speaks_tls=True, has_certificate=True) == ""
    assert tls_hint(silent, speaks_tls=False, has_certificate=False) == ""
