# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Named boards: what a host with one of them shows on its PCI bus.

GPUs and NVSwitches are bound to the VFIO driver that serves them, their neighbours to their host drivers, as on a
node that is ready for guests; `unbound` gives the same host before that.

What is known and what is guessed. Vendor, device and class ids, and the number of GPUs and switch functions, come
from the sources named at each board. Subsystem ids are pairs that NVIDIA's administration tool lists for the part
(gpu-admin-tools gpu/devid_properties.py). Addresses, NUMA nodes, IOMMU groups and the bridges above a function are a
guess of ours wherever a board does not say otherwise: plausible, never contradicting the sources, and nothing under
test may depend on them. Every GPU gets an IOMMU group of its own, which is what servers with access control services
on every port show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from simnode.node import Device, Kernel, Node

NVIDIA: Final = 0x10DE
MELLANOX: Final = 0x15B3
INTEL: Final = 0x8086
AMD: Final = 0x1022
BROADCOM: Final = 0x1000
SAMSUNG: Final = 0x144D
ASPEED: Final = 0x1A03

CLASS_NVME: Final = 0x010802
CLASS_ETHERNET: Final = 0x020000
CLASS_INFINIBAND: Final = 0x020700
CLASS_VGA: Final = 0x030000
CLASS_3D: Final = 0x030200
CLASS_AUDIO: Final = 0x040300
CLASS_HOST_BRIDGE: Final = 0x060000
CLASS_PCI_BRIDGE: Final = 0x060400
CLASS_OTHER_BRIDGE: Final = 0x068000

VFIO: Final = "vfio-pci"
VFIO_GRACE: Final = "nvgrace_gpu_vfio_pci"
"""Source: Linux drivers/vfio/pci/nvgrace-gpu/main.c, registered under KBUILD_MODNAME."""


class _Builder:
    """Collects functions and hands out IOMMU groups in the order in which they are added."""

    def __init__(self) -> None:
        self.devices: list[Device] = []
        self._groups = 0

    def group(self) -> int:
        number = self._groups
        self._groups += 1
        return number

    def add(
        self,
        address: str,
        ids: tuple[int, int],
        class_code: int,
        parents: tuple[str, ...],
        *,
        subsystem: tuple[int, int] = (0, 0),
        driver: str | None = None,
        numa: int | None = None,
        group: int | None = None,
    ) -> tuple[str, ...]:
        """Add a function in a group of its own unless told which; return the parents of what sits below it."""
        self.devices.append(
            Device(
                address=address,
                vendor=ids[0],
                device=ids[1],
                class_code=class_code,
                parents=parents,
                subsystem_vendor=subsystem[0],
                subsystem_device=subsystem[1],
                driver=driver,
                numa=numa,
                iommu_group=self.group() if group is None else group,
            )
        )
        return (*parents, address)

    def host(self, domain: str, bus: int, *, ids: tuple[int, int], numa: int | None) -> tuple[str, ...]:
        """Add a root's own function 00.0 and return the root."""
        root = (f"pci{domain}:{bus:02x}",)
        self.add(f"{domain}:{bus:02x}:00.0", ids, CLASS_HOST_BRIDGE, root, numa=numa)
        return root

    def port(
        self, parents: tuple[str, ...], address: str, *, ids: tuple[int, int], numa: int | None
    ) -> tuple[str, ...]:
        """Add a port and return the parents of what sits behind it."""
        return self.add(address, ids, CLASS_PCI_BRIDGE, parents, driver="pcieport", numa=numa)

    def node(self, name: str) -> Node:
        return Node(name=name, devices=tuple(self.devices))


_INTEL_HOST: Final = (INTEL, 0x09A2)
_INTEL_PORT: Final = (INTEL, 0x352A)
_AMD_HOST: Final = (AMD, 0x14A4)
_AMD_PORT: Final = (AMD, 0x14A5)
_GRACE_PORT: Final = (NVIDIA, 0x22B1)
_PEX: Final = (BROADCOM, 0xC030)
_CONNECTX7: Final = (MELLANOX, 0x1021)
_CONNECTX8: Final = (MELLANOX, 0x1023)
_BLUEFIELD3: Final = (MELLANOX, 0xA2DC)
_ASPEED_VGA: Final = (ASPEED, 0x2000)
_NVME: Final = (SAMSUNG, 0xA80A)

# The buses of a DGX H100's eight PCIe switches, from its compute NICs: ibp24s0 is bus 0x18 and so on, four on each
# processor. The GPUs follow three buses later, as that system's own tools list them (1b, 43, 52, 61, 9d, c3, d1, df).
# Source: NVIDIA DGX H100 User Guide, table "Network Modules"
_DGX_NIC_BUSES: Final = (0x18, 0x40, 0x4F, 0x5E, 0x9A, 0xC0, 0xCE, 0xDC)


def _sxm_board(
    name: str,
    *,
    gpu: int,
    subsystem: int,
    nic: tuple[int, int],
    switches: int,
    fabric_functions: int,
) -> Node:
    """Eight SXM GPUs, each with a NIC behind its own PCIe switch, on a two-socket host laid out as a DGX."""
    board = _Builder()
    # Socket 0 also has the management controller's display, and the NVSwitches or what stands for them.
    root = board.host("0000", 0x00, ids=_INTEL_HOST, numa=0)
    behind = board.port(root, "0000:00:0c.0", ids=_INTEL_PORT, numa=0)
    display = board.port(behind, "0000:01:00.0", ids=(ASPEED, 0x1150), numa=0)
    board.add("0000:02:00.0", _ASPEED_VGA, CLASS_VGA, display, driver="ast", numa=0)
    behind = board.port(root, "0000:00:0e.0", ids=_INTEL_PORT, numa=0)
    behind = board.port(behind, "0000:03:00.0", ids=_PEX, numa=0)
    for index in range(switches):
        down = board.port(behind, f"0000:04:{index:02x}.0", ids=_PEX, numa=0)
        board.add(
            f"0000:{5 + index:02x}:00.0",
            (NVIDIA, 0x22A3),
            CLASS_OTHER_BRIDGE,
            down,
            subsystem=(NVIDIA, 0x1796),
            driver=VFIO,
            numa=0,
        )
    for index in range(fabric_functions // 4):
        down = board.port(behind, f"0000:04:{index:02x}.0", ids=_PEX, numa=0)
        for number in range(4):
            board.add(
                f"0000:{5 + index:02x}:00.{number}",
                _CONNECTX7,
                CLASS_INFINIBAND,
                down,
                subsystem=(MELLANOX, 0x0041),
                driver="mlx5_core",
                numa=0,
            )
    for index, bus in enumerate(_DGX_NIC_BUSES):
        numa = index // 4
        root = board.host("0000", bus - 3, ids=_INTEL_HOST, numa=numa)
        behind = board.port(root, f"0000:{bus - 3:02x}:01.0", ids=_INTEL_PORT, numa=numa)
        behind = board.port(behind, f"0000:{bus - 2:02x}:00.0", ids=_PEX, numa=numa)
        down = board.port(behind, f"0000:{bus - 1:02x}:00.0", ids=_PEX, numa=numa)
        board.add(f"0000:{bus:02x}:00.0", nic, CLASS_INFINIBAND, down, driver="mlx5_core", numa=numa)
        down = board.port(behind, f"0000:{bus - 1:02x}:02.0", ids=_PEX, numa=numa)
        board.add(f"0000:{bus + 1:02x}:00.0", _NVME, CLASS_NVME, down, driver="nvme", numa=numa)
        down = board.port(behind, f"0000:{bus - 1:02x}:04.0", ids=_PEX, numa=numa)
        board.add(
            f"0000:{bus + 3:02x}:00.0",
            (NVIDIA, gpu),
            CLASS_3D,
            down,
            subsystem=(NVIDIA, subsystem),
            driver=VFIO,
            numa=numa,
        )
    return board.node(name)


def hgx_h100() -> Node:
    """Return eight H100 SXM GPUs and four NVSwitches of the third generation, laid out as a DGX H100.

    Source: pci.ids (10de:2330, 10de:22a3); gpu-admin-tools pci/devices.py (class 0680 is a switch); NVIDIA DGX H100
    User Guide (eight GPUs, four NVSwitches, NIC names); NVIDIA k8s-test-infra pull request 882 (switches on buses 05 to
    08). The switches' subsystem id and the bridges are from listings of single machines, or a guess.
    """
    return _sxm_board("hgx_h100", gpu=0x2330, subsystem=0x16C1, nic=_CONNECTX7, switches=4, fabric_functions=0)


def hgx_h200() -> Node:
    """Return eight H200 SXM GPUs and four NVSwitches of the third generation.

    Source: pci.ids (10de:2335, 10de:22a3). The layout is that of `hgx_h100`, a guess.
    """
    return _sxm_board("hgx_h200", gpu=0x2335, subsystem=0x18BE, nic=_CONNECTX7, switches=4, fabric_functions=0)


def hgx_b200() -> Node:
    """Return eight B200 SXM GPUs. No NVSwitch shows on PCI; the fabric is managed through ConnectX-7 functions instead.

    Source: pci.ids (10de:2901); NVIDIA DGX B200 User Guide (a listing of vendor 10de with GPUs only, as far as it is
    printed); kata-containers pcilibs-rs nvlink.rs and kata-containers pull request 12551 (an InfiniBand bridge manages
    the switches). That there are two bridge devices of four functions each is a guess, and so are their places.
    """
    return _sxm_board("hgx_b200", gpu=0x2901, subsystem=0x1999, nic=_CONNECTX7, switches=0, fabric_functions=8)


def hgx_b300() -> Node:
    """Return eight B300 SXM GPUs. No NVSwitch shows on PCI, as on `hgx_b200`.

    Source: kata-containers pcilibs-rs platform.rs (10de:3182 with subsystem 20e6 on a ConnectX-managed board). Bridge
    functions and layout are a guess, and that its NICs are ConnectX-8 (15b3:1023) sitting as on `hgx_h100`.
    """
    return _sxm_board("hgx_b300", gpu=0x3182, subsystem=0x20E6, nic=_CONNECTX8, switches=0, fabric_functions=8)


def _coherent_tray(
    name: str, *, domains: Iterable[str], gpu: int, subsystem: int, nic: tuple[int, int], gpus_per_socket: int
) -> Node:
    """Grace or Vera processors with GPUs on their coherent link, each in a PCI domain of its own."""
    board = _Builder()
    # The root ports of these machines are their roots' function 00.0; there is no host bridge function beside them.
    root: tuple[str, ...] = ("pci0000:00",)
    behind = board.port(root, "0000:00:00.0", ids=_GRACE_PORT, numa=0)
    board.add("0000:01:00.0", nic, CLASS_INFINIBAND, behind, driver="mlx5_core", numa=0)
    root = ("pci0004:00",)
    behind = board.port(root, "0004:00:00.0", ids=_GRACE_PORT, numa=0)
    board.add("0004:01:00.0", _NVME, CLASS_NVME, behind, driver="nvme", numa=0)
    for index, domain in enumerate(domains):
        numa = index // gpus_per_socket
        behind = board.port((f"pci{domain}:00",), f"{domain}:00:00.0", ids=_GRACE_PORT, numa=numa)
        board.add(
            f"{domain}:01:00.0",
            (NVIDIA, gpu),
            CLASS_3D,
            behind,
            subsystem=(NVIDIA, subsystem),
            driver=VFIO_GRACE,
            numa=numa,
        )
    return board.node(name)


def gh200() -> Node:
    """Return one GH200: a Hopper GPU on a Grace processor.

    Source: Linux nvgrace-gpu/main.c (10de:2345 is GH200 480GB); NVIDIA nvtrust issue 30 (GPU at 0009:01:00.0 behind
    root port 10de:22b1 at 0009:00:00.0). The other functions are a guess.
    """
    return _coherent_tray("gh200", domains=("0009",), gpu=0x2345, subsystem=0x16ED, nic=_BLUEFIELD3, gpus_per_socket=1)


def gb200_tray() -> Node:
    """Return a GB200 compute tray: two Grace processors with two Blackwell GPUs each; the switches are elsewhere.

    Source: Linux nvgrace-gpu/main.c (10de:2941); gpu-admin-tools gpu/devid_properties.py (subsystem 2046). The
    domains 0008, 0009, 0018 and 0019 are a guess.
    """
    return _coherent_tray(
        "gb200_tray",
        domains=("0008", "0009", "0018", "0019"),
        gpu=0x2941,
        subsystem=0x2046,
        nic=_CONNECTX7,
        gpus_per_socket=2,
    )


def gb300_tray() -> Node:
    """Return a GB300 compute tray: two Grace processors with two Blackwell Ultra GPUs each.

    Source: Linux nvgrace-gpu/main.c (10de:31c2); gpu-admin-tools gpu/devid_properties.py (subsystem 21f1). The
    domains are a guess, as on `gb200_tray`.
    """
    return _coherent_tray(
        "gb300_tray",
        domains=("0008", "0009", "0018", "0019"),
        gpu=0x31C2,
        subsystem=0x21F1,
        nic=_CONNECTX8,
        gpus_per_socket=2,
    )


def vera_rubin_tray() -> Node:
    """Return a Vera Rubin compute tray, as far as public sources go: four coherent Rubin GPUs.

    Source: gpu-admin-tools (2026) gpu/devid_chips.py and devid_properties.py (10de:3041 with subsystem 221a). The
    number of GPUs, that the Grace VFIO driver will take them, domains and neighbours are a guess.
    """
    return _coherent_tray(
        "vera_rubin_tray",
        domains=("0008", "0009", "0018", "0019"),
        gpu=0x3041,
        subsystem=0x221A,
        nic=_CONNECTX8,
        gpus_per_socket=2,
    )


def pcie_h100_nvl() -> Node:
    """Return four H100 NVL cards in a two-socket server; pairs are joined by an NVLink bridge that PCI does not show.

    Source: pci.ids (10de:2321); gpu-admin-tools gpu/devid_properties.py (subsystem 1839). The layout is a guess.
    """
    board = _Builder()
    for index, bus in enumerate((0x15, 0x26, 0x84, 0xA5)):
        numa = index // 2
        root = board.host("0000", bus, ids=_INTEL_HOST, numa=numa)
        behind = board.port(root, f"0000:{bus:02x}:01.0", ids=_INTEL_PORT, numa=numa)
        board.add(
            f"0000:{bus + 1:02x}:00.0",
            (NVIDIA, 0x2321),
            CLASS_3D,
            behind,
            subsystem=(NVIDIA, 0x1839),
            driver=VFIO,
            numa=numa,
        )
    root = board.host("0000", 0xC5, ids=_INTEL_HOST, numa=1)
    behind = board.port(root, "0000:c5:01.0", ids=_INTEL_PORT, numa=1)
    board.add("0000:c6:00.0", _CONNECTX7, CLASS_ETHERNET, behind, driver="mlx5_core", numa=1)
    board.add("0000:c6:00.1", _CONNECTX7, CLASS_ETHERNET, behind, driver="mlx5_core", numa=1)
    return board.node("pcie_h100_nvl")


def _workstation_card(board: _Builder, root: tuple[str, ...], bus: int, *, gpu: int, subsystem: int) -> None:
    """Add a card that can drive a display: a VGA controller, and an audio function in the same IOMMU group."""
    domain_bus = root[0].removeprefix("pci")
    behind = board.port(root, f"{domain_bus}:01.1", ids=_AMD_PORT, numa=0)
    group = board.group()
    # The audio function goes along: a group with a foreign driver in it can't be handed to a guest.
    board.add(
        f"0000:{bus:02x}:00.0",
        (NVIDIA, gpu),
        CLASS_VGA,
        behind,
        subsystem=(NVIDIA, subsystem),
        driver=VFIO,
        numa=0,
        group=group,
    )
    board.add(
        f"0000:{bus:02x}:00.1",
        (NVIDIA, 0x22E8),
        CLASS_AUDIO,
        behind,
        subsystem=(NVIDIA, subsystem),
        driver=VFIO,
        numa=0,
        group=group,
    )


def rtx_pro_6000() -> Node:
    """Return two RTX PRO 6000 Blackwell Workstation cards and two of the Server Edition, on one processor.

    A workstation card shows a VGA controller (0300) and an audio function (0403); a server card, in its default mode
    without display outputs, a 3D controller (0302) alone.

    Source: pci.ids (10de:2bb1, 10de:2bb5, audio 10de:22e8); bigstack-oss cubecos issue 312 (10de:2bb5 listed as 3D
    controller). Subsystem ids and layout are a guess.
    """
    board = _Builder()
    root = board.host("0000", 0x00, ids=_AMD_HOST, numa=0)
    behind = board.port(root, "0000:00:05.1", ids=_AMD_PORT, numa=0)
    board.add("0000:0a:00.0", _ASPEED_VGA, CLASS_VGA, behind, driver="ast", numa=0)
    for bus in (0x20, 0x40):
        _workstation_card(board, board.host("0000", bus, ids=_AMD_HOST, numa=0), bus + 1, gpu=0x2BB1, subsystem=0x204B)
    for bus in (0x60, 0x80):
        root = board.host("0000", bus, ids=_AMD_HOST, numa=0)
        behind = board.port(root, f"0000:{bus:02x}:01.1", ids=_AMD_PORT, numa=0)
        board.add(
            f"0000:{bus + 1:02x}:00.0",
            (NVIDIA, 0x2BB5),
            CLASS_3D,
            behind,
            subsystem=(NVIDIA, 0x204E),
            driver=VFIO,
            numa=0,
        )
    root = board.host("0000", 0xE0, ids=_AMD_HOST, numa=0)
    behind = board.port(root, "0000:e0:03.1", ids=_AMD_PORT, numa=0)
    board.add("0000:e1:00.0", _CONNECTX7, CLASS_ETHERNET, behind, driver="mlx5_core", numa=0)
    return board.node("rtx_pro_6000")


def vgpu_host() -> Node:
    """Return an RTX PRO 6000 Server Edition that is cut into four virtual functions, two of them on vfio-pci.

    The virtual functions show the vendor, device and class of the whole card; only the link `physfn` tells them apart.
    There is no NVLink, no second card, and nothing that a guest could have whole.

    Source: bigstack-oss cubecos issue 312 (virtual functions 3D controller 10de:2bb5). Addresses are a guess.
    """
    board = _Builder()
    root = board.host("0000", 0x80, ids=_INTEL_HOST, numa=1)
    behind = board.port(root, "0000:80:01.0", ids=_INTEL_PORT, numa=1)
    card = (NVIDIA, 0x2BB5)
    board.add("0000:8c:00.0", card, CLASS_3D, behind, subsystem=(NVIDIA, 0x204E), driver="nvidia", numa=1)
    for number, driver in ((3, "nvidia"), (4, "nvidia"), (5, VFIO), (6, VFIO)):
        board.add(f"0000:8c:03.{number}", card, CLASS_3D, behind, subsystem=(NVIDIA, 0), driver=driver, numa=1)
        board.devices[-1] = replace(board.devices[-1], vf_of="0000:8c:00.0")
    return board.node("vgpu_host")


def mixed() -> Node:
    """Return what nobody would buy and somebody has: H100 PCIe, a workstation card, and odd neighbours.

    Also here: a GPU without a NUMA node, a disk behind an Intel VMD domain wider than four digits, a GPU behind one,
    a network card with two virtual functions of which one is on a VFIO driver, and a GPU on its host driver.

    Source: pci.ids (10de:2331, 10de:2bb1, 10de:22a4); Linux drivers/pci/controller/vmd.c (domains from 0x10000). VMD
    takes disks; a GPU behind it is fiction, for the sake of an address that is wider than most.
    """
    board = _Builder()
    root = board.host("0000", 0x00, ids=_INTEL_HOST, numa=0)
    behind = board.port(root, "0000:00:0c.0", ids=_INTEL_PORT, numa=0)
    board.add("0000:03:00.0", _ASPEED_VGA, CLASS_VGA, behind, driver="ast", numa=0)
    root = board.host("0000", 0x15, ids=_INTEL_HOST, numa=0)
    behind = board.port(root, "0000:15:01.0", ids=_INTEL_PORT, numa=0)
    board.add("0000:16:00.0", (NVIDIA, 0x2331), CLASS_3D, behind, subsystem=(NVIDIA, 0x1626), driver=VFIO, numa=0)
    behind = board.port(root, "0000:15:03.0", ids=_INTEL_PORT, numa=0)
    # No NUMA node: firmware that tells none is common enough.
    board.add("0000:17:00.0", (NVIDIA, 0x2331), CLASS_3D, behind, subsystem=(NVIDIA, 0x1626), driver=VFIO)
    behind = board.port(root, "0000:15:05.0", ids=_INTEL_PORT, numa=0)
    board.add("0000:18:00.0", (NVIDIA, 0x2331), CLASS_3D, behind, subsystem=(NVIDIA, 0x1626), driver="nvidia", numa=0)
    _workstation_card(board, board.host("0000", 0x40, ids=_AMD_HOST, numa=0), 0x41, gpu=0x2BB1, subsystem=0x204B)
    # A bridge of NVIDIA's that carries others (0604) is no switch.
    root = board.host("0000", 0x50, ids=_INTEL_HOST, numa=1)
    behind = board.port(root, "0000:50:01.0", ids=(NVIDIA, 0x22A4), numa=1)
    board.add("0000:51:00.0", _CONNECTX7, CLASS_ETHERNET, behind, driver="mlx5_core", numa=1)
    for number, driver in ((1, "mlx5_core"), (2, "mlx5_vfio_pci")):
        board.add(f"0000:51:00.{number}", (MELLANOX, 0x101E), CLASS_ETHERNET, behind, driver=driver, numa=1)
        board.devices[-1] = replace(board.devices[-1], vf_of="0000:51:00.0")
    # Intel VMD: one function whose bus is a domain of its own.
    root = board.host("0000", 0x60, ids=_INTEL_HOST, numa=1)
    opened = board.add("0000:60:00.5", (INTEL, 0x28C0), 0x010400, root, driver="vmd", numa=1)
    inner = (*opened, "pci10000:00")
    behind = board.port(inner, "10000:00:02.0", ids=_INTEL_PORT, numa=1)
    board.add("10000:01:00.0", _NVME, CLASS_NVME, behind, driver="nvme", numa=1)
    behind = board.port(inner, "10000:00:04.0", ids=_INTEL_PORT, numa=1)
    board.add("10000:02:00.0", (NVIDIA, 0x2331), CLASS_3D, behind, subsystem=(NVIDIA, 0x1626), driver=VFIO, numa=1)
    return board.node("mixed")


def no_iommu() -> Node:
    """Return two H100 NVL cards on a host whose IOMMU is off: no groups, and vfio-pci refuses every function."""
    node = unbound(pcie_h100_nvl())
    return Node(
        name="no_iommu",
        devices=tuple(replace(device, iommu_group=None) for device in node.devices),
        kernel=Kernel(iommu=False),
    )


def no_cdev_kernel() -> Node:
    """Return `pcie_h100_nvl` on a kernel without VFIO_DEVICE_CDEV: groups and VFIO devices, but no device nodes.

    Source: observed on Linux 7.3 as Debian builds it: class vfio-dev has entries without a `dev` attribute.
    """
    return replace(pcie_h100_nvl(), name="no_cdev_kernel", kernel=Kernel(device_nodes=False))


def old_kernel() -> Node:
    """Return `pcie_h100_nvl` on a kernel before v6.1, which shows no VFIO devices in sysfs at all, only group nodes."""
    return replace(pcie_h100_nvl(), name="old_kernel", kernel=Kernel(vfio_class=False, device_nodes=False))


def empty() -> Node:
    """Return a host without a single device that a guest could have."""
    board = _Builder()
    root = board.host("0000", 0x00, ids=_INTEL_HOST, numa=0)
    behind = board.port(root, "0000:00:0c.0", ids=_INTEL_PORT, numa=0)
    board.add("0000:03:00.0", _ASPEED_VGA, CLASS_VGA, behind, driver="ast", numa=0)
    behind = board.port(root, "0000:00:0e.0", ids=_INTEL_PORT, numa=0)
    board.add("0000:04:00.0", _NVME, CLASS_NVME, behind, driver="nvme", numa=0)
    return board.node("empty")


def thousand_gpus(count: int = 1000) -> Node:
    """Return as many H100 as asked for, eight behind each port, every third root in a domain wider than four digits.

    No such machine exists; it is for tests of scale.
    """
    board = _Builder()
    for number in range((count + 7) // 8):
        domain = f"{0x10000 + number:04x}" if number % 3 == 2 else f"{number:04x}"
        numa = number % 8
        root = (f"pci{domain}:00",)
        behind = board.port(root, f"{domain}:00:01.0", ids=_INTEL_PORT, numa=numa)
        for index in range(min(8, count - 8 * number)):
            board.add(
                f"{domain}:01:{index:02x}.0",
                (NVIDIA, 0x2330),
                CLASS_3D,
                behind,
                subsystem=(NVIDIA, 0x16C1),
                driver=VFIO,
                numa=numa,
            )
    return board.node("thousand_gpus")


def unbound(node: Node) -> Node:
    """Return the same host before anything was bound for guests: GPUs on nvidia, switches on none, audio on its own.

    Source: nvidia (open-gpu-kernel-modules) claims both GPU classes; snd_hda_intel is the kernel's audio driver.
    """
    host_drivers = {CLASS_3D: "nvidia", CLASS_VGA: "nvidia", CLASS_AUDIO: "snd_hda_intel", CLASS_OTHER_BRIDGE: None}
    return replace(
        node,
        devices=tuple(
            replace(device, driver=host_drivers[device.class_code])
            if device.on_vfio and device.class_code in host_drivers
            else device
            for device in node.devices
        ),
    )


ALL: Final[dict[str, Callable[[], Node]]] = {
    "hgx_h100": hgx_h100,
    "hgx_h200": hgx_h200,
    "hgx_b200": hgx_b200,
    "hgx_b300": hgx_b300,
    "gb200_tray": gb200_tray,
    "gb300_tray": gb300_tray,
    "gh200": gh200,
    "vera_rubin_tray": vera_rubin_tray,
    "pcie_h100_nvl": pcie_h100_nvl,
    "rtx_pro_6000": rtx_pro_6000,
    "vgpu_host": vgpu_host,
    "mixed": mixed,
    "no_iommu": no_iommu,
    "no_cdev_kernel": no_cdev_kernel,
    "old_kernel": old_kernel,
    "empty": empty,
    "thousand_gpus": thousand_gpus,
}
"""Every board by name."""
