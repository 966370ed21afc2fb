# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What can go wrong with the lab itself, as opposed to what a test finds in a guest."""

from __future__ import annotations


class LabError(Exception):
    """Something that the lab needs is missing or failed; the attributes say what, and what to do."""

    def __init__(self, subject: str, *, observed: str, expected: str = "", hint: str = "") -> None:
        super().__init__(subject, observed, expected, hint)
        self.subject = subject
        self.observed = observed
        self.expected = expected
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.subject}: {self.observed}"
        if self.expected:
            text += f", expected {self.expected}"
        return f"{text}; {self.hint}" if self.hint else text


class GuestLost(LabError):
    """The guest, its QEMU or its agent ended or stopped answering."""
