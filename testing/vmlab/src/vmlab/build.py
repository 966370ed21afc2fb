# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""How the artifacts are made: QEMU, a guest's disk, its kernel, its kernel's vfio modules.

Everything that decides the result is here, in `debian` and in the folder `recipe`; their content is the artifacts' key.
The packages are whatever the archive holds on the day of the build; which they were is written into the manifest.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmlab import debian
from vmlab.debian import Tree
from vmlab.errors import BuildFailed, MissingTools

RECIPE: Final = Path(__file__).parent / "recipe"

_BACKPORTS: Final = "trixie-backports"
SUITES: Final = ("trixie", _BACKPORTS)

# vfio-user-pci is in QEMU 10.1 and newer; trixie itself has 10.0. The four packages depend on each other's version.
_QEMU: Final = Tree(
    name="qemu",
    packages=tuple(
        f"{name}/{_BACKPORTS}" for name in ("qemu-system-x86", "qemu-system-data", "qemu-system-common", "seabios")
    ),
)
_GUEST: Final = Tree(
    name="guest",
    packages=(
        *("systemd-sysv", "udev", "kmod", "python3", "pciutils", "initramfs-tools"),
        f"linux-image-amd64/{_BACKPORTS}",
    ),
)
_COMPILER: Final = Tree(
    name="compiler",
    packages=("make", "xz-utils", f"linux-headers-amd64/{_BACKPORTS}", f"linux-source/{_BACKPORTS}"),
)

TOOLS: Final[Mapping[str, str]] = {
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "unshare": "util-linux",
    "chroot": "coreutils",
}

_LIBRARIES: Final = "usr/lib/x86_64-linux-gnu"
_DISK_BYTES: Final = 2 << 30

# What the stock kernel leaves out. The modules are compiled as if it had been configured in.
# Source: Linux drivers/iommu/iommufd/Kconfig, drivers/vfio/Kconfig
_CONFIGURED_IN: Final = ("IOMMUFD_MODULE", "VFIO_DEVICE_CDEV", "INTERVAL_TREE_SPAN_ITER", "IOMMUFD_DRIVER_CORE")
_KBUILD: Final[Mapping[str, str]] = {
    "top.Kbuild": "Kbuild",
    "iommufd.Kbuild": "drivers/iommu/iommufd/Kbuild",
    "vfio.Kbuild": "drivers/vfio/Kbuild",
    "vfio-pci.Kbuild": "drivers/vfio/pci/Kbuild",
}
_SOURCES: Final = ("drivers/vfio", "drivers/iommu/*.h", "drivers/iommu/iommufd", "lib/interval_tree.c")

STOCK_MODULES: Final = "/usr/lib/vmlab-stock"
"""Where the guest has an index of its kernel's modules as the distribution ships them: `modprobe -d` takes this path.

depmod itself takes minutes under emulation.
"""

_MASKED: Final = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer"),
    *("systemd-tmpfiles-clean.timer", "ldconfig.service", "systemd-binfmt.service", "systemd-firstboot.service"),
    *("systemd-hibernate-clear.service", "systemd-hwdb-update.service", "systemd-journal-catalog-update.service"),
    *("systemd-journal-flush.service", "systemd-machine-id-commit.service", "systemd-pcrmachine.service"),
    *("systemd-pcrphase.service", "systemd-pcrphase-sysinit.service", "systemd-pstore.service"),
    *("systemd-random-seed.service", "systemd-sysusers.service", "systemd-tpm2-setup.service"),
    *("systemd-tpm2-setup-early.service", "systemd-update-done.service", "systemd-udev-load-credentials.service"),
    *("systemd-logind.service", "systemd-user-sessions.service", "getty.target", "getty-static.service"),
    *("serial-getty@ttyS0.service", "systemd-ask-password-console.path", "systemd-ask-password-wall.path"),
    *("dev-hugepages.mount", "dev-mqueue.mount", "sys-fs-fuse-connections.mount", "sys-kernel-config.mount"),
    *("modprobe@configfs.service", "modprobe@drm.service", "modprobe@efi_pstore.service", "modprobe@fuse.service"),
    *("proc-sys-fs-binfmt_misc.automount", "systemd-creds.socket", "systemd-hostnamed.socket"),
    *("systemd-initctl.socket", "systemd-pcrextend.socket", "systemd-pcrlock.socket", "systemd-sysext.socket"),
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a build made, all below one folder, and what it was made of."""

    kernel_release: str
    python: str
    packages: Mapping[str, str]
    seconds: Mapping[str, float]


def inputs() -> tuple[Path, ...]:
    """Return the files whose content decides the artifacts, in a fixed order."""
    recipe = (path for path in RECIPE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return (Path(__file__), Path(debian.__file__), *sorted(recipe))


def missing_tools(tools: Mapping[str, str] = TOOLS) -> dict[str, str]:
    """Return the programs that are not installed, with the package of each."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    return {tool: package for tool, package in tools.items() if shutil.which(tool, path=path) is None}


def build(target: Path, say: Say) -> Built:
    """Make the artifacts in `target`, an existing empty folder. Takes about two minutes on two cores.

    Leaves there: vmlinuz, initrd, disk.raw, qemu/, guest/.
    Raises: MissingTools, NoArchive, BuildFailed.
    """
    missing = missing_tools()
    if missing:
        raise MissingTools(missing)
    if os.geteuid() != 0:
        raise BuildFailed("build", "is run as an ordinary user, expected root (it unpacks and enters root folders)")
    seconds: dict[str, float] = {}

    @contextmanager
    def step(name: str) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        seconds[name] = round(time.monotonic() - started_s, 1)
        say(f"{name}: {seconds[name]} s")

    with step("unpack QEMU, guest and compiler"):
        _unpack(target, (_QEMU, _GUEST, _COMPILER))
    guest, compiler = target / _GUEST.name, target / _COMPILER.name
    release = _kernel_release(guest)
    with step("build vfio and iommufd with device nodes"):
        _build_modules(compiler, release, target / "modules.log")
        _install_modules(compiler, guest, release, target / "modules.log")
    with step("make initrd and disk"):
        _furnish(guest)
        _make_initrd(guest, release, target)
        _make_disk(guest, target)
    packages = {
        name: version
        for tree in (_QEMU, _GUEST, _COMPILER)
        for name, version in debian.versions(target / tree.name, tree.packages).items()
    }
    with step("check and clear away"):
        _check_qemu(target / _QEMU.name, target / "check.log")
        # The guest's tree stays for its CPython, which makes byte code for the guest; its kernel is not needed for that.
        for tree in (compiler, guest / "usr/lib/modules", guest / "boot"):
            # Never across a mount, whatever was left mounted.
            _run("clear away", ["rm", "-rf", "--one-file-system", str(tree)], target / "clear.log")
    python = sorted((guest / "usr/bin").glob("python3.[0-9]*"))
    if not python:
        raise BuildFailed("unpack guest", "no usr/bin/python3.N, expected the guest's CPython")
    return Built(
        kernel_release=release,
        python=python[-1].name.removeprefix("python"),
        packages=packages,
        seconds=seconds,
    )


def program(tree: Path, path: str) -> list[str]:
    """Return the start of a command that runs a program of a package tree through that tree's own loader."""
    return [str(tree / "lib64/ld-linux-x86-64.so.2"), "--library-path", str(tree / _LIBRARIES), str(tree / path)]


def qemu_command(tree: Path) -> list[str]:
    """Return the start of a QEMU command: from its package tree, with its own firmware."""
    data = ("usr/share/qemu", "usr/share/seabios")
    return [*program(tree, "usr/bin/qemu-system-x86_64"), *(part for path in data for part in ("-L", str(tree / path)))]


def qemu_environment(tree: Path) -> dict[str, str]:
    """Return the environment in which QEMU finds its own modules."""
    return {**os.environ, "QEMU_MODULE_DIR": str(tree / _LIBRARIES / "qemu")}


def span_half(interval_tree: str) -> str:
    """Return lib/interval_tree.c without its first half and without its exports.

    The stock kernel has and exports the plain interval tree, and leaves out the span iterator, which is guarded by the
    option that only iommufd turns on. Linked into iommufd, it must not export anything.

    Source: Linux lib/interval_tree.c
    """
    without_tree = re.sub(
        r"^INTERVAL_TREE_DEFINE\(.*?interval_tree\)$", "", interval_tree, flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"^EXPORT_SYMBOL.*\n", "", without_tree, flags=re.MULTILINE)


def _unpack(target: Path, trees: Sequence[Tree]) -> None:
    uri = debian.archive()
    with ExitStack() as stack:
        running = []
        for tree in trees:
            process = debian.make(tree, target / tree.name, suites=SUITES, archive_uri=uri)
            stack.callback(_end, process)
            running.append((tree, process))
        for tree, process in running:
            if process.wait() != 0:
                _failed(
                    f"unpack {tree.name}", f"mmdebstrap ended with {process.returncode}", target / f"{tree.name}.log"
                )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()


def _kernel_release(guest: Path) -> str:
    releases = sorted(path.name for path in (guest / "usr/lib/modules").iterdir())
    if len(releases) != 1:
        raise BuildFailed("unpack guest", f"{len(releases)} kernels, expected 1: {', '.join(releases)}")
    return releases[0]


def _build_modules(compiler: Path, release: str, log: Path) -> None:
    archives = sorted((compiler / "usr/src").glob("linux-source-*.tar.xz"))
    if not archives:
        raise BuildFailed("unpack the kernel's source", "no linux-source-*.tar.xz in the package, expected one")
    name = archives[0].name.removesuffix(".tar.xz")
    source = compiler / "root/source"
    source.mkdir(parents=True)
    members = [f"{name}/{member}" for member in _SOURCES]
    untar = ["tar", "-xf", f"/usr/src/{archives[0].name}", "-C", "/root/source", "--strip-components=1", "--wildcards"]
    _run("unpack the kernel's source", ["chroot", str(compiler), *untar, *members], log)
    for recipe, place in _KBUILD.items():
        shutil.copyfile(RECIPE / "kbuild" / recipe, source / place)
    (source / "drivers/iommu/iommufd/span.c").write_text(span_half((source / "lib/interval_tree.c").read_text()))
    make = [
        *("make", "-C", f"/lib/modules/{release}/build", "M=/root/source", f"-j{os.cpu_count() or 1}"),
        "KCFLAGS=" + " ".join(f"-DCONFIG_{option}=1" for option in _CONFIGURED_IN),
        "modules",
    ]
    # objtool wants /proc; the mount goes with its namespace.
    inside = ["unshare", "--pid", "--fork", f"--mount-proc={compiler / 'proc'}", "chroot", str(compiler)]
    _run("build the kernel's modules", [*inside, *make], log)


def _install_modules(compiler: Path, guest: Path, release: str, log: Path) -> None:
    """Put the rebuilt modules where depmod prefers them, and keep an index that knows only the stock ones."""
    modules = guest / "usr/lib/modules" / release
    stock = guest / STOCK_MODULES.lstrip("/") / "usr/lib/modules" / release
    stock.mkdir(parents=True)
    (guest / STOCK_MODULES.lstrip("/") / "lib").symlink_to("usr/lib")
    for index in modules.glob("modules.*"):
        shutil.copyfile(index, stock / index.name)
    (stock / "kernel").symlink_to(f"/usr/lib/modules/{release}/kernel")
    updates = modules / "updates"
    updates.mkdir()
    for built in (compiler / "root/source/drivers").rglob("*.ko"):
        inside = Path("/") / built.relative_to(compiler)
        _run("strip a module", ["chroot", str(compiler), "strip", "--strip-debug", str(inside)], log)
        shutil.copyfile(built, updates / built.name)
    _run("index the modules", ["chroot", str(guest), "depmod", release], log)


def _furnish(guest: Path) -> None:
    shutil.copytree(RECIPE / "rootfs", guest, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    # Git keeps no modes but one, and a wheel not even that.
    (guest / "etc/initramfs-tools/hooks/vmlab").chmod(0o755)
    units = guest / "etc/systemd/system"
    for unit in _MASKED:
        (units / unit).unlink(missing_ok=True)
        (units / unit).symlink_to("/dev/null")
    wanted = units / "multi-user.target.wants"
    wanted.mkdir(exist_ok=True)
    (wanted / "vmlab-agent.service").symlink_to("../vmlab-agent.service")
    (units / "default.target").unlink(missing_ok=True)
    (units / "default.target").symlink_to("/usr/lib/systemd/system/multi-user.target")
    (guest / "payload").mkdir()
    (guest / "etc/hostname").write_text("guest\n")
    (guest / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    (guest / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 0\n")
    shutil.rmtree(guest / "var/lib/apt/lists", ignore_errors=True)
    for path in (guest / "etc/apt").glob("sources.list*"):
        # The name of the mirror stays on this machine.
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _make_initrd(guest: Path, release: str, target: Path) -> None:
    _run("make the initrd", ["chroot", str(guest), "update-initramfs", "-c", "-k", release], target / "initrd.log")
    shutil.copyfile(guest / f"boot/vmlinuz-{release}", target / "vmlinuz")
    shutil.copyfile(guest / f"boot/initrd.img-{release}", target / "initrd")


def _make_disk(guest: Path, target: Path) -> None:
    ext4_from(guest, target / "disk.raw", size=_DISK_BYTES, label="root", log=target / "disk.log")


def ext4_from(folder: Path, image: Path, *, size: int, label: str, log: Path) -> None:
    """Make a raw ext4 image of `size` bytes that holds a copy of `folder`.

    Raises: BuildFailed, for example where it does not fit.
    """
    with image.open("wb") as file:
        file.truncate(size)
    make = ["mke2fs", "-q", "-F", "-t", "ext4", "-L", label, "-O", "^has_journal", "-d", str(folder), str(image)]
    _run(f"make the file system {label}", make, log)


def _check_qemu(tree: Path, log: Path) -> None:
    _run(
        "ask QEMU for vfio-user-pci",
        [*qemu_command(tree), "-device", "vfio-user-pci,help"],
        log,
        qemu_environment(tree),
    )


def _run(step: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    path = {"PATH": os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))}
    with log.open("ab") as file:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**(environment or os.environ), "LC_ALL": "C", **path},
            check=False,
        )
    if ended.returncode != 0:
        _failed(step, f"`{command[0]}` ended with {ended.returncode}", log)


def _failed(step: str, observed: str, log: Path) -> None:
    lines = log.read_text(errors="replace").splitlines()
    raise BuildFailed(step, observed, log, "\n".join(lines[-15:]))
