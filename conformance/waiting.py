# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator


def wait_until(condition: Callable[[], bool], expected: Callable[[], str], *, within_s: float = 10.0) -> None:
    """Return as soon as the condition holds.

    Raises: AssertionError when it does not in time, with what was expected.
    """
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s:g} s: {expected()}")
        time.sleep(0.005)


def looks(*, for_s: float) -> Iterator[None]:
    """Yield every few milliseconds for so long."""
    deadline_s = time.monotonic() + for_s
    while time.monotonic() < deadline_s:
        yield
        time.sleep(0.002)
