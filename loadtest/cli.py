"""The commands of `python -m loadtest`. Modules behind a command load when it runs."""

from __future__ import annotations

import os
import sys

import typer

from loadtest import (
    calibrate_command,
    compare_command,
    exits,
    interference_command,
    report_command,
    run_command,
    search_command,
)

app = typer.Typer(
    name="loadtest",
    help="Send a load to a cluster, or to any OpenAI-compatible server, and judge what it does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run_command.run)
app.command("replay")(run_command.replay)
app.command("scenarios")(run_command.scenarios)
app.command("search")(search_command.search)
app.command("compare")(compare_command.compare)
app.command("interference")(interference_command.interference)
app.command("calibrate")(calibrate_command.calibrate)
app.command("report")(report_command.report)


def main() -> None:
    """Run the command; faults people can mend end with one line, not a traceback."""
    # gRPC's core logs every failed handshake, before the one line that says what is wrong.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(run())


def run(arguments: list[str] | None = None) -> int:
    """Run with the given arguments and return the exit status."""
    from loadtest.target import TargetUnusable
    from services.common.errors import ConfigError

    try:
        result = app(arguments, standalone_mode=False)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except ConfigError as error:
        typer.echo(f"loadtest: {error}", err=True)
        return exits.USAGE
    except TargetUnusable as error:
        typer.echo(f"loadtest: {error}", err=True)
        return exits.UNREACHABLE
    except typer.Abort:
        return exits.INTERRUPTED
    except typer.Exit as error:
        return int(error.exit_code)
    except Exception as error:
        show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if not (callable(show) and isinstance(code, int)):
            raise
        show()  # a wrong flag
        return code
    return result if isinstance(result, int) else exits.OK
