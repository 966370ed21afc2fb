# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""What holds for every suite.

Property tests draw the same examples on every run, however loaded the machine is. Trees that stand for sysfs and /dev
lie in memory where that is possible, as those do: a thousand devices are 30,000 small files.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("exploring", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

if os.access("/dev/shm", os.W_OK):  # noqa: S108 - pytest makes a private directory in it
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")  # noqa: S108
