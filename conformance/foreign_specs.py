# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""CDI files of others, and what each release of the reference library makes of them.

`fine` means that a refresh has no error: Kata's Go runtime, which uses 0.6, starts sandboxes. A newer release is what
containerd and CRI-O use; they skip a broken file and go on with the others. Every verdict was observed, surprising ones
too: only the first YAML document of a file is read, and where the parser finds a document to end, it stops.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

_NODE: Final = {"deviceNodes": [{"path": "/dev/null"}]}


@dataclass(frozen=True, slots=True)
class ForeignSpec:
    """One file. `fine_0_6` and `fine_1_1` are the verdicts; `suffix` is that of its name."""

    name: str
    data: bytes
    fine_0_6: bool
    fine_1_1: bool
    suffix: str = "json"

    def is_fine(self, release: str) -> bool:
        return {"0.6": self.fine_0_6, "1.1": self.fine_1_1}[release]


def _spec(name: str, /, *, fine: bool | tuple[bool, bool], **changes: Any) -> ForeignSpec:
    """A sound file with changes; a value of None takes the key away."""
    spec: dict[str, Any] = {
        "cdiVersion": "0.5.0",
        "kind": "example.com/thing",
        "devices": [{"name": "one", "containerEdits": _NODE}],
    } | changes
    verdicts = fine if isinstance(fine, tuple) else (fine, fine)
    text = json.dumps({key: value for key, value in spec.items() if value is not None})
    return ForeignSpec(name, text.encode(), *verdicts)


def _device(name: str, /, *, fine: bool | tuple[bool, bool], version: str = "0.5.0", **device: Any) -> ForeignSpec:
    whole = {"name": "one", "containerEdits": _NODE} | device
    return _spec(name, fine=fine, cdiVersion=version, devices=[{k: v for k, v in whole.items() if v is not None}])


def _edits(name: str, /, *, fine: bool | tuple[bool, bool], version: str = "0.5.0", **edits: Any) -> ForeignSpec:
    return _device(name, fine=fine, version=version, containerEdits=edits)


def _raw(name: str, data: bytes, /, *, fine: bool | tuple[bool, bool], suffix: str = "json") -> ForeignSpec:
    verdicts = fine if isinstance(fine, tuple) else (fine, fine)
    return ForeignSpec(name, data, *verdicts, suffix)


_WHOLE: Final = json.dumps(
    {"cdiVersion": "0.5.0", "kind": "example.com/thing", "devices": [{"name": "one", "containerEdits": _NODE}]}
).encode()
_YAML: Final = b"""---
cdiVersion: "0.5.0"
kind: example.com/thing
devices:
- name: one
  containerEdits:
    deviceNodes:
    - path: /dev/null
"""

_MERGED: Final = b"""cdiVersion: "0.5.0"
kind: example.com/thing
devices:
- &first
  name: one
  containerEdits: {env: [A=b]}
- <<: *first
  name: two
"""

FOREIGN: Final = (
    # Text.
    _raw("sound json", _WHOLE, fine=True),
    _raw("sound yaml", _YAML, fine=True, suffix="yaml"),
    _raw("yaml under a json name", _YAML, fine=True),
    _raw("json under a yaml name", _WHOLE, fine=True, suffix="yaml"),
    _raw("torn json", _WHOLE[: len(_WHOLE) // 2], fine=False),
    _raw("torn yaml, cut within a key", _YAML[: _YAML.index(b"deviceNodes") + 4], fine=False, suffix="yaml"),
    _raw("broken yaml", b"cdiVersion: [\n", fine=False, suffix="yaml"),
    _raw("yaml with tabs", _YAML.replace(b"  containerEdits", b"\tcontainerEdits"), fine=False, suffix="yaml"),
    _raw("empty", b"", fine=False),
    _raw("only blanks", b"\n\n", fine=False),
    _raw("null", b"null", fine=False),
    _raw("a list", b"[]", fine=False),
    _raw("a word", b"word", fine=False),
    _raw("text after the json", _WHOLE + b"x", fine=True),
    _raw("json twice", _WHOLE + b"\n" + _WHOLE, fine=True),
    _raw("a second yaml document", _YAML + _YAML, fine=True, suffix="yaml"),
    _raw("a key twice", _WHOLE.replace(b'"kind"', b'"kind": "example.com/other", "kind"'), fine=False),
    _raw("a key twice in yaml", _YAML + b"kind: example.com/other\n", fine=False, suffix="yaml"),
    _raw("a yaml alias merged", _MERGED, fine=(False, True), suffix="yaml"),
    _raw("a yaml tag that nobody knows", _YAML.replace(b"one", b"!part one"), fine=True, suffix="yaml"),
    _raw("version in yaml without quotes", _YAML.replace(b'"0.5.0"', b"0.5.0"), fine=True, suffix="yaml"),
    _raw("byte order mark", b"\xef\xbb\xbf" + _WHOLE, fine=True),
    _raw("utf-16", _WHOLE.decode().encode("utf-16"), fine=True),
    _raw("a control character", _WHOLE.replace(b"/dev/null", b"/dev/\x01"), fine=False),
    _raw("brackets twenty thousand deep", b"[" * 20_000, fine=False),
    _raw("bytes that are no text", b"\xff\xfe\x00", fine=False),
    _raw("zeros, as after a crash", bytes(512), fine=False),
    # Version.
    *(
        _spec(f"version {version}", fine=(version < "0.7", True), cdiVersion=version)
        for version in ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
    ),
    _spec("version 9.9", fine=False, cdiVersion="9.9"),
    _spec("version 9.9.9", fine=False, cdiVersion="9.9.9"),
    _spec("version 0.1.0", fine=False, cdiVersion="0.1.0"),
    _spec("version 0.5", fine=False, cdiVersion="0.5"),
    _spec("version with a v", fine=True, cdiVersion="v0.5.0"),
    _spec("version as a number", fine=False, cdiVersion=0.5),
    _spec("no version", fine=False, cdiVersion=None),
    # Kind.
    _spec("kind without a class", fine=False, kind="example.com"),
    _spec("kind without a vendor", fine=False, kind="/thing"),
    _spec("kind with an empty class", fine=False, kind="example.com/"),
    _spec("kind with two slashes", fine=False, kind="example.com/thing/part"),
    _spec("kind with a blank", fine=False, kind="example com/thing"),
    _spec("kind that begins with a digit", fine=False, kind="3m.com/thing"),
    _spec("kind is a number", fine=False, kind=5),
    _spec("kind with a letter that is not ASCII", fine=False, kind="ex\u00e4mple.com/thing"),
    _spec("no kind", fine=False, kind=None),
    _spec("class with a dot, too old a version", fine=False, kind="example.com/thing.part"),
    _spec("class with a dot", fine=True, kind="example.com/thing.part", cdiVersion="0.6.0"),
    # Devices.
    _spec("a device twice", fine=False, devices=[{"name": "one", "containerEdits": _NODE}] * 2),
    _spec("no devices", fine=(True, False), devices=[]),
    _spec("no key for devices", fine=(True, False), devices=None),
    _spec("devices is a mapping", fine=False, devices={}),
    _spec("devices is a word", fine=False, devices="one"),
    _spec("a device is null", fine=False, devices=[None]),
    _device("device without edits", fine=False, containerEdits=None),
    _device("device with empty edits", fine=False, containerEdits={}),
    _device("device without a name", fine=False, name=None),
    _device("device name with a blank", fine=False, name="one two"),
    _device("device name with a slash", fine=False, name="one/two"),
    _device("device name that ends with a dot", fine=False, name="one."),
    _device("device name is a PCI address", fine=True, name="0000:1b:00.0"),
    _device("device name is a PCI address, too old a version", fine=False, name="0000:1b:00.0", version="0.4.0"),
    _device("device name is one digit", fine=True, name="0"),
    _device("device name is a number", fine=True, name=0),
    _device("device name is true", fine=True, name=True),
    _raw("device name in yaml is a number", _YAML.replace(b"one", b"12"), fine=True, suffix="yaml"),
    _raw("device name in yaml is yes", _YAML.replace(b"one", b"yes"), fine=True, suffix="yaml"),
    _raw("device name in yaml is a PCI address", _YAML.replace(b"one", b"0000:65:00.0"), fine=True, suffix="yaml"),
    _device("device with annotations, too old a version", fine=False, annotations={"a.b/c": "d"}),
    _device("device with annotations", fine=True, annotations={"a.b/c": "d"}, version="0.6.0"),
    # Keys.
    _spec("unknown key at the top", fine=False, devcies=[]),
    _device("unknown key in a device", fine=False, edits={}),
    _edits("unknown key in edits", fine=False, deviceNode=[]),
    _edits("unknown key in a node", fine=False, deviceNodes=[{"path": "/dev/null", "mode": 420}]),
    _spec("annotations at the top, too old a version", fine=False, annotations={"a.b/c": "d"}),
    _spec("annotations at the top", fine=True, annotations={"a.b/c": "d"}, cdiVersion="0.6.0"),
    _spec("edits at the top", fine=True, containerEdits={"env": ["A=b"]}),
    # Edits.
    _device("edits are a word", fine=False, containerEdits="one"),
    _device("edits are a list", fine=False, containerEdits=[]),
    _edits("edits with empty lists", fine=False, deviceNodes=[], env=[]),
    _edits("a node is null", fine=False, deviceNodes=[None]),
    _edits("node without a path", fine=False, deviceNodes=[{"type": "c"}]),
    _edits("node of an unknown type", fine=False, deviceNodes=[{"path": "/dev/null", "type": "x"}]),
    _edits("node with unknown permissions", fine=False, deviceNodes=[{"path": "/dev/null", "permissions": "rx"}]),
    _edits("node that is not there", fine=True, deviceNodes=[{"path": "/dev/is-not-there", "type": "c"}]),
    _edits("hostPath, too old a version", fine=False, version="0.4.0", deviceNodes=[{"path": "/a", "hostPath": "/b"}]),
    _edits("hostPath", fine=True, deviceNodes=[{"path": "/a", "hostPath": "/b"}]),
    _edits("numbers as text", fine=False, deviceNodes=[{"path": "/dev/null", "major": "1"}]),
    _edits("a number with a fraction", fine=(False, True), deviceNodes=[{"path": "/dev/null", "major": 1.5}]),
    _edits("a negative number", fine=(True, False), deviceNodes=[{"path": "/dev/null", "minor": -1}]),
    _edits("a user as text", fine=False, deviceNodes=[{"path": "/dev/null", "uid": "root"}]),
    _edits("a negative user", fine=False, deviceNodes=[{"path": "/dev/null", "uid": -1}]),
    _edits("a file mode as text", fine=False, deviceNodes=[{"path": "/dev/null", "fileMode": "0660"}]),
    _edits("permissions of none", fine=(False, True), deviceNodes=[{"path": "/dev/null", "permissions": "none"}]),
    _edits("variables are a word", fine=False, env="A=b"),
    _edits("variable without a name", fine=False, env=["=b"]),
    _edits("variable without a value", fine=False, env=["A"]),
    _edits("variable", fine=True, env=["A=b"]),
    _edits("hook of an unknown name", fine=False, hooks=[{"hookName": "later", "path": "/bin/true"}]),
    _edits("hook without a path", fine=False, hooks=[{"hookName": "prestart"}]),
    _edits(
        "hook with a variable without a value",
        fine=False,
        hooks=[{"hookName": "prestart", "path": "/bin/true", "env": ["A"]}],
    ),
    _edits(
        "hook with a time as text", fine=False, hooks=[{"hookName": "prestart", "path": "/bin/true", "timeout": "5"}]
    ),
    _edits(
        "hook with arguments that are a word",
        fine=False,
        hooks=[{"hookName": "prestart", "path": "/bin/true", "args": "true"}],
    ),
    _edits("hook", fine=True, hooks=[{"hookName": "createContainer", "path": "/bin/true"}]),
    _edits("mount without a target", fine=False, mounts=[{"hostPath": "/a"}]),
    _edits("mount without a source", fine=False, mounts=[{"containerPath": "/b"}]),
    _edits(
        "mount with options that are a word",
        fine=False,
        mounts=[{"hostPath": "/a", "containerPath": "/b", "options": "ro"}],
    ),
    _edits("mount", fine=True, mounts=[{"hostPath": "/a", "containerPath": "/b"}]),
    _edits(
        "mount type, too old a version",
        fine=False,
        version="0.3.0",
        mounts=[{"hostPath": "/a", "containerPath": "/b", "type": "bind"}],
    ),
    _edits("groups, newer than Kata's library", fine=(False, True), version="0.7.0", additionalGids=[5]),
    _edits(
        "network, newer than Kata's library",
        fine=(False, True),
        version="1.1.0",
        netDevices=[{"hostInterfaceName": "a", "name": "b"}],
    ),
)

PANICS: Final = frozenset({"a node is null"})
"""Rows that end the process of whoever reads the file, with both releases."""
