# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Which names the kubelet and a CDI reader take.

Written down anew and apart from the plugin's own rules, so that the two can disagree.
"""

from __future__ import annotations

import re
from typing import Final

_QUOTA_PREFIX: Final = "requests."
_RESERVED: Final = "kubernetes.io/"
_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NAME_PART: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")
_CDI_NAME: Final = re.compile(
    r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z](?:[A-Za-z0-9_-]*[A-Za-z0-9])?"
    r"=[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?"
)


def is_extended_resource(name: str) -> bool:
    """Whether the kubelet registers a resource of this name.

    Source: k8s.io/kubernetes pkg/apis/core/v1/helper IsExtendedResourceName; k8s.io/apimachinery
    pkg/util/validation IsQualifiedName (253 characters before the slash, 63 after it)
    """
    if "/" not in name or _RESERVED in name or name.startswith(_QUOTA_PREFIX):
        return False
    prefix, _, last = (_QUOTA_PREFIX + name).partition("/")
    return (
        len(prefix) <= 253
        and _SUBDOMAIN.fullmatch(prefix) is not None
        and len(last) <= 63
        and _NAME_PART.fullmatch(last) is not None
    )


def is_qualified_cdi_name(name: str) -> bool:
    """Whether a CDI name is vendor/class=device, in the grammar that the oldest reader in use takes.

    Source: github.com/container-orchestrated-devices/container-device-interface v0.6.0, pkg/parser; a dot in the class
    needs spec version 0.6.0 and is left out here.
    """
    return _CDI_NAME.fullmatch(name) is not None
