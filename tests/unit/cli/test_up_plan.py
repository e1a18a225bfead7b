from __future__ import annotations

from pathlib import Path

from services.cli.up_plan import Counts, FrontDoors, fixed_ports, plan_processes

DOORS = FrontDoors("127.0.0.1", 50051, "127.0.0.1", 8000)


def plan(counts: Counts, doors: FrontDoors = DOORS, tag: str = "") -> list[str]:
    made = plan_processes(counts, doors, threads=2, runtime_dir=Path("/run/x"), tag=tag)
    return [process.name for process in made]


def test_every_process_is_named_by_role_and_number() -> None:
    assert plan(Counts(routers=2, prefill=1, decode=2)) == [
        "prefill-0", "decode-0", "decode-1", "router-0", "router-1",
    ]  # fmt: skip


def test_shared_store_gets_names_that_cannot_meet_those_of_other_machines() -> None:
    assert plan(Counts(1, 1, 0), tag="-ab12") == ["prefill-0-ab12", "router-0-ab12"]


def test_further_routers_take_the_next_ports_and_0_stays_0() -> None:
    made = plan_processes(Counts(2, 0, 1), DOORS, threads=1, runtime_dir=Path("/run/x"), tag="")
    assert [(p.grpc_port, p.http_port) for p in made] == [(0, 0), (50051, 8000), (50052, 8001)]
    assert fixed_ports(made) == (
        ("127.0.0.1", 50051, "--grpc-port"),
        ("127.0.0.1", 8000, "--http-port"),
        ("127.0.0.1", 50052, "--grpc-port"),
        ("127.0.0.1", 8001, "--http-port"),
    )
    free = FrontDoors("127.0.0.1", 0, "127.0.0.1", 0)
    made = plan_processes(Counts(2, 0, 1), free, threads=1, runtime_dir=Path("/r"), tag="")
    assert fixed_ports(made) == ()


def test_metrics_ports_of_the_workers_of_one_cluster_do_not_meet() -> None:
    def ports(metrics_port: int | None) -> list[tuple[str, int]]:
        made = plan_processes(
            Counts(1, 1, 2),
            DOORS,
            threads=1,
            runtime_dir=Path("/r"),
            tag="",
            metrics_port=metrics_port,
        )
        assert made[-1].http_port == DOORS.http_port
        return [(process.http_host, process.http_port) for process in made[:-1]]

    assert ports(9100) == [("127.0.0.1", 9100), ("127.0.0.1", 9101), ("127.0.0.1", 9102)]
    assert ports(0) == [("127.0.0.1", 0)] * 3
    assert ports(None) == [("", 0)] * 3


def test_taken_metrics_port_is_known_by_its_setting() -> None:
    made = plan_processes(
        Counts(0, 1, 0), DOORS, threads=1, runtime_dir=Path("/r"), tag="", metrics_port=9100
    )
    assert fixed_ports(made) == (("127.0.0.1", 9100, "worker.metrics_port"),)
    assert made[0].command("py", Path("/c"), 1, 9100)[-2:] == ["--metrics-port", "9100"]


def test_command_line_of_a_worker_and_a_router() -> None:
    worker, router = plan_processes(
        Counts(1, 1, 0), DOORS, threads=3, runtime_dir=Path("/run/x"), tag=""
    )
    assert worker.command("py", Path("/run/x/c.yaml"), 4444, 0) == [
        *("py", "-P", "-m", "services.cli.main", "worker", "--config", "/run/x/c.yaml"),
        *("--role", "prefill", "--worker-id", "prefill-0", "--threads", "3"),
        *("--bind-host", "127.0.0.1", "--runtime-dir", "/run/x/prefill-0"),
        *("--grpc-port", "4444"),
    ]
    assert router.command("py", Path("/c"), 1, 2)[-4:] == ["--grpc-port", "1", "--http-port", "2"]


def test_only_decode_workers_get_the_dtype_of_decode() -> None:
    made = plan_processes(
        Counts(1, 2, 2),
        DOORS,
        threads=1,
        runtime_dir=Path("/r"),
        tag="",
        decode_dtype="bfloat16",
    )
    with_dtype = {plan.name for plan in made if "--dtype" in plan.arguments}
    assert with_dtype == {"decode-0", "decode-1"}
    assert made[2].arguments[-2:] == ("--dtype", "bfloat16")
