# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""What the guest gets as its second disk: the plugin as it is installed, a kubelet, the CDI library, an observer.

The plugin is installed from wheels that are built here and from the locked dependencies, chosen for the guest's
CPython, with byte code: without it the start takes half a minute under emulation.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from conformance import build as conformance_build

from vmlab import artifacts as lab
from vmlab.artifacts import Artifacts
from vmlab.build import ext4_from

REPOSITORY: Final = Path(__file__).resolve().parents[2]
INSIDE: Final = Path(__file__).resolve().parent / "inside"
KUBELET: Final = "kubelet-1.37"
CDI_LIBRARY: Final = "cdi-1.1"
_OURS: Final = ("eventline", "pcifacts", "kata-device-plugin")
_LOCK: Final = REPOSITORY / "requirements" / "plugin.txt"
# Every manylinux tag that a Debian of the guest's age can load. Source: PEP 600
_PLATFORMS: Final = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64", "manylinux_2_34_x86_64")
_SIZE: Final = 256 << 20


def make(artifacts: Artifacts, folder: Path) -> Path:
    """Make the disk image in a folder.

    Raises: BuildFailed of this lab or of the conformance programs, CalledProcessError.
    """
    content = folder / "payload"
    site = content / "site"
    shutil.copytree(_dependencies(artifacts), site)
    _install_ours(site, folder / "wheels")
    _compile(artifacts, site)
    for source in INSIDE.glob("*.py"):
        shutil.copyfile(source, content / source.name)
    for name, program in (("kubelet", KUBELET), ("cdi", CDI_LIBRARY)):
        shutil.copy2(conformance_build.ensure(program), content / name)
    image = folder / "payload.raw"
    ext4_from(content, image, size=_SIZE, label="payload", log=folder / "payload.log")
    shutil.rmtree(content)
    return image


def _dependencies(artifacts: Artifacts) -> Path:
    """Return the folder of what the plugin depends on, installed and compiled once for a lock file."""
    digest = hashlib.sha256(f"{artifacts.python}\0".encode() + _LOCK.read_bytes()).hexdigest()[:16]
    cached = lab.cache() / f"site-{digest}"
    if cached.exists():
        return cached
    temporary = cached.with_name(f".{cached.name}.{os.getpid()}")
    platforms = [f"--platform={platform}" for platform in _PLATFORMS]
    _run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"),
            *(
                f"--target={temporary}",
                "--require-hashes",
                "--only-binary=:all:",
                f"--python-version={artifacts.python}",
            ),
            *("--implementation=cp", *platforms, "-r", str(_LOCK)),
        ]
    )
    _compile(artifacts, temporary)
    temporary.rename(cached)
    return cached


def _install_ours(site: Path, wheels: Path) -> None:
    wheels.mkdir()
    for name in _OURS:
        code = f"from hatchling.build import build_wheel; build_wheel({str(wheels)!r})"
        _run([sys.executable, "-c", code], folder=REPOSITORY / "packages" / name)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def _compile(artifacts: Artifacts, site: Path) -> None:
    """Make byte code with the guest's CPython; it holds whatever the time stamps say, and names no folder of ours."""
    argv = [*artifacts.python_command, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    where = ["-s", str(site), "-p", "/payload/site", str(site)]
    _run([*argv, *where], environment=dict(artifacts.python_environment))


def _run(argv: Sequence[str], *, folder: Path = REPOSITORY, environment: dict[str, str] | None = None) -> None:
    ended = subprocess.run(
        argv, cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        raise PayloadFailed(argv[:4], ended.returncode, ended.stdout + ended.stderr)


class PayloadFailed(Exception):
    """A step of the payload ended badly."""

    def __init__(self, argv: Sequence[str], status: int, observed: str) -> None:
        super().__init__(argv, status, observed)
        self.argv = tuple(argv)
        self.status = status
        self.observed = observed

    def __str__(self) -> str:
        return f"{' '.join(self.argv)} ... ended with {self.status}:\n{self.observed}"
