# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What holds for the repository as a whole and no linter says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kata_device_plugin import VERSION
from kata_device_plugin.events import Event

REPOSITORY = Path(__file__).parents[2]
GENERATED = "v1beta1/deviceplugin_pb2.py"


def tracked() -> list[Path]:
    """Return every file of the repository: what git knows of, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    return [path for name in listed.stdout.splitlines() if (path := REPOSITORY / name).is_file()]


def modules(*patterns: str) -> Iterator[tuple[Path, ast.Module]]:
    for pattern in patterns:
        for path in sorted(REPOSITORY.glob(pattern)):
            if ".venv" not in path.parts and "build" not in path.relative_to(REPOSITORY).parts:
                yield path, ast.parse(path.read_bytes())


def test_there_is_one_version() -> None:
    projects = [*REPOSITORY.glob("packages/*/pyproject.toml"), *REPOSITORY.glob("testing/*/pyproject.toml")]
    versions = {tomllib.loads(path.read_text())["project"]["version"] for path in projects}
    assert versions == {VERSION}
    pins = re.findall(
        r'"(?:eventline|pcifacts|kata-device-plugin|simnode|simcluster) == ([^"]+)"',
        "".join(path.read_text() for path in projects),
    )
    assert set(pins) == {VERSION}


def test_every_source_file_says_whose_it_is_and_under_which_licence() -> None:
    kinds = {".py", ".go", ".sh", ".toml", ".proto", ".c"}
    named = {"Makefile", "run", "find-python", "test-all"}
    for path in tracked():
        if (path.suffix in kinds or path.name in named) and path.name != "go.sum":
            head = path.read_text()[:600]
            assert "SPDX-License-Identifier: " in head, path
            assert "SPDX-FileCopyrightText: " in head, path


def test_no_file_names_a_host_that_packages_came_from_or_a_path_of_one_machine() -> None:
    for path in REPOSITORY.glob("requirements/*"):
        assert "://" not in path.read_text(), path
    home = str(REPOSITORY)
    for path in tracked():
        if path.suffix not in {".sum", ".png"}:
            assert home not in path.read_text(errors="replace"), path


def test_the_protocol_modules_are_what_the_generator_makes(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, REPOSITORY / "tools/gen_proto.py", str(tmp_path)],
        check=True,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
    )
    for path in tmp_path.rglob("deviceplugin_pb2.py*"):
        committed = REPOSITORY / "packages/kata-device-plugin/src" / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), f"{path.name} is stale: make proto"


def test_tests_use_no_mocks_and_never_sleep() -> None:
    for path, module in modules(
        "packages/*/tests/*.py", "testing/*/tests/*.py", "tests/**/*.py", "conformance/**/*.py"
    ):
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not any(name.startswith("unittest.mock") or name == "mock" for name in names), path
            # waiting.py is the one place that asks again until a condition holds or its time is up.
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep" and path.name != "waiting.py":
                pytest.fail(f"{path}:{node.lineno}: wait for a condition instead")


def test_every_event_is_written_somewhere_and_described() -> None:
    source = "".join(
        path.read_text()
        for path in REPOSITORY.glob("packages/kata-device-plugin/src/kata_device_plugin/*.py")
        if path.name != "events.py"
    )
    described = re.findall(r"^\| `([a-z.-]+)` \|", (REPOSITORY / "docs/events.md").read_text(), re.MULTILINE)
    for event in Event:
        assert f"Event.{event.name}" in source, f"{event} is never written"
    assert sorted(described) == sorted([*(event.value for event in Event), "run.finished"])


def test_the_readme_tells_the_two_commands_and_every_target_exists() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    mentioned = set(
        re.findall(
            r"`make ([a-z-]+)",
            "".join(path.read_text() for path in REPOSITORY.glob("**/*.md") if ".venv" not in path.parts),
        )
    )
    assert mentioned <= targets


def test_the_flags_in_the_documents_are_the_flags_of_the_program() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "kata_device_plugin", "--help"], check=True, capture_output=True, text=True
    ).stdout
    flags = {flag for flag in re.findall(r"--[a-z-]+", shown) if flag not in {"--help", "--version"}}
    documented = set(re.findall(r"^\| `(--[a-z-]+)` \|", (REPOSITORY / "docs/plugin.md").read_text(), re.MULTILINE))
    assert documented == flags
