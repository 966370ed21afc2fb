# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads YAML the way the CDI libraries do, as far as that matters for a judgement.

PyYAML follows YAML 1.1 to the letter and takes the PCI address 0000:15:00.0 for a number in base 60. The Go parser does
not, so only plain integers and floats are numbers here. A key that stands twice is an error, as in a strict Go decoder.

The loader in Python, not the one in C: the latter recurses without a bound, and a file of brackets would end the process.

Source: sigs.k8s.io/yaml UnmarshalStrict, gopkg.in/yaml.v2 resolve.go
"""

from __future__ import annotations

import re
from typing import Any

import yaml


class Unparsable(Exception):
    """The bytes are no YAML."""


class _Loader(yaml.SafeLoader):
    """The safe loader with fewer opinions."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        """Build a mapping; refuse a key that stands twice, merged ones included."""
        self.flatten_mapping(node)
        seen = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", node.start_mark)
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _NUMBERS[0], re.compile(r"[-+]?(0x[0-9a-fA-F]+|0o?[0-7]+|[1-9][0-9]*|0)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _NUMBERS[1], re.compile(r"[-+]?[0-9]+(\.[0-9]+([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)$"), list("-+0123456789")
)


def load(data: bytes) -> Any:
    """Return what a file holds.

    Raises: Unparsable.
    """
    try:
        return yaml.load(data, Loader=_Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unparsable(" ".join(str(error).split())[:160]) from error
