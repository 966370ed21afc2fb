# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Coroutine tests, and the host that they run the plugin on."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.cluster.host import Host, NewHost

from simcluster.async_tests import pytest_pyfunc_call as pytest_pyfunc_call  # noqa: PLC0414 - a hook, found by its name
from simcluster.kubelet import Generation
from simnode import boards
from simnode.node import Node

# Trees of a thousand devices are 30,000 small files, and the path of a socket may have 107 bytes.
_ROOT: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory with a short path."""
    path = Path(tempfile.mkdtemp(prefix="kd-", dir=_ROOT))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def new_host(directory: Path) -> NewHost:
    """A function that makes a host; its kubelet runs unless told otherwise, its plugin does not."""

    @asynccontextmanager
    async def make(
        board: Node | None = None, *, generation: Generation = Generation.BY_SOCKET, kubelet: bool = True
    ) -> AsyncIterator[Host]:
        async with Host(directory, board or boards.hgx_h100(), generation) as host:
            if kubelet:
                await host.kubelet.start()
            yield host

    return make
