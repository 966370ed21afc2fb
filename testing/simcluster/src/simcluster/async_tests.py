# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Coroutine functions as tests. A conftest takes part by importing `pytest_pyfunc_call`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import pytest

from simcluster.fast_clock import FastClockLoop

# No test takes nearly as long; a call that is never answered must not hold up the others for ever.
LIMIT_S: Final = 60.0

Test = TypeVar("Test", bound=Callable[..., Awaitable[None]])

_RATE: Final = "clock_rate"


def clock_rate(rate: float) -> Callable[[Test], Test]:
    """Run a test in a loop whose clock goes `rate` times as fast as the world's."""

    def mark(test: Test) -> Test:
        setattr(test, _RATE, rate)
        return test

    return mark


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, in a loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    rate = getattr(test, _RATE, 1.0)
    with asyncio.Runner(loop_factory=lambda: FastClockLoop(rate)) as runner:
        runner.run(_limited(test(**arguments), rate))
    return True


async def _limited(test: Awaitable[Any], rate: float) -> None:
    async with asyncio.timeout(LIMIT_S * rate):
        await test
