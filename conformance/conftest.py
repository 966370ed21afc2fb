# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Fixtures: the built programs, and a node with a real kubelet of each release."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conformance import build
from conformance.machine import Machine
from conformance.reference_cdi import CdiLibrary

from simnode import boards
from simnode.node import Node

KUBELETS: Final = ("1.34", "1.37")
CDI_LIBRARIES: Final = ("0.6", "1.1")

# A tree of two thousand entries is written and removed for every test. Where there is no such file system the default
# directory does, only slower. Short paths either way: a socket's may have 107 bytes.
_ROOT: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

NewMachine = Callable[..., Machine]
_MACHINES: Final = pytest.StashKey[list[Machine]]()
_LOG_LINES: Final = 60


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the logs of the node's processes beside a failure."""
    report = yield
    if report.failed:
        for machine in item.stash.get(_MACHINES, []):
            for log in sorted(machine.root.glob("*.log")):
                lines = log.read_text(errors="replace").splitlines()
                report.sections.append((f"the end of {log.name}", "\n".join(lines[-_LOG_LINES:])))
    return report


@pytest.fixture(scope="session")
def program() -> Callable[[str], Path]:
    """Return a function that finds a built program; a missing toolchain fails every test that needs it."""
    known: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in known:
            try:
                known[name] = build.ensure(name)
            except build.BuildFailed as error:
                pytest.fail(str(error), pytrace=False)
        return known[name]

    return find


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A folder for what outlives a test."""
    path = Path(tempfile.mkdtemp(prefix="kd-", dir=_ROOT))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def cdi_libraries(program: Callable[[str], Path], scratch: Path) -> Iterator[tuple[CdiLibrary, ...]]:
    """Every release of the reference CDI library, the one that Kata's Go runtime pins first."""
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(CdiLibrary(program(f"cdi-{release}"), scratch / f"cdi-{release}.log", release=release))
            for release in CDI_LIBRARIES
        )


@pytest.fixture(scope="session", params=KUBELETS)
def release(request: pytest.FixtureRequest) -> str:
    """The Kubernetes release whose kubelet runs."""
    return str(request.param)


@pytest.fixture
def new_machine(
    request: pytest.FixtureRequest,
    release: str,
    program: Callable[[str], Path],
    cdi_libraries: tuple[CdiLibrary, ...],
) -> Iterator[NewMachine]:
    """Return a function that makes a node; without arguments an HGX H100 with every device on VFIO."""
    if os.geteuid() != 0:
        pytest.fail(
            "the conformance suite needs root: mount namespaces and device nodes; run it as root", pytrace=False
        )
    with ExitStack() as stack:

        def make(board: Node | None = None) -> Machine:
            root = Path(tempfile.mkdtemp(prefix="kd-", dir=_ROOT))
            stack.callback(shutil.rmtree, root, ignore_errors=True)
            machine = Machine(root, board or boards.hgx_h100(), program(f"kubelet-{release}"), release, cdi_libraries)
            request.node.stash.setdefault(_MACHINES, []).append(machine)
            return stack.enter_context(machine)

        yield make


@pytest.fixture
def machine(new_machine: NewMachine) -> Machine:
    """An HGX H100 with the kubelet started and no plugin yet."""
    made = new_machine()
    made.kubelet.start()
    return made
