# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Public problem reports about device plugins, and the tests that keep ours from having the same problem.

`docs/field-reports.md` is made from this table: run this file as a program.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Report:
    """What was reported, where, which tests concern it, and what else there is to say.

    `threads` are "owner/repository/issues/number". Without tests, `note` says why the report does not apply.
    """

    says: str
    threads: tuple[str, ...]
    tests: tuple[str, ...] = ()
    note: str = ""


SECTIONS: Final[dict[str, dict[str, Report]]] = {
    "Finding devices: PCI identity, selectors, names": {
        "R001": Report(
            "GPUs were offered under the name of a network card: a look-up in the PCI name database ignored the vendor.",
            ("NVIDIA/kubevirt-gpu-device-plugin/issues/106",),
            note="Not applicable: no name database is read. A resource follows from vendor and class, in one table of ids.",
        ),
        "R002": Report(
            "A GPU was offered as a RAID controller: a subsystem line of another vendor had the same digits.",
            ("NVIDIA/kubevirt-gpu-device-plugin/issues/42",),
            note="Not applicable: no name database is read.",
        ),
        "R003": Report(
            "A new GPU was not offered since no name list knew its device id.",
            (
                "NVIDIA/kubevirt-gpu-device-plugin/issues/20",
                "NVIDIA/kubevirt-gpu-device-plugin/pull/22",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_every_gpu_and_switch_of_the_vendor_is_ours_whatever_its_device_id",
            ),
        ),
        "R004": Report(
            "One resource name that was refused kept the others from being registered.",
            (
                "NVIDIA/gpu-operator/issues/551",
                "NVIDIA/gpu-operator/issues/556",
            ),
            tests=(
                "tests/cluster/test_registration.py::test_a_refused_resource_does_not_hold_up_another",
                "packages/kata-device-plugin/tests/test_resources.py::test_a_name_that_the_kubelet_or_a_cdi_reader_would_refuse_names_the_rule",
            ),
        ),
        "R008": Report(
            "Two rules for one resource name: the second replaced the first.",
            ("kubevirt/kubevirt/issues/7012",),
            tests=(
                "packages/kata-device-plugin/tests/test_resources.py::test_both_display_classes_add_up_to_one_resource",
            ),
            note="There are no rules to configure; two classes of the table lead to one resource.",
        ),
        "R009": Report(
            "A device was found by a part of its name.",
            ("k8snetworkplumbingwg/sriov-network-device-plugin/pull/489",),
            tests=(
                "tests/cluster/test_devices.py::test_addresses_that_contain_one_another_are_different_devices",
                "tests/cluster/test_allocation.py::test_an_unknown_id_fails_loudly_with_the_id_and_what_there_is",
            ),
        ),
        "R010": Report(
            "Pools that were meant to be separate all held every device.",
            (
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/181",
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/361",
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/184",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_no_device_is_in_two_resources_and_audio_functions_are_in_none",
                "packages/kata-device-plugin/tests/test_resources.py::test_every_kind_has_exactly_one_resource_and_no_two_share_a_name",
            ),
        ),
        "R011": Report(
            "A mistyped selector was dropped and the rule then matched everything.",
            ("openshift/sriov-network-operator/issues/652",),
            tests=("tests/cluster/test_command.py::test_there_are_no_flags_but_paths",),
            note="There are no selectors; every flag is a path.",
        ),
        "R012": Report(
            "A device that something outside of Kubernetes has open was handed to a pod as well.",
            (
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/369",
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/198",
            ),
            tests=("tests/cluster/test_instances.py::test_devices_that_are_open_are_listed_like_all_others",),
            note="Not applicable: the plugin opens no device node, so it can neither see nor keep out other openers. A VFIO device has one owner; the kernel refuses the second.",
        ),
        "R013": Report(
            "Whatever was on a VFIO driver was offered, also what had been bound for another purpose.",
            (),
            tests=(
                "tests/cluster/test_devices.py::test_every_gpu_and_switch_of_the_vendor_is_ours_whatever_its_device_id",
            ),
            note="Only NVIDIA GPUs and NVSwitches are offered, and binding one to a VFIO driver is the selection. A device for another purpose is left out by not giving it to VFIO on a Kata node.",
        ),
        "R014": Report(
            "Devices on the host driver, or on none, were offered for passthrough.",
            (
                "kubernetes-sigs/dra-driver-nvidia-gpu/issues/1089",
                "kubernetes-sigs/dra-driver-nvidia-gpu/pull/1090",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_of_a_bound_a_driverless_and_a_host_driven_device_only_the_bound_one_is_listed",
                "tests/node/test_boards.py::test_only_what_is_bound_to_vfio_now_is_advertised",
                "tests/node/test_boards.py::test_a_board_on_its_host_drivers_advertises_nothing",
            ),
        ),
        "R015": Report(
            "On a node with a display GPU and compute GPUs the result changed from run to run.",
            ("NVIDIA/gpu-feature-discovery/issues/27",),
            tests=("tests/cluster/test_command.py::test_a_mixed_node_is_listed_the_same_twenty_times",),
            note="A display GPU is left out by not binding it.",
        ),
        "R016": Report(
            "Virtual functions have the ids of the whole card and were mixed up with it.",
            (
                "NVIDIA/kubevirt-gpu-device-plugin/pull/192",
                "NVIDIA/gpu-operator/issues/2594",
                "kubevirt/kubevirt/pull/16890",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_a_virtual_function_is_not_offered_as_the_whole_card",
                "tests/node/test_scanner.py::test_virtual_functions_are_never_offered_as_whole_gpus",
            ),
            note="Mediated devices are not looked for.",
        ),
    },
    "Health, rescan, plugin process": {
        "R064": Report(
            "A GPU fell off the bus and was offered until the plugin was restarted.",
            (
                "NVIDIA/kubevirt-gpu-device-plugin/issues/97",
                "NVIDIA/kubevirt-gpu-device-plugin/pull/105",
                "NVIDIA/gpu-operator/pull/727",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_a_device_that_falls_off_the_bus_is_unhealthy_at_once_and_healthy_when_it_is_back",
            ),
        ),
        "R065": Report(
            "Devices that were bound after the start were not seen.",
            (
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/276",
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/178",
                "kubernetes/kubernetes/pull/77088",
                "NVIDIA/gpu-operator/issues/482",
                "NVIDIA/k8s-device-plugin/issues/34",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_devices_bound_after_the_start_appear_without_a_restart",
                "tests/cluster/test_devices.py::test_it_works_where_no_event_ever_comes",
            ),
        ),
        "R066": Report(
            "A device that was unhealthy at the start stayed so for ever.",
            ("Project-HAMi/ascend-device-plugin/issues/129",),
            tests=(
                "tests/cluster/test_registration.py::test_the_first_list_already_says_which_devices_are_unhealthy",
                "tests/cluster/test_devices.py::test_a_damaged_device_is_never_offered_hides_nobody_and_recovers_by_itself",
            ),
        ),
        "R067": Report(
            "The plugin ended when there was no device in the moment of its start.",
            ("beclab/Olares/pull/2671",),
            tests=(
                "tests/cluster/test_devices.py::test_a_node_without_anything_is_a_valid_node",
                "tests/cluster/test_devices.py::test_devices_bound_after_the_start_appear_without_a_restart",
            ),
        ),
        "R068": Report(
            "Devices in use were taken for missing after a restart.",
            ("kubevirt/kubevirt/issues/16602",),
            tests=("tests/cluster/test_instances.py::test_devices_that_are_open_are_listed_like_all_others",),
        ),
        "R069": Report(
            "The watch was lost with the directory that it watched.",
            (
                "kubevirt/kubevirt/pull/18669",
                "kubevirt/kubevirt/pull/16073",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_the_directory_of_nodes_may_be_removed_and_made_anew",
                "packages/kata-device-plugin/tests/test_watch.py::test_a_directory_that_goes_and_returns_is_told_as_a_whole_both_times_and_watched_again",
            ),
        ),
        "R070": Report(
            "The health of a group was that of whichever member was looked at last.",
            ("kubevirt/kubevirt/pull/16073",),
            tests=(
                "tests/cluster/test_devices.py::test_a_group_that_a_host_driver_shares_is_unhealthy_whichever_member_changed_last",
                "tests/cluster/test_devices.py::test_a_shared_group_is_noticed_without_any_event_too",
            ),
        ),
        "R071": Report(
            "Hardware without an optional feature was called unhealthy.",
            ("NVIDIA/k8s-device-plugin/pull/1562",),
            tests=("tests/cluster/test_devices.py::test_files_that_a_device_can_do_without_are_not_missed",),
        ),
        "R072": Report(
            "The plugin ended when the node had no inotify instances left.",
            (
                "intel/intel-device-plugins-for-kubernetes/issues/2075",
                "NVIDIA/k8s-device-plugin/issues/152",
                "k0sproject/k0s/issues/8113",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_without_inotify_it_polls_and_says_so",
                "tests/cluster/test_devices.py::test_inotify_that_is_lost_later_is_made_up_for",
                "tests/cluster/test_devices.py::test_one_watch_serves_all_resources",
                "tests/cluster/test_instances.py::test_a_directory_that_no_socket_can_be_made_in_is_told_once_and_used_when_it_can",
            ),
        ),
        "R073": Report(
            "The socket of the previous instance was in the way.",
            ("intel/intel-device-plugins-for-kubernetes/issues/1370",),
            tests=(
                "tests/cluster/test_instances.py::test_after_a_kill_the_next_instance_ends_with_the_same_list_and_removes_the_dead_sockets",
                "tests/cluster/test_instances.py::test_only_own_dead_sockets_are_removed",
                "tests/cluster/test_instances.py::test_a_directory_that_no_socket_can_be_made_in_is_told_once_and_used_when_it_can",
            ),
        ),
        "R074": Report(
            "Ids changed after maintenance, and old pods pointed at the wrong device.",
            (
                "NVIDIA/k8s-device-plugin/issues/98",
                "kubernetes-sigs/dra-driver-nvidia-gpu/issues/930",
            ),
            tests=(
                "tests/cluster/test_instances.py::test_ids_do_not_move_when_a_device_in_the_middle_is_gone_at_the_next_start",
                "tests/node/test_boards.py::test_ids_do_not_move_when_a_neighbour_goes",
            ),
        ),
        "R075": Report(
            "One lost GPU made the preferred allocation fail for every pod.",
            ("kubernetes/kubernetes/issues/97131",),
            tests=(
                "tests/cluster/test_allocation.py::test_a_lost_device_does_not_fail_requests_that_are_not_about_it",
            ),
        ),
    },
    "Kubelet: registration, restart, allocation, topology": {
        "R076": Report(
            "After a restart of the plugin the node stayed at 0.",
            (
                "kubernetes/kubernetes/issues/62773",
                "kubernetes/kubernetes/pull/63118",
                "kubernetes/kubernetes/pull/63231",
            ),
            tests=(
                "tests/cluster/test_instances.py::test_after_a_kill_the_next_instance_ends_with_the_same_list_and_removes_the_dead_sockets",
            ),
        ),
        "R077": Report(
            "Two instances overlapped in a rolling update; the end of the older one took the newer one down.",
            (
                "kubernetes/kubernetes/issues/121994",
                "kubernetes/kubernetes/issues/127803",
                "kubernetes/kubernetes/pull/135437",
                "NVIDIA/k8s-device-plugin/issues/1792",
                "kubernetes-sigs/dra-example-driver/pull/113",
            ),
            tests=(
                "tests/cluster/test_instances.py::test_after_an_overlap_the_instance_that_is_left_serves_everything",
                "tests/cluster/test_instances.py::test_two_instances_do_not_keep_registering_over_each_other",
                "tests/cluster/test_registration.py::test_each_resource_has_a_socket_of_its_own_named_for_resource_and_process",
                "tests/cluster/test_registration.py::test_a_kubelet_that_lost_the_stream_is_registered_with_again",
            ),
        ),
        "R078": Report(
            "After a reboot pods were admitted before the plugin had registered, and were refused for good.",
            (
                "kubernetes/kubernetes/issues/125579",
                "kubernetes/kubernetes/issues/128043",
                "kubernetes/kubernetes/issues/124934",
                "kubernetes/kubernetes/issues/108152",
                "squat/generic-device-plugin/issues/33",
                "squat/generic-device-plugin/issues/63",
                "project-akri/akri/issues/849",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_sixty_four_devices_are_registered_soon_after_the_start",
                "tests/node/test_scanner.py::test_facts_are_read_again_only_for_what_changed",
            ),
            note="What is read of sysfs is kept in memory by the kernel and is read once for each device. Keeping pods away until then is a matter of taints.",
        ),
        "R079": Report(
            "A pod was admitted from the checkpoint although its device did not work.",
            ("kubernetes/kubernetes/issues/67107",),
            tests=("tests/cluster/test_allocation.py::test_a_device_that_is_not_what_was_listed_is_refused_by_name",),
        ),
        "R080": Report(
            "After a kubelet restart its data was inconsistent until each plugin had registered again.",
            (
                "kubernetes/kubernetes/issues/102880",
                "kubernetes/kubernetes/pull/102882",
            ),
            tests=(
                "tests/cluster/test_registration.py::test_a_new_kubelet_socket_is_registered_with_at_once",
                "tests/cluster/test_registration.py::test_ten_restarts_in_a_row_end_with_one_registration_each",
            ),
        ),
        "R081": Report(
            "The same id was asked for twice, for an init container and another one.",
            ("kubernetes/kubernetes/issues/138446",),
            tests=("tests/cluster/test_allocation.py::test_no_books_are_kept_on_who_has_what",),
        ),
        "R082": Report(
            "A device went to a new pod while the previous hypervisor still had it open.",
            (
                "kubernetes/kubernetes/pull/137534",
                "kubernetes/kubernetes/issues/141471",
                "kubeswift-io/kubeswift/issues/602",
                "ROCm/k8s-device-plugin/issues/202",
            ),
            note="Not applicable: the plugin opens no device node and reads no other process, so it does not know who has one open; there is no option for it. The kernel refuses the second owner, and the sandbox is tried again.",
        ),
        "R083": Report(
            "Ids or resource names changed between restarts, and old ones stayed on the node at 0.",
            (
                "kubernetes/kubernetes/issues/55179",
                "kubernetes/kubernetes/issues/92396",
                "kubernetes/kubernetes/issues/64632",
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/245",
                "project-akri/akri/issues/181",
            ),
            tests=(
                "tests/cluster/test_instances.py::test_ids_and_names_are_the_same_whatever_the_order_in_which_devices_were_bound",
            ),
        ),
        "R084": Report(
            "One server for several resources mixed their lists.",
            ("kubernetes/kubernetes/issues/70350",),
            tests=(
                "tests/cluster/test_registration.py::test_each_resource_has_a_socket_of_its_own_named_for_resource_and_process",
                "tests/cluster/test_registration.py::test_a_kubelet_that_lost_the_stream_is_registered_with_again",
                "tests/cluster/test_registration.py::test_a_refused_resource_does_not_hold_up_another",
            ),
        ),
        "R085": Report(
            "With a moved kubelet directory plugins never registered; some mounted the socket file, which went stale.",
            (
                "kubernetes/kubernetes/issues/68567",
                "kubernetes/kubernetes/issues/120626",
                "kubernetes/kubernetes/issues/83226",
                "k3s-io/k3s/issues/1390",
                "k0sproject/k0s/issues/7585",
                "Mellanox/k8s-rdma-shared-dev-plugin/issues/96",
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/586",
                "kubernetes/website/pull/55430",
            ),
            tests=(
                "tests/cluster/test_instances.py::test_the_longest_directory_that_sockets_fit_in_is_served_from",
                "tests/cluster/test_registration.py::test_a_new_kubelet_socket_is_registered_with_at_once",
            ),
            note="The directory is a flag of its own, and it is the directory that is watched. The pod resources socket is not used.",
        ),
        "R086": Report(
            "A restart of the plugin was taken for the removal of its devices, or the reverse.",
            (
                "openshift/sriov-network-operator/issues/812",
                "k8snetworkplumbingwg/sriov-network-device-plugin/pull/502",
            ),
            tests=(
                "tests/cluster/test_instances.py::test_a_signal_ends_it_at_once_with_streams_open_and_leaves_the_cdi_files",
            ),
            note="A stop never marks devices unhealthy. There is no drain flag: who removes the plugin for good takes the devices off VFIO first.",
        ),
        "R087": Report(
            "After a kubelet restart everything was healthy for a moment.",
            ("kubernetes/kubernetes/issues/114422",),
            tests=(
                "tests/cluster/test_registration.py::test_the_first_list_already_says_which_devices_are_unhealthy",
                "tests/cluster/test_registration.py::test_the_first_list_after_a_registration_is_complete",
            ),
        ),
        "R088": Report(
            "A plugin with books of its own refused what the kubelet had decided.",
            ("project-akri/akri/issues/450",),
            tests=("tests/cluster/test_allocation.py::test_no_books_are_kept_on_who_has_what",),
        ),
        "R089": Report(
            "A resource name was refused: too long, without a domain, in the reserved domain.",
            (
                "intel/intel-device-plugins-for-kubernetes/issues/301",
                "networkservicemesh/networkservicemesh/issues/100",
                "koordinator-sh/koordinator/pull/1025",
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/476",
            ),
            tests=(
                "packages/kata-device-plugin/tests/test_resources.py::test_legal_names_are_taken",
                "packages/kata-device-plugin/tests/test_resources.py::test_a_name_that_the_kubelet_or_a_cdi_reader_would_refuse_names_the_rule",
            ),
            note="Names are constants of the plugin, checked when it starts.",
        ),
        "R091": Report(
            "An unknown NUMA node was reported as -1.",
            (
                "k8snetworkplumbingwg/sriov-network-device-plugin/pull/160",
                "NVIDIA/kubevirt-gpu-device-plugin/pull/86",
            ),
            tests=("tests/cluster/test_devices.py::test_a_numa_node_that_is_not_known_is_left_out",),
        ),
        "R092": Report(
            "Preferred allocations were too small, held a device twice, or took too long.",
            (
                "NVIDIA/kubevirt-gpu-device-plugin/issues/133",
                "NVIDIA/kubevirt-gpu-device-plugin/issues/125",
                "NVIDIA/kubevirt-gpu-device-plugin/pull/158",
                "NVIDIA/kubevirt-gpu-device-plugin/pull/166",
                "NVIDIA/k8s-device-plugin/issues/546",
                "kubeswift-io/kubeswift/pull/405",
                "Project-HAMi/HAMi/pull/1824",
                "NVIDIA/k8s-device-plugin/pull/460",
            ),
            tests=(
                "tests/cluster/test_allocation.py::test_a_preference_has_the_size_asked_the_fixed_ones_and_one_numa_node",
                "tests/cluster/test_allocation.py::test_a_preference_is_never_an_error",
                "tests/cluster/test_allocation.py::test_without_topology_the_order_is_that_of_the_addresses",
                "packages/kata-device-plugin/tests/test_preference.py::test_the_answer_is_unique_of_the_size_asked_keeps_what_is_fixed_and_ignores_order",
            ),
            note="Fabric partitions are not known to sysfs, and not to the plugin.",
        ),
        "R093": Report(
            "The audio function was handed over as if it had been asked for.",
            (
                "NVIDIA/kubevirt-gpu-device-plugin/pull/191",
                "NVIDIA/kubevirt-gpu-device-plugin/issues/67",
                "kubevirt/kubevirt/issues/14024",
            ),
            tests=(
                "tests/cluster/test_allocation.py::test_names_are_of_the_devices_asked_for_and_not_of_what_sits_beside_them",
            ),
            note="A VFIO device node is that of one function; companions are not handed over.",
        ),
        "R094": Report(
            "A changed configuration had no effect until pods were restarted.",
            (
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/276",
                "Mellanox/network-operator/issues/1831",
                "Mellanox/k8s-rdma-shared-dev-plugin/issues/25",
            ),
            note="Not applicable: there is no configuration but the paths on the command line.",
        ),
        "R095": Report(
            "A driver upgrade hung since the plugin kept devices open.",
            ("kubernetes-sigs/kernel-module-management/pull/1802",),
            tests=("tests/cluster/test_instances.py::test_nothing_of_a_device_is_held_open",),
        ),
    },
    "CDI, iommufd, Kata": {
        "R096": Report(
            "The group node and the device node of one GPU were both handed over.",
            (
                "NVIDIA/kubevirt-gpu-device-plugin/issues/147",
                "kubernetes-sigs/dra-driver-nvidia-gpu/pull/1036",
                "kubernetes-sigs/dra-driver-nvidia-gpu/issues/918",
                "ROCm/k8s-gpu-dra-driver/pull/114",
            ),
            tests=(
                "packages/kata-device-plugin/tests/test_cdi.py::test_a_device_has_one_character_node_and_nothing_else",
                "tests/cluster/test_allocation.py::test_the_answer_is_cdi_names_in_the_order_asked_and_each_is_in_the_file",
            ),
            note="There is one way, the device node, and no setting.",
        ),
        "R097": Report(
            "The kernel has no device nodes, and the group path does not work for confidential guests.",
            (
                "NVIDIA/k8s-kata-manager/issues/133",
                "kata-containers/kata-containers/issues/11721",
                "siderolabs/pkgs/pull/1608",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_a_kernel_without_device_nodes_is_told_with_the_devices_it_keeps_back",
                "tests/cluster/test_command.py::test_list_says_why_bound_devices_are_missing",
            ),
        ),
        "R099": Report(
            "CDI names in the guest did not fit what was allocated: prefixed twice, a version too high.",
            (
                "kata-containers/kata-containers/issues/12186",
                "kata-containers/kata-containers/issues/11624",
                "kata-containers/kata-containers/pull/11150",
                "kata-containers/kata-containers/issues/11125",
                "kata-containers/kata-containers/pull/12249",
            ),
            tests=(
                "tests/cluster/test_allocation.py::test_the_answer_is_cdi_names_in_the_order_asked_and_each_is_in_the_file",
                "testing/simcluster/tests/test_names.py::test_a_cdi_name_is_judged_as_the_oldest_reader_judges_it",
            ),
            note="Names of the host only.",
        ),
        "R100": Report(
            "The runtime looks devices up by resource name and id, and found none.",
            (
                "kata-containers/kata-containers/issues/12009",
                "kata-containers/kata-containers/pull/12087",
            ),
            tests=(
                "tests/cluster/test_allocation.py::test_the_answer_is_cdi_names_in_the_order_asked_and_each_is_in_the_file",
            ),
        ),
        "R101": Report(
            "One device came in by two ways under two names.",
            (
                "kata-containers/kata-containers/issues/13322",
                "kata-containers/kata-containers/pull/13323",
            ),
            tests=(
                "tests/cluster/test_devices.py::test_no_device_is_in_two_resources_and_audio_functions_are_in_none",
                "tests/cluster/test_cdi_directory.py::test_a_file_of_somebody_else_that_stops_sandboxes_is_told_once_until_it_is_mended",
            ),
            note="Names that another file defines as well are reported. There is no rule to leave a device to a DRA driver: do not bind it.",
        ),
        "R103": Report(
            "A CDI file was old, half written, left by a crashed instance, or its directory was missing.",
            (
                "k8snetworkplumbingwg/sriov-network-device-plugin/issues/633",
                "Mellanox/k8s-rdma-shared-dev-plugin/pull/77",
                "cncf-tags/container-device-interface/issues/78",
                "kubernetes-sigs/dra-driver-cpu/pull/31",
            ),
            tests=(
                "tests/cluster/test_cdi_directory.py::test_an_id_is_on_disk_before_the_list_that_names_it",
                "tests/cluster/test_cdi_directory.py::test_own_left_overs_are_removed_at_the_start_and_other_files_are_not_touched",
                "tests/cluster/test_cdi_directory.py::test_a_file_of_an_earlier_run_is_replaced_before_anything_is_offered",
                "packages/kata-device-plugin/tests/test_cdi.py::test_a_reader_in_a_loop_never_sees_a_torn_or_missing_file",
                "packages/kata-device-plugin/tests/test_cdi.py::test_the_directory_is_made_and_the_file_is_readable_for_everybody",
                "packages/kata-device-plugin/tests/test_cdi.py::test_own_left_overs_go_and_files_of_others_stay",
            ),
        ),
        "R105": Report(
            "One device without a node made the whole CDI file invalid.",
            ("k8snetworkplumbingwg/sriov-network-device-plugin/issues/546",),
            tests=(
                "tests/cluster/test_cdi_directory.py::test_a_device_without_a_node_is_left_out_and_the_others_are_written",
            ),
        ),
        "R106": Report(
            "Names that begin with a digit, or annotation keys that are too long, were refused.",
            (
                "cncf-tags/container-device-interface/issues/69",
                "kubernetes/kubernetes/issues/123889",
                "cncf-tags/container-device-interface/pull/43",
            ),
            tests=(
                "tests/cluster/test_allocation.py::test_the_answer_is_cdi_names_in_the_order_asked_and_each_is_in_the_file",
                "packages/kata-device-plugin/tests/test_resources.py::test_legal_names_are_taken",
            ),
            note="The file says version 0.5.0, the first that allows a leading digit. No annotations are used.",
        ),
        "R107": Report(
            "CDI was switched off in the runtime, and devices were missing without an error.",
            (
                "containerd/containerd/pull/12674",
                "NVIDIA/nvidia-container-toolkit/issues/1239",
                "kubernetes/kubernetes/pull/118254",
            ),
            tests=(
                "tests/cluster/test_allocation.py::test_the_answer_is_cdi_names_in_the_order_asked_and_each_is_in_the_file",
            ),
            note="There is one way, the CDI field; everything else in the answer is empty. What a runtime without CDI makes of it is not seen from here.",
        ),
        "R108": Report(
            "After a crash loop the kernel refused the device to everybody until a reboot.",
            ("kata-containers/kata-containers/issues/13179",),
            note="Not applicable: the plugin opens no device node, so it does not see that opening fails.",
        ),
        "R109": Report(
            "A second preparation failed; or the sandbox lacked a node that the hypervisor opens.",
            (
                "kubernetes-sigs/dra-driver-nvidia-gpu/issues/1330",
                "kubernetes-sigs/dra-driver-nvidia-gpu/issues/1331",
                "kata-containers/runtime/issues/2605",
            ),
            tests=(
                "tests/cluster/test_allocation.py::test_the_answer_is_cdi_names_in_the_order_asked_and_each_is_in_the_file",
            ),
            note="Preparation is not the plugin's. It names the node of the device; /dev/iommu belongs to no device and is the runtime's.",
        ),
    },
}

FIELD: Final[dict[str, Report]] = {row: report for rows in SECTIONS.values() for row, report in rows.items()}

_HEAD: Final = """\
<!-- SPDX-FileCopyrightText: The kata-devices Authors -->
<!-- SPDX-License-Identifier: Apache-2.0 -->
# Field reports

What people who run device plugins, VFIO and Kata have reported in public, and which test keeps this plugin from having
the same problem. A report that does not apply says why. Made from `tests/cluster/field_rows.py`; a test holds the two
together and checks that every test named here exists.
"""


def document() -> str:
    """Return docs/field-reports.md."""
    parts = [_HEAD]
    for section, rows in SECTIONS.items():
        parts.append(f"\n## {section}\n\n| row | report | threads | tests, or why none |\n| --- | --- | --- | --- |\n")
        for row, report in rows.items():
            threads = "<br>".join(_link(thread) for thread in report.threads)
            answer = "<br>".join([*(_named(test) for test in report.tests), *([report.note] if report.note else [])])
            parts.append(f"| {row} | {report.says} | {threads} | {answer} |\n")
    return "".join(parts)


def _link(thread: str) -> str:
    owner, repository, _, number = thread.split("/")
    return f"[{owner}/{repository}#{number}](https://github.com/{thread})"


def _named(test: str) -> str:
    path, _, name = test.partition("::")
    return f"`{path.rpartition('/')[2]}` {name.removeprefix('test_').replace('_', ' ')}"


if __name__ == "__main__":
    sys.stdout.write(document())
