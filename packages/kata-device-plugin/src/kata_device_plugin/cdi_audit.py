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
import stat
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
# Source: github.com/opencontainers/runtime-spec config.md, "POSIX-platform Hooks"
_HOOK_NAMES: Final = frozenset(
    {"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"}
)
_VENDOR_OR_CLASS = re.compile(r"[A-Za-z]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.:]*[A-Za-z0-9])?")

# A file larger than this is reported and not parsed: the YAML parser needs seconds for it, and the plugin has one thread.
SIZE_LIMIT: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Problem:
    """A file of somebody else that stands in the way, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Judged:
    """One file as it was when it was read: what is wrong with it, or what it defines."""

    identity: tuple[int, ...]
    reason: str = ""
    kind: str = ""
    names: frozenset[str] = frozenset()


class Audit:
    """Judges the files of the CDI directories again and again; reads only those that changed."""

    def __init__(self) -> None:
        """Start with nothing judged."""
        self._judged: dict[str, _Judged] = {}

    def problems(self, directories: Iterable[str], own: Mapping[str, frozenset[str]]) -> tuple[Problem, ...]:
        """Judge every CDI file in the directories that is not ours, and compare its names with ours.

        `own` maps each CDI kind of this plugin to the device names that it publishes. Sub-directories are not looked
        at: the reference library does not read them either.

        Reads: <cdi-dir>, <cdi-static-dir>
        Shape: at most one problem per file, by directory as given, then by name.
        """
        vendors = {kind.partition("/")[0] for kind in own}
        judged: dict[str, _Judged] = {}
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
                path = os.path.join(directory, name)
                if not name.endswith((".json", ".yaml")) or cdi.is_own(name, vendors) or os.path.isdir(path):
                    continue
                judged[path] = _read(path, self._judged.get(path))
                reason = judged[path].reason or _taken(judged[path], own)
                if reason:
                    problems.append(Problem(path, reason))
        self._judged = judged
        return tuple(problems)


def judge(data: bytes, own: Mapping[str, frozenset[str]]) -> str | None:
    """Return why a CDI file breaks sandbox creation or takes our names, or None when it does neither."""
    judged = _judged(data, ())
    return judged.reason or _taken(judged, own) or None


def _read(path: str, known: _Judged | None) -> _Judged:
    """Judge one file, unless it is known as it is."""
    try:
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if known is not None and known.identity == identity:
            return known
        if not stat.S_ISREG(status.st_mode):
            return _Judged(identity, "is no regular file")
        with open(path, "rb") as file:
            data = file.read(SIZE_LIMIT + 1)
    except FileNotFoundError:
        return _Judged((), "is a link to nothing" if os.path.islink(path) else "")
    except OSError as error:
        return _Judged((), f"cannot be read: {error.strerror}")
    if len(data) > SIZE_LIMIT:
        return _Judged(identity, f"is larger than {SIZE_LIMIT} bytes and was not checked")
    return _judged(data, identity)


def _judged(data: bytes, identity: tuple[int, ...]) -> _Judged:
    try:
        kind, names = _checked(_parse(data))
    except _Broken as broken:
        return _Judged(identity, f"is broken: {broken}")
    return _Judged(identity, "", kind, names)


def _taken(judged: _Judged, own: Mapping[str, frozenset[str]]) -> str:
    taken = sorted(own.get(judged.kind, frozenset()) & judged.names)
    if not taken:
        return ""
    more = f", and {len(taken) - 1} more" if len(taken) > 1 else ""
    return f"defines {judged.kind}={taken[0]}{more} as well as this plugin"


class _Broken(Exception):
    """What is wrong with a file, in the words of the report."""


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_once_each)
    except (ValueError, RecursionError):
        pass
    # Most foreign files are YAML, which JSON is a part of. The parser is loaded for them alone: it costs a mebibyte.
    from kata_device_plugin import cdi_yaml  # noqa: PLC0415

    try:
        return cdi_yaml.load(data)
    except cdi_yaml.Unparsable as error:
        raise _Broken(f"neither JSON nor YAML: {error}") from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Broken(f"key {twice!r} stands twice")
    return found


def _checked(spec: Any) -> tuple[str, frozenset[str]]:
    _mapping(spec, "the file", _SPEC_KEYS)
    version = spec.get("cdiVersion")
    if not isinstance(version, str) or version.removeprefix("v") not in _KNOWN_VERSIONS:
        newest = _KNOWN_VERSIONS[-1]
        raise _Broken(f"cdiVersion {version!r}, expected one that Kata's Go runtime knows, {newest} at most")
    kind = spec.get("kind")
    vendor, _, device_class = kind.partition("/") if isinstance(kind, str) else ("", "", "")
    if not _VENDOR_OR_CLASS.fullmatch(vendor) or not _VENDOR_OR_CLASS.fullmatch(device_class):
        raise _Broken(f"kind {kind!r}, expected vendor/class")
    needed = max(
        _edits(spec.get("containerEdits"), "containerEdits"),
        _annotations(spec.get("annotations"), "the file"),
        "0.6.0" if "." in device_class else "0.3.0",
    )
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
        edits = device.get("containerEdits")
        needed = max(
            needed,
            _edits(edits, f"device {name!r}"),
            _annotations(device.get("annotations"), f"device {name!r}"),
            "0.3.0" if name[0].isalpha() else "0.5.0",
        )
        if not any((edits or {}).values()):
            raise _Broken(f"device {name!r} has no container edits")
    if version.removeprefix("v") < needed:
        raise _Broken(f"cdiVersion {version}, expected {needed} at least for what the file uses")
    return str(kind), frozenset(names)


def _annotations(annotations: Any, where: str) -> str:
    if not annotations:
        return "0.3.0"
    _mapping(annotations, f"{where}: annotations", None)
    for key, value in annotations.items():
        if not isinstance(value, str):
            raise _Broken(f"{where}: annotation {key!r} is {value!r}, expected text")
    return "0.6.0"


def _edits(edits: Any, where: str) -> str:
    """Check container edits; return the lowest version that allows them."""
    needed = "0.3.0"
    if edits is None:
        return needed
    _mapping(edits, where, _EDIT_KEYS)
    _variables(edits.get("env"), where)
    for node in _list(edits.get("deviceNodes"), f"{where}: deviceNodes"):
        at = f"{where}: a device node"
        _mapping(node, at, _NODE_KEYS)
        _texts(node, at, ("path", "hostPath", "type", "permissions"))
        _numbers(node, at, ("major", "minor"))
        _numbers(node, at, ("fileMode", "uid", "gid"), least=0)
        if not node.get("path"):
            raise _Broken(f"{at} without path")
        if node.get("type", "") not in ("", "b", "c", "u", "p"):
            raise _Broken(f"{at} of type {node['type']!r}, expected b, c, u or p")
        if set(node.get("permissions", "")) - set("rwm"):
            raise _Broken(f"{at} with permissions {node['permissions']!r}, expected letters out of rwm")
        if node.get("hostPath"):
            needed = max(needed, "0.5.0")
    for mount in _list(edits.get("mounts"), f"{where}: mounts"):
        at = f"{where}: a mount"
        _mapping(mount, at, _MOUNT_KEYS)
        _texts(mount, at, ("hostPath", "containerPath", "type"))
        _words(mount.get("options"), f"{at}: options")
        if not mount.get("hostPath") or not mount.get("containerPath"):
            raise _Broken(f"{at} without hostPath or containerPath")
        if mount.get("type"):
            needed = max(needed, "0.4.0")
    for hook in _list(edits.get("hooks"), f"{where}: hooks"):
        at = f"{where}: a hook"
        _mapping(hook, at, _HOOK_KEYS)
        _texts(hook, at, ("hookName", "path"))
        _words(hook.get("args"), f"{at}: args")
        _numbers(hook, at, ("timeout",))
        _variables(hook.get("env"), at)
        if hook.get("hookName") not in _HOOK_NAMES or not hook.get("path"):
            raise _Broken(f"{at} without path, or with hookName {hook.get('hookName')!r} that OCI does not know")
    return needed


def _mapping(value: Any, where: str, keys: frozenset[str] | None) -> None:
    if not isinstance(value, dict):
        raise _Broken(f"{where}: expected a mapping, found {type(value).__name__}")
    unknown = [key for key in value if keys is not None and key not in keys]
    if unknown:
        raise _Broken(f"{where}: unknown key {unknown[0]!r}")


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Broken(f"{where}: expected a list, found {type(value).__name__}")
    return value


def _words(value: Any, where: str) -> list[str]:
    words = _list(value, where)
    for word in words:
        if not isinstance(word, str):
            raise _Broken(f"{where}: {word!r}, expected text")
    return words


def _variables(value: Any, where: str) -> None:
    for variable in _words(value, f"{where}: env"):
        if "=" not in variable[1:]:
            raise _Broken(f"{where}: env {variable!r}, expected NAME=VALUE")


def _texts(value: dict[str, Any], where: str, keys: Iterable[str]) -> None:
    for key in keys:
        if not isinstance(value.get(key, ""), str):
            raise _Broken(f"{where}: {key} {value[key]!r}, expected text")


def _numbers(value: dict[str, Any], where: str, keys: Iterable[str], *, least: int | None = None) -> None:
    for key in keys:
        number = value.get(key, 0)
        if type(number) is not int or (least is not None and number < least):
            raise _Broken(f"{where}: {key} {number!r}, expected a whole number")
