# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path

import pytest

from pcifacts.sysfs import Roots
from simnode import boards
from simnode.tree import LiveNode


@pytest.fixture
def live(tmp_path: Path) -> LiveNode:
    """Four H100 NVL cards on vfio-pci."""
    return LiveNode.create(tmp_path, boards.pcie_h100_nvl())


@pytest.fixture
def roots(live: LiveNode) -> Roots:
    return Roots(str(live.sysfs), str(live.dev_vfio))
