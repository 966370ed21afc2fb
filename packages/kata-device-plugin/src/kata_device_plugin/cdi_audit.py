# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Judges the CDI files that others wrote, since one bad file stops every Kata sandbox of the node.

Nothing is changed. The judgement is that of the strictest reader on the node: the CDI library 0.6.0 inside Kata's Go
runtime, which treats any error in any file of either directory as fatal. The conformance suite holds it against that
library and against the newest one.

Source: github.com/container-orchestrated-devices/container-device-interface v0.6.0, pkg/cdi (spec.go, version.go,
container-edits.go) and pkg/parser; kata-containers src/runtime/pkg/device/config/config.go
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kata_device_plugin import cdi

_KNOWN_VERSIONS: Final = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0")
_SPEC_KEYS: Final = frozenset({"cdiVersion", "kind", "annotations", "devices", "containerEdits"})
_DEVICE_KEYS: Final = frozenset({"name", "annotations", "containerEdits"})
_EDIT_KEYS: Final = frozenset({"env", "deviceNodes", "hooks", "mounts"})
_NODE_KEYS: Final = frozenset({"path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"})
_MOUNT_KEYS: Final = frozenset({"hostPath", "containerPath", "options", "type"})
_HOOK_KEYS: Final = frozenset({"hookName", "path", "args", "env", "timeout"})
_VENDOR_OR_CLASS = re.compile(r"[A-Za-z]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.:]*[A-Za-z0-9])?")

# A file larger than this is reported and not parsed: a YAML parser needs about a second for a mebibyte, and the plugin
# has one thread.
SIZE_LIMIT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """A file of somebody else that stands in the way, and why."""

    path: str
    reason: str


def audit(directories: Iterable[str], own: Mapping[str, frozenset[str]]) -> tuple[Problem, ...]:
    """Judge every CDI file in the directories that is not ours, and compare its names with ours.

    `own` maps each CDI kind of this plugin to the device names that it publishes. Sub-directories are not looked at:
    the reference library does not read them either.

    Reads: <cdi-dir>, <cdi-static-dir>
    Shape: at most one problem per file, sorted by path.
    """
    vendors = {kind.partition("/")[0] for kind in own}
    problems = []
    for directory in dict.fromkeys(directories):
        try:
            names = sorted(os.listdir(directory))
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(Problem(directory, f"cannot be listed: {error.strerror}"))
            continue
        for name in names:
            if not name.endswith((".json", ".yaml")) or cdi.is_own(name, vendors):
                continue
            path = os.path.join(directory, name)
            reason = _reason(path, own)
            if reason is not None:
                problems.append(Problem(path, reason))
    return tuple(problems)


def _reason(path: str, own: Mapping[str, frozenset[str]]) -> str | None:
    try:
        if os.path.isdir(path):
            return None
        with open(path, "rb") as file:
            data = file.read(SIZE_LIMIT + 1)
    except FileNotFoundError:
        return None if not os.path.islink(path) else "is a link to nothing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(data) > SIZE_LIMIT:
        return f"is larger than {SIZE_LIMIT} bytes and was not checked"
    return judge(data, own)


def judge(data: bytes, own: Mapping[str, frozenset[str]]) -> str | None:
    """Return why a CDI file breaks sandbox creation or takes our names, or None when it does neither."""
    try:
        spec = _parse(data)
        kind, names = _checked(spec)
    except _Broken as broken:
        return f"is broken: {broken}"
    taken = sorted(own.get(kind, frozenset()) & names)
    if taken:
        return f"defines {kind}={taken[0]} as well as this plugin" + (
            f", and {len(taken) - 1} more" if len(taken) > 1 else ""
        )
    return None


class _Broken(Exception):
    """What is wrong with a file, in the words of the report."""


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        pass
    # Most foreign files are YAML, which JSON is a part of. The parser is loaded for them alone: it costs a mebibyte.
    import yaml  # noqa: PLC0415

    try:
        return yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe loaders
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _Broken("neither JSON nor YAML: " + " ".join(str(error).split())[:160]) from error


def _checked(spec: Any) -> tuple[str, frozenset[str]]:
    _mapping(spec, "the file", _SPEC_KEYS)
    version = spec.get("cdiVersion")
    if not isinstance(version, str) or version.removeprefix("v") not in _KNOWN_VERSIONS:
        raise _Broken(
            f"cdiVersion {version!r}, expected one that Kata's Go runtime knows, {_KNOWN_VERSIONS[-1]} at most"
        )
    kind = spec.get("kind")
    vendor, _, device_class = kind.partition("/") if isinstance(kind, str) else ("", "", "")
    if not _VENDOR_OR_CLASS.fullmatch(vendor) or not _VENDOR_OR_CLASS.fullmatch(device_class):
        raise _Broken(f"kind {kind!r}, expected vendor/class")
    needed = max(_edits(spec.get("containerEdits"), "containerEdits"), "0.6.0" if "." in device_class else "0.3.0")
    if spec.get("annotations"):
        needed = "0.6.0"
    names: set[str] = set()
    for position, device in enumerate(_list(spec.get("devices"), "devices")):
        where = f"devices[{position}]"
        _mapping(device, where, _DEVICE_KEYS)
        name = device.get("name")
        if not isinstance(name, str) or not _DEVICE_NAME.fullmatch(name):
            raise _Broken(f"{where}: name {name!r}, expected letters, digits, '-', '_', '.', ':'")
        if name in names:
            raise _Broken(f"{where}: name {name!r} stands twice")
        names.add(name)
        if not any((device.get("containerEdits") or {}).values()):
            raise _Broken(f"device {name!r} has no container edits")
        needed = max(needed, _edits(device["containerEdits"], f"device {name!r}"))
        if not name[0].isalpha():
            needed = max(needed, "0.5.0")
        if device.get("annotations"):
            needed = "0.6.0"
    if version.removeprefix("v") < needed:
        raise _Broken(f"cdiVersion {version}, expected {needed} at least for what the file uses")
    return str(kind), frozenset(names)


def _edits(edits: Any, where: str) -> str:
    """Check container edits; return the lowest version that allows them."""
    needed = "0.3.0"
    if edits is None:
        return needed
    _mapping(edits, where, _EDIT_KEYS)
    for variable in _list(edits.get("env"), f"{where}: env"):
        if not isinstance(variable, str) or "=" not in variable[1:]:
            raise _Broken(f"{where}: env {variable!r}, expected NAME=VALUE")
    for node in _list(edits.get("deviceNodes"), f"{where}: deviceNodes"):
        _mapping(node, f"{where}: deviceNodes", _NODE_KEYS)
        if not node.get("path"):
            raise _Broken(f"{where}: a device node without path")
        if node.get("type", "") not in ("", "b", "c", "u", "p"):
            raise _Broken(f"{where}: device node type {node['type']!r}, expected b, c, u or p")
        if set(str(node.get("permissions", ""))) - set("rwm"):
            raise _Broken(f"{where}: permissions {node['permissions']!r}, expected letters out of rwm")
        if node.get("hostPath"):
            needed = max(needed, "0.5.0")
    for mount in _list(edits.get("mounts"), f"{where}: mounts"):
        _mapping(mount, f"{where}: mounts", _MOUNT_KEYS)
        if not mount.get("hostPath") or not mount.get("containerPath"):
            raise _Broken(f"{where}: a mount without hostPath or containerPath")
        if mount.get("type"):
            needed = max(needed, "0.4.0")
    for hook in _list(edits.get("hooks"), f"{where}: hooks"):
        _mapping(hook, f"{where}: hooks", _HOOK_KEYS)
        if not hook.get("hookName") or not hook.get("path"):
            raise _Broken(f"{where}: a hook without hookName or path")
    return needed


def _mapping(value: Any, where: str, keys: frozenset[str]) -> None:
    if not isinstance(value, dict):
        raise _Broken(f"{where}: expected a mapping, found {type(value).__name__}")
    unknown = sorted(str(key) for key in value if key not in keys)
    if unknown:
        raise _Broken(f"{where}: unknown key {unknown[0]!r}")


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Broken(f"{where}: expected a list, found {type(value).__name__}")
    return value
