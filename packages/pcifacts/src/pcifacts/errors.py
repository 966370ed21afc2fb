# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What can go wrong while facts are read.

PcifactsError
├── PciAddressError          a text is no PCI address as sysfs spells it
├── PathUnreadable           the kernel refused to list or read a path
│   └── AttributeUnreadable  ... and the path is one attribute
└── AttributeMalformed       the attribute is there and says something else than its format allows
    └── AttributeMissing     an attribute that every function has is not there

A path that does not exist is a fact, not an error: readers answer None. Every error carries `subject`, `expected`,
`observed` and `hint`, and the message is made of them.
"""

from __future__ import annotations


class PcifactsError(Exception):
    """Base of everything that this package raises."""

    problem = "cannot be used"

    def __init__(self, subject: str, *, expected: str, observed: str, hint: str = "") -> None:
        super().__init__(subject)
        self.subject = subject
        self.expected = expected
        self.observed = observed
        self.hint = hint

    def __str__(self) -> str:
        message = f"{self.subject}: {self.problem}, expected {self.expected}, observed {self.observed}"
        return f"{message}; {self.hint}" if self.hint else message


class PciAddressError(PcifactsError):
    """A text is no PCI address as sysfs spells it. `subject` is that text as Python would write it."""

    problem = "is no PCI address"


class PathUnreadable(PcifactsError):
    """The kernel refused to list a directory or to read a link. `errno` says why."""

    problem = "cannot be read"

    def __init__(self, path: str, *, errno: int, observed: str, expected: str = "a readable path") -> None:
        super().__init__(path, expected=expected, observed=observed, hint="check permissions and mounts")
        self.path = path
        self.errno = errno


class AttributeUnreadable(PathUnreadable):
    """The kernel refused to read one attribute."""


class AttributeMalformed(PcifactsError):
    """An attribute does not have the format that the kernel gives it."""

    problem = "is malformed"

    def __init__(self, path: str, *, expected: str, observed: str) -> None:
        super().__init__(path, expected=expected, observed=observed)
        self.path = path


class AttributeMissing(AttributeMalformed):
    """An attribute that every PCI function has does not exist, although the function does."""

    problem = "is missing"

    def __init__(self, path: str, *, expected: str) -> None:
        super().__init__(path, expected=expected, observed="no such attribute")
