# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def holds_within(condition: Callable[[], bool], within_s: float, *, every_s: float = 0.02) -> bool:
    """Ask until the condition holds; say whether it did in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(every_s)
    return True
