# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""One guest for all tests that need an IOMMU; each test gets its node as it is after boot, without VFIO."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conformance.build import BuildFailed as ProgramNotBuilt
from tests.kernel import payload
from tests.kernel.real_node import Latency, RealNode

from vmlab import artifacts as lab
from vmlab.artifacts import Artifacts
from vmlab.device import H100, NVSWITCH
from vmlab.errors import LabError
from vmlab.guest import Guest
from vmlab.machine import Iommu, Machine

BOARD = {"gpu0": H100, "gpu1": H100, "switch0": NVSWITCH}
NewGuest = Callable[[Iommu], Guest]
_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> list[str]:
    """Lines to print at the end of the run."""
    return pytestconfig.stash.setdefault(_FIGURES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was measured; nothing is judged by it."""
    lines = config.stash.get(_FIGURES, [])
    if lines:
        terminalreporter.section("measured in the guest")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def artifacts() -> Artifacts:
    """What the guest is made of; a missing build fails every test that needs it."""
    try:
        return lab.find()
    except LabError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def payload_image(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin, a kubelet and what watches them, as a disk."""
    try:
        return payload.make(artifacts, tmp_path_factory.mktemp("payload"))
    except (LabError, ProgramNotBuilt, payload.PayloadFailed) as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def new_guest(artifacts: Artifacts, payload_image: Path, figures: list[str]) -> Callable[[Iommu], Guest]:
    """Return a function that describes a guest with a board on its bus; it boots on entry."""

    def make(iommu: Iommu) -> Guest:
        # The order of drivers at boot is a subject of its own; here nothing competes.
        machine = Machine(
            functions=BOARD, iommu=iommu, kernel_arguments="modprobe.blacklist=nouveau", payload=payload_image
        )
        return Guest(artifacts, machine)

    return make


@pytest.fixture(scope="session")
def guest(new_guest: NewGuest, figures: list[str]) -> Iterator[Guest]:
    """A guest with an Intel IOMMU."""
    with new_guest(Iommu.INTEL) as running:
        figures.append(f"boot to agent {running.boot_s:.1f} s, kernel {running.kernel_release}")
        at_boot = running.run("lsmod | grep -c vfio; ls /dev/vfio", check=False).out.split()
        figures.append(f"at boot {at_boot[0]} modules of VFIO are loaded, /dev/vfio holds: {' '.join(at_boot[1:])}")
        yield running


@pytest.fixture(scope="session")
def booted(guest: Guest) -> RealNode:
    """The node of the guest, shared; tests ask for `node`."""
    return RealNode(guest)


@pytest.fixture
def node(booted: RealNode, figures: list[str]) -> Iterator[RealNode]:
    """The node without VFIO and without programs of ours."""
    booted.reset()
    yield booted
    measured, booted.latencies = booted.latencies, []
    figures.extend(_line(latency) for latency in measured)


def _line(latency: Latency) -> str:
    return f"{latency.action:<52} {latency.milliseconds:8.1f} ms from the kernel's event to the kubelet"
