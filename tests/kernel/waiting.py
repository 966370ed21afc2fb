# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Waiting for a condition in the guest, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

Answer = TypeVar("Answer")

DEADLINE_S: Final = 90.0
"""For anything that the plugin does within a second on a quiet machine."""
_POLL_S: Final = 0.05


class NotInTime(AssertionError):
    """Something did not become so before its deadline."""

    def __init__(self, expected: str, within_s: float, observed: str) -> None:
        super().__init__(f"not within {within_s:g} s: {expected}, observed:\n{observed}")
        self.expected = expected
        self.within_s = within_s
        self.observed = observed


def until(
    look: Callable[[], Answer | None], expected: str, observed: Callable[[], str], *, within_s: float = DEADLINE_S
) -> Answer:
    """Look until there is something, and return it.

    Raises: NotInTime.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() > deadline_s:
            raise NotInTime(expected, within_s, observed())
        time.sleep(_POLL_S)
