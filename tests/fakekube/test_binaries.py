"""The binaries that everything here calls run on this machine."""

from __future__ import annotations

import subprocess

from tools.kube_tools import kube_tools


def test_they_are_real_and_of_the_versions_that_the_chart_was_made_with() -> None:
    tools = kube_tools()
    helm = subprocess.check_output([tools.helm, "version", "--short"], text=True, timeout=60)
    kubectl = subprocess.check_output([tools.kubectl, "version", "--client"], text=True, timeout=60)
    assert helm.startswith("v4.3.")
    assert "v1.37." in kubectl
