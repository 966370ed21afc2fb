# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What a guest is made of: a QEMU tree, a kernel with per-device VFIO nodes, an initrd and a disk image.

Everything comes from Debian packages and is built once into a cache outside the repository. The key of a build is
what decides it on our side (this file and what goes into the image); delete the folder to take newer packages.

Debian's kernels are built without IOMMUFD, so they make no /dev/vfio/devices. The vfio and iommufd drivers of the same
source are therefore built once more as external modules, with those options set, and stand beside the stock ones; the
stock ones stay reachable as `modprobe -d ` STOCK_MODULES.

QEMU runs from its unpacked tree through that tree's own loader, so nothing is installed and nothing is mounted.
Observed on Debian 13 with kernel 7.3 and QEMU 11.1; vfio-user-pci needs QEMU 10.1.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmlab.errors import LabError

INSIDE: Final = Path(__file__).resolve().parent / "inside"
STOCK_MODULES: Final = "/usr/lib/vmlab-stock"
"""Where the guest keeps an index of its kernel's modules as Debian ships them; for `modprobe -d`."""

_SUITE: Final = "trixie"
_BACKPORTS: Final = "trixie-backports"
_KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
_MULTIARCH: Final = "x86_64-linux-gnu"
_DISK_SIZE: Final = 2 << 30

# From backports all of QEMU's parts must be named, or apt takes the older ones of the release.
_QEMU_PACKAGES: Final = ("qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios")
_GUEST_PACKAGES: Final = ("systemd-sysv", "udev", "kmod", "python3", "pciutils", "initramfs-tools")
_KERNEL_PACKAGE: Final = "linux-image-amd64"
_BUILD_PACKAGES: Final = ("make", "xz-utils")
_KERNEL_BUILD_PACKAGES: Final = ("linux-headers-amd64", "linux-source")

_TOOLS: Final[Mapping[str, str]] = {
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "strip": "binutils",
    "tar": "tar",
    "xz": "xz-utils",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "chroot": "coreutils",
}

# The kernel's own configuration lacks these; its headers are left as they are.
_OPTIONS: Final = (
    "CONFIG_IOMMUFD_MODULE",
    "CONFIG_VFIO_DEVICE_CDEV",
    "CONFIG_INTERVAL_TREE_SPAN_ITER",
    "CONFIG_IOMMUFD_DRIVER_CORE",
)
# What each external module is made of. Source: the Makefiles of drivers/vfio, drivers/vfio/pci, drivers/vfio/mdev and
# drivers/iommu/iommufd in Linux 7.3; span.o is ours, see span_half.
_KBUILD: Final[Mapping[str, str]] = {
    ".": "obj-m += drivers/iommu/iommufd/ drivers/vfio/\n",
    "drivers/iommu/iommufd": (
        "obj-m += iommufd.o\n"
        "iommufd-y := device.o eventq.o hw_pagetable.o io_pagetable.o ioas.o main.o pages.o vfio_compat.o viommu.o "
        "driver.o span.o\n"
    ),
    "drivers/vfio": (
        "obj-m += vfio.o vfio_iommu_type1.o pci/ mdev/\n"
        "vfio-y := vfio_main.o device_cdev.o group.o iommufd.o container.o virqfd.o\n"
    ),
    "drivers/vfio/pci": (
        "obj-m += vfio-pci-core.o vfio-pci.o\n"
        "vfio-pci-core-y := vfio_pci_core.o vfio_pci_intrs.o vfio_pci_rdwr.o vfio_pci_config.o vfio_pci_dmabuf.o\n"
        "vfio-pci-y := vfio_pci.o vfio_pci_igd.o\n"
    ),
    "drivers/vfio/mdev": "obj-m += mdev.o\nmdev-y := mdev_core.o mdev_sysfs.o mdev_driver.o\n",
}
_SOURCES: Final = ("drivers/vfio", "drivers/iommu/*.h", "drivers/iommu/iommufd", "lib/interval_tree.c")

# A guest that is read by a test has no use for these, and they cost seconds under emulation.
_MASKED: Final = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "dpkg-db-backup.timer",
    "ldconfig.service",
    "getty-static.service",
    "systemd-timesyncd.service",
)


RunTool = Callable[[str, Iterable[str | Path]], None]
"""Runs a tool under a name that its log gets."""


@dataclass(frozen=True, slots=True)
class Artifacts:
    """One finished build. `root` is its folder; `kernel_release` and `python` describe the guest."""

    root: Path
    kernel_release: str
    python: str
    """Version of the guest's CPython, "3.13"."""
    packages: Mapping[str, str]
    """Versions of the packages that matter, by name."""

    @property
    def kernel(self) -> Path:
        """The kernel image."""
        return self.root / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """The initial file system, without any VFIO."""
        return self.root / "initrd"

    @property
    def disk(self) -> Path:
        """The root file system, a raw ext4 image; start it with snapshot on."""
        return self.root / "disk.raw"

    @property
    def qemu_argv(self) -> tuple[str, ...]:
        """Command line of QEMU up to its first own argument."""
        tree = self.root / "qemu"
        data = ("usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu")
        return (
            *_through_loader(tree, "usr/bin/qemu-system-x86_64"),
            *(part for path in data for part in ("-L", str(tree / path))),
        )

    @property
    def qemu_environment(self) -> Mapping[str, str]:
        """What QEMU needs to find its modules."""
        return {"QEMU_MODULE_DIR": str(self.root / "qemu" / "usr/lib" / _MULTIARCH / "qemu")}

    @property
    def python_argv(self) -> tuple[str, ...]:
        """Command line of the guest's CPython, run on this machine: byte code for the guest is made with it."""
        return _through_loader(self.root / "guest", f"usr/bin/python{self.python}")

    @property
    def python_environment(self) -> Mapping[str, str]:
        """What that CPython needs to find its standard library."""
        return {"PYTHONHOME": str(self.root / "guest" / "usr")}

    @classmethod
    def load(cls, root: Path) -> Artifacts:
        """Read the description of a finished build."""
        described = json.loads((root / "build.json").read_text())
        return cls(root, described["kernel_release"], described["python"], described["packages"])


def cache_dir() -> Path:
    """Return where builds are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kata-devices" / "lab"


def build_key() -> str:
    """Return the digest of everything on our side that decides a build."""
    digest = hashlib.sha256()
    for path in (Path(__file__).resolve(), *sorted(INSIDE.glob("*"))):
        if path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find() -> Artifacts:
    """Return the finished build.

    Raises: LabError when there is none.
    """
    root = cache_dir() / build_key()
    if not (root / "build.json").exists():
        raise LabError("kernel lab", observed=f"no build in {root}", hint="run `python -m vmlab build` as root")
    return Artifacts.load(root)


def ensure() -> Artifacts:
    """Return the build, making it first when the cache does not have it.

    Raises: LabError.
    """
    root = cache_dir() / build_key()
    if (root / "build.json").exists():
        return Artifacts.load(root)
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "build.json").exists():
            _make(root)
    return Artifacts.load(root)


def apt_mirror(sources: Iterable[str]) -> str | None:
    """Return the base address of the Debian archive that apt on this machine uses, from the text of its sources.

    Both forms are read, `deb [options] ADDRESS suite ...` and `URIs: ADDRESS`. Source: sources.list(5)
    """
    pattern = re.compile(r"^(?:URIs:|deb(?:\s+\[[^]]*\])?)\s*(https?://\S+?/debian)/?(?:\s|$)", re.MULTILINE)
    for text in sources:
        match = pattern.search(text)
        if match:
            return match[1]
    return None


def span_half(source: str) -> str:
    """Return lib/interval_tree.c without what the kernel has already: only the span iterator, not exported.

    Source: Linux 7.3 lib/interval_tree.c; the iterator is left out of kernels without INTERVAL_TREE_SPAN_ITER.
    """
    without_tree = re.sub(r"^INTERVAL_TREE_DEFINE\(.*?interval_tree\);?\n", "", source, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^EXPORT_SYMBOL.*\n", "", without_tree, flags=re.MULTILINE)


def missing_tools() -> tuple[str, ...]:
    """Return what a build needs and this machine lacks, each with the package that has it."""
    missing = [
        f"{tool} (apt-get install {package})" for tool, package in _TOOLS.items() if shutil.which(tool, path=_path()) is None
    ]
    if not Path(_KEYRING).exists():
        missing.append(f"{_KEYRING} (apt-get install debian-archive-keyring)")
    return tuple(missing)


def _path() -> str:
    """Return PATH with the folders of administration tools, which not every shell has."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"))


def _through_loader(tree: Path, program: str) -> tuple[str, ...]:
    libraries = f"{tree}/usr/lib/{_MULTIARCH}:{tree}/usr/lib"
    return (f"{tree}/lib64/ld-linux-x86-64.so.2", "--library-path", libraries, f"{tree}/{program}")


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a build is being made: a folder, its logs, and the archive that packages come from."""

    root: Path
    logs: Path
    mirror: str

    def run(self, name: str, argv: Iterable[str | Path]) -> None:
        """Run a tool with its output in a log.

        Raises: LabError with the end of the log.
        """
        log = self.logs / f"{name}.log"
        with log.open("ab") as out:
            ended = subprocess.run(
                [str(part) for part in argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": _path(), "LC_ALL": "C.UTF-8"},
                check=False,
            )
        if ended.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise LabError(name, observed=f"ended with {ended.returncode}, its log ends:\n{tail}\n", hint=f"see {log}")

    def chroot(self, name: str, include: Iterable[str], backports: Iterable[str], *hooks: str) -> Path:
        """Make a root file system of packages."""
        tree = self.root / name
        packages = ",".join((*include, *(f"{package}/{_BACKPORTS}" for package in backports)))
        archive = f"deb [signed-by={_KEYRING}] {self.mirror}"
        excluded = (f"/usr/share/{folder}/*" for folder in ("doc", "man", "locale"))
        self.run(
            name,
            [
                "mmdebstrap",
                "--variant=apt",
                f"--include={packages}",
                '--aptopt=APT::Install-Recommends "false"',
                # An archive that is a copy of a past day says so with a date that has passed.
                '--aptopt=Acquire::Check-Valid-Until "false"',
                *(f"--dpkgopt=path-exclude={path}" for path in excluded),
                *hooks,
                _SUITE,
                tree,
                f"{archive} {_SUITE} main",
                f"{archive} {_BACKPORTS} main",
            ],
        )
        return tree


def _make(root: Path) -> None:
    missing = missing_tools()
    if missing:
        raise LabError("kernel lab", observed=f"missing {', '.join(missing)}", hint="install these and run it again")
    if os.geteuid() != 0:
        raise LabError("kernel lab", observed=f"user {os.geteuid()}", expected="root", hint="chroots are made")
    if platform.machine() != "x86_64":
        raise LabError("kernel lab", observed=f"a {platform.machine()} machine", expected="x86_64")
    temporary = root.with_name(f".{root.name}.{os.getpid()}")
    site = _Site(temporary, root.parent / f"{root.name}.log", _mirror())
    temporary.mkdir()
    shutil.rmtree(site.logs, ignore_errors=True)
    site.logs.mkdir()
    print(f"building the kernel lab in {root}; minutes, and gigabytes on the way", file=sys.stderr, flush=True)
    try:
        with _phase("everything"):
            _build(site)
        temporary.replace(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _mirror() -> str:
    given = os.environ.get("VMLAB_MIRROR")
    folder = Path("/etc/apt")
    paths = (*sorted(folder.glob("sources.list.d/*")), folder / "sources.list")
    found = given or apt_mirror(path.read_text(errors="replace") for path in paths if path.is_file())
    if found is None:
        raise LabError(
            "kernel lab",
            observed="no Debian archive in apt's sources",
            hint="give the address of one, up to /debian, in VMLAB_MIRROR",
        )
    return found


def _build(site: _Site) -> None:
    # The first initrd, made when the kernel is installed, is thrown away: keep it small.
    hook = '--essential-hook=mkdir -p "$1/etc/initramfs-tools/conf.d" && echo MODULES=list >"$1/etc/initramfs-tools/conf.d/vmlab"'
    with _phase("packages: QEMU, guest, kernel build"), ThreadPoolExecutor(3) as pool:
        qemu_job = pool.submit(site.chroot, "qemu", (), _QEMU_PACKAGES)
        guest_job = pool.submit(site.chroot, "guest", _GUEST_PACKAGES, (_KERNEL_PACKAGE,), hook)
        kbuild_job = pool.submit(site.chroot, "kbuild", _BUILD_PACKAGES, _KERNEL_BUILD_PACKAGES)
        qemu, guest, kbuild = qemu_job.result(), guest_job.result(), kbuild_job.result()
    release = _only(guest / "usr/lib/modules", "*").name
    _keep_stock_index(guest, release)
    with _phase("modules with per-device nodes"):
        _modules(site, kbuild, guest, release)
    with _phase("initrd"):
        _initrd(site, guest, release)
    with _phase("disk image"):
        _disk(site, guest)
    described = {
        "kernel_release": release,
        "python": _only(guest / "usr/bin", "python3.[0-9]*").name.removeprefix("python"),
        "packages": {
            package: _version(tree, package)
            for tree, package in ((qemu, "qemu-system-x86"), (guest, f"linux-image-{release}"), (guest, "systemd"))
        },
    }
    # The guest's tree stays for its CPython; what only the image needs goes.
    for leftover in (kbuild, guest / "usr/lib/modules", guest / "boot"):
        shutil.rmtree(leftover)
    (site.root / "build.json").write_text(json.dumps(described, indent=2) + "\n")


def _keep_stock_index(guest: Path, release: str) -> None:
    """Keep the module index of the kernel as it is shipped, over the same files."""
    installed = guest / "usr/lib/modules" / release
    stock = guest / STOCK_MODULES.lstrip("/") / "usr/lib/modules" / release
    stock.mkdir(parents=True)
    (guest / STOCK_MODULES.lstrip("/") / "lib").symlink_to("usr/lib")
    for index in installed.glob("modules.*"):
        shutil.copy2(index, stock)
    (stock / "kernel").symlink_to(f"/usr/lib/modules/{release}/kernel")


def _modules(site: _Site, kbuild: Path, guest: Path, release: str) -> None:
    archive = _only(kbuild / "usr/src", "linux-source-*.tar.xz")
    name = archive.name.removesuffix(".tar.xz")
    tree = kbuild / "root/oot"
    tree.mkdir(parents=True)
    wanted = (f"{name}/{path}" for path in _SOURCES)
    site.run("modules", ["tar", "xf", archive, "-C", tree, "--strip-components=1", "--wildcards", *wanted])
    for folder, text in _KBUILD.items():
        (tree / folder / "Kbuild").write_text(text)
    span = span_half((tree / "lib/interval_tree.c").read_text())
    (tree / "drivers/iommu/iommufd/span.c").write_text(span)
    flags = " ".join(f"-D{option}=1" for option in _OPTIONS)
    # objtool reads /proc: the chroot gets one in a mount and process namespace of its own.
    script = (
        'mount -t proc proc "$1/proc" && exec chroot "$1" '
        'make -C "/lib/modules/$2/build" M=/root/oot "-j$3" "KCFLAGS=$4" modules'
    )
    jobs = str(os.cpu_count() or 1)
    inside = ["sh", "-c", script, "sh", kbuild, release, jobs, flags]
    site.run("modules", ["unshare", "--mount", "--pid", "--fork", *inside])
    updates = guest / "usr/lib/modules" / release / "updates"
    updates.mkdir()
    for module in sorted((tree / "drivers").rglob("*.ko")):
        site.run("modules", ["strip", "--strip-debug", "-o", updates / module.name, module])
    site.run("modules", ["chroot", guest, "depmod", release])


def _initrd(site: _Site, guest: Path, release: str) -> None:
    (guest / "etc/initramfs-tools/modules").write_text("virtio_pci\nvirtio_blk\next4\n")
    site.run("initrd", ["chroot", guest, "update-initramfs", "-u", "-k", release])
    shutil.copy2(guest / f"boot/vmlinuz-{release}", site.root / "vmlinuz")
    shutil.copy2(guest / f"boot/initrd.img-{release}", site.root / "initrd")


def _disk(site: _Site, guest: Path) -> None:
    agent = guest / "usr/local/lib/vmlab/agent.py"
    agent.parent.mkdir(parents=True)
    shutil.copyfile(INSIDE / "agent.py", agent)
    units = guest / "etc/systemd/system"
    shutil.copyfile(INSIDE / "vmlab-agent.service", units / "vmlab-agent.service")
    started = units / "multi-user.target.wants"
    started.mkdir(exist_ok=True)
    (started / "vmlab-agent.service").symlink_to("../vmlab-agent.service")
    for unit in _MASKED:
        (units / unit).unlink(missing_ok=True)
        (units / unit).symlink_to("/dev/null")
    (guest / "etc/hostname").write_text("vmlab\n")
    (guest / "etc/machine-id").write_text("")
    (guest / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 1\n")
    (guest / "payload").mkdir()
    for folder in ("var/lib/apt/lists", "var/cache/apt", "etc/apt/sources.list.d"):
        shutil.rmtree(guest / folder, ignore_errors=True)
    (guest / "etc/apt/sources.list").unlink(missing_ok=True)
    make_image(site.root / "disk.raw", guest, size=_DISK_SIZE, run=site.run)


def make_image(image: Path, folder: Path, *, size: int, run: RunTool | None = None) -> None:
    """Write a raw ext4 image that holds what is in a folder; `size` in bytes.

    Raises: LabError.
    """
    with image.open("wb") as file:
        file.truncate(size)
    argv = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-d", str(folder), str(image)]
    if run is not None:
        run("disk", argv)
        return
    ended = subprocess.run(argv, env={**os.environ, "PATH": _path()}, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise LabError(str(image), observed=f"mke2fs ended with {ended.returncode}: {ended.stderr.strip()}")


def _only(folder: Path, pattern: str) -> Path:
    """Return the one path that matches, the last when there are several.

    Raises: LabError.
    """
    found = sorted(folder.glob(pattern))
    if not found:
        raise LabError(str(folder), observed=f"nothing like {pattern}", hint="the archive's packages have changed")
    return found[-1]


def _version(tree: Path, package: str) -> str:
    """Return the installed version of a package. Source: dpkg's status file, deb-control(5)"""
    for paragraph in (tree / "var/lib/dpkg/status").read_text().split("\n\n"):
        if paragraph.startswith(f"Package: {package}\n"):
            match = re.search(r"^Version: (.+)$", paragraph, re.MULTILINE)
            return match[1] if match else ""
    return ""


@contextmanager
def _phase(name: str) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    print(f"{name:<38} {time.monotonic() - started_s:6.1f} s", file=sys.stderr, flush=True)
