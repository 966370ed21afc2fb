# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Coroutine tests, and a directory whose path is short enough for sockets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from simcluster.async_tests import pytest_pyfunc_call as pytest_pyfunc_call  # noqa: PLC0414 - a hook, found by its name


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for sockets: the path of one may have 107 bytes."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kd-", dir=root) as path:
        yield Path(path)
