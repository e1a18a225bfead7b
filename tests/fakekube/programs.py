"""Real helm and kubectl, pointed at a cluster."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from tools.kube_tools import kube_tools

_TIMEOUT_S = 200.0


@dataclass(frozen=True, slots=True)
class Done:
    """What a program said."""

    status: int
    out: str
    err: str


class ProgramFailed(AssertionError):
    """A program ended with a status that is not 0."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Both, with a home of their own, in a namespace."""

    kubeconfig: Path
    home: Path
    namespace: str = "default"

    async def helm(self, *arguments: str | Path) -> str:
        """Run helm; its output. Raises ProgramFailed."""
        return _out("helm", arguments, await self._run(kube_tools().helm, arguments))

    async def kubectl(self, *arguments: str | Path, stdin: str = "") -> str:
        """Run kubectl; its output. Raises ProgramFailed."""
        return _out("kubectl", arguments, await self._run(kube_tools().kubectl, arguments, stdin))

    async def failing(self, program: str, *arguments: str | Path, stdin: str = "") -> Done:
        """Run one that is to fail."""
        done = await self._run(getattr(kube_tools(), program), arguments, stdin)
        if done.status == 0:
            raise ProgramFailed(f"{program} {arguments} did not fail: {done.out}")
        return done

    async def _run(self, program: Path, arguments: tuple[str | Path, ...], stdin: str = "") -> Done:
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "KUBECONFIG": str(self.kubeconfig),
            "HELM_CACHE_HOME": str(self.home / "helm"),
            "HELM_CONFIG_HOME": str(self.home / "helm"),
            "HELM_DATA_HOME": str(self.home / "helm"),
        }
        process = await asyncio.create_subprocess_exec(
            program, "--namespace", self.namespace, *map(str, arguments), env=environ,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                out, err = await process.communicate(stdin.encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Done(process.returncode, out.decode(), err.decode())


def _out(name: str, arguments: tuple[str | Path, ...], done: Done) -> str:
    if done.status != 0:
        told = " ".join(map(str, arguments))
        raise ProgramFailed(f"{name} {told} ended with {done.status}:\n{done.out}\n{done.err}")
    return done.out
