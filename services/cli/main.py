"""The `isthmus` command. Modules behind a command load when it runs: `--help` stays quick."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import (
    admin,
    audit,
    autoscaler_command,
    bench,
    cert,
    chaos,
    chat,
    config_command,
    doctor,
    down,
    exits,
    explain,
    key,
    loadtest_command,
    model,
    operator_command,
    plan,
    policy,
    profile,
    serve,
    sim,
    status,
    top,
    up,
)

if TYPE_CHECKING:
    from services.runtime.run import Leash

app = typer.Typer(
    name="isthmus",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # tracebacks with local variables would show prompts
)
app.command("up")(up.up)
app.command("down")(down.down)
app.command("router")(serve.router)
app.command("worker")(serve.worker)
app.command("autoscaler")(autoscaler_command.autoscaler)
app.command("operator")(operator_command.operator)
app.command("status")(status.status)
app.command("top")(top.top)
app.command("explain")(explain.explain)
app.command("chat")(chat.chat)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("profile")(profile.profile)
app.command("loadtest", context_settings=loadtest_command.SETTINGS, add_help_option=False)(
    loadtest_command.loadtest
)
app.command("sim")(sim.sim)
app.add_typer(model.app, name="model")
app.add_typer(key.app, name="key")
app.add_typer(cert.app, name="cert")
app.add_typer(audit.app, name="audit")
app.add_typer(audit.usage, name="usage")
app.add_typer(config_command.app, name="config")
app.add_typer(policy.app, name="policy")
app.add_typer(admin.app, name="admin")
app.add_typer(bench.app, name="bench")
app.add_typer(chaos.app, name="chaos")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(_version_line())
        raise typer.Exit(exits.OK)


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Serve language models from separate prefill and decode pools."""


@app.command()
def version(
    short: Annotated[bool, typer.Option("--short", help="Print the number only.")] = False,
) -> None:
    """Print the version."""
    from services.common.version import installed_version

    typer.echo(installed_version() if short else _version_line())


def _version_line() -> str:
    from services.common.version import installed_version

    return f"isthmus {installed_version()} (Python {sys.version.split()[0]})"


def main() -> None:
    """Run the command; faults people can mend end with one line, not a traceback."""
    sys.exit(run())


def run(arguments: list[str] | None = None, leash: Leash | None = None) -> int:
    """Run with the given arguments and return the exit status.

    Args:
        arguments: None = the process's own.
        leash: holds a worker that runs in a process of others, on any thread.
    """
    from services.runtime.process import die_with_parent

    if not die_with_parent(os.environ):
        return exits.FAILED
    try:
        result = app(arguments, standalone_mode=False, obj=leash)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except Exception as error:
        status_code = _explain(error)
        if status_code is None:
            raise
        return status_code
    return result if isinstance(result, int) else exits.OK


def _explain(error: Exception) -> int | None:
    """Print a fault in plain words; None = a fault of ours, which deserves its traceback."""
    shown = _usage_error(error)
    if shown is not None:
        return shown
    from services.bench.result import BenchFailed
    from services.common.errors import ConfigError, ModelFileError, StoreUnavailable

    kinds: tuple[tuple[type[Exception], str, int], ...] = (
        (ConfigError, "configuration", exits.USAGE),
        (ModelFileError, "model", exits.MODEL),
        (StoreUnavailable, "store", exits.STORE),
        (BenchFailed, "nothing measured", exits.FAILED),
    )
    for kind, word, status_code in kinds:
        if isinstance(error, kind):
            typer.echo(f"isthmus: {word}: {error}", err=True)
            return status_code
    return _rpc_error(error)


def _rpc_error(error: Exception) -> int | None:
    """A call that a measurement made and a process of the cluster refused."""
    if "grpc" not in sys.modules:
        return None
    import grpc

    from services.cli.client import explain_rpc_error

    if not isinstance(error, grpc.RpcError):
        return None
    why = explain_rpc_error(error, timeout_s=math.inf, waited_s=0.0)
    typer.echo(f"isthmus: the cluster refused: {why}", err=True)
    return exits.FAILED


def _usage_error(error: Exception) -> int | None:
    """Typer's own faults: wrong flags, aborts."""
    show = getattr(error, "show", None)
    code = getattr(error, "exit_code", None)
    if isinstance(error, typer.Abort):
        return exits.INTERRUPTED
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if callable(show) and isinstance(code, int):
        show()
        return code
    return None


if __name__ == "__main__":
    main()
