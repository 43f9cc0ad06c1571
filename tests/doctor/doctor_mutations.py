"""What can be wrong with good facts: small named changes, each with the check that must see it."""

from __future__ import annotations

import base64
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from doctor_root import header, receipt

from spark_appliance.doctor.document import Document
from spark_appliance.doctor.registry import Answer, Bandwidth, Facts
from spark_appliance.errors import Problem
from spark_appliance.model.plan import ImagePlan
from spark_appliance.names import ENGINE, NFS_SERVER

GIB = 1 << 30
NODE = "spark2"
P0, P0_TWIN, P1 = "enp1s0f0np0", "enP2p1s0f0np0", "enp1s0f1np1"
R0 = "rocep1s0f0"

Mutation = Callable[[Facts], Facts]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    check: str
    status: str
    mutate: Mutation
    also: frozenset[str]
    dgx: bool


CASES: list[Case] = []


def bad(
    check: str, status: str = "fail", *, also: tuple[str, ...] = (), dgx: bool = False
) -> Callable[[Mutation], Mutation]:
    """Register a change. ``also``: checks that must see it too, since it is their fact as well."""

    def register(function: Mutation) -> Mutation:
        CASES.append(Case(function.__name__, check, status, function, frozenset(also), dgx))
        return function

    return register


def change(facts: Facts, edit: Callable[[dict[str, Any]], None], node: str = NODE) -> Facts:
    """Return the facts with one node's sections changed by ``edit``."""
    answer = facts.answers[node]
    assert answer.document is not None
    data = copy.deepcopy(answer.document.data)
    edit(data["sections"])
    changed = dataclasses.replace(answer, document=Document(data))
    return dataclasses.replace(facts, answers={**facts.answers, node: changed})


def put(facts: Facts, *path: Any, node: str = NODE) -> Facts:
    """Return the facts with the value at a path (its last word is the value) replaced."""
    *keys, last, value = path

    def edit(sections: dict[str, Any]) -> None:
        place: Any = sections
        for key in keys:
            place = place[key]
        place[last] = value

    return change(facts, edit, node)


def everywhere(facts: Facts, *path: Any) -> Facts:
    for node in facts.plan.nodes:
        facts = put(facts, *path, node=node.name)
    return facts


def with_plan(facts: Facts, **changes: Any) -> Facts:
    return dataclasses.replace(facts, plan=facts.plan.model_copy(update=changes))


def with_node(facts: Facts, name: str, **changes: Any) -> Facts:
    nodes = [
        node.model_copy(update=changes) if node.name == name else node for node in facts.plan.nodes
    ]
    return with_plan(facts, nodes=nodes)


def unit(facts: Facts, name: str, node: str = NODE, **values: str) -> Facts:
    state = {"load": "loaded", "active": "active", "sub": "running", "file": "enabled"}
    return put(
        facts, "services", "units", name, {**state, "result": "success", **values}, node=node
    )


def without(sections: Any, *path: Any) -> None:
    *keys, last = path
    for key in keys:
        sections = sections[key]
    del sections[last]


def _problem(facts: Facts, rule: str, severity: str = "error") -> Facts:
    return dataclasses.replace(
        facts, problems=(Problem(rule, "wrong", "do it right", None, severity),)
    )


# --- config -------------------------------------------------------------------------------------


@bad("CFG.FILE")
def profile_for_other_count(facts: Facts) -> Facts:
    return _problem(facts, "profile.node-count")


@bad("CFG.TOPOLOGY")
def twins_share_a_subnet(facts: Facts) -> Facts:
    return _problem(facts, "topology.twins-share-subnet")


@bad("CFG.PARALLEL")
def ep_does_not_divide(facts: Facts) -> Facts:
    return _problem(facts, "parallel.ep")


@bad("CFG.MEMORY")
def plan_does_not_fit(facts: Facts) -> Facts:
    return _problem(facts, "memory.does-not-fit")


@bad("CFG.ENV", "warn")
def buffers_not_bounded(facts: Facts) -> Facts:
    return _problem(facts, "engine.nccl-buffers", "warning")


@bad("CFG.PORT")
def port_twice(facts: Facts) -> Facts:
    return _problem(facts, "ports.used-twice")


@bad("CFG.STORAGE")
def nfs_on_a_ring(facts: Facts) -> Facts:
    return _problem(facts, "weights.nfs-ring")


@bad("CFG.API", "warn")
def endpoint_without_key(facts: Facts) -> Facts:
    return _problem(facts, "api.no-key", "warning")


@bad("CFG.LOCK")
def lock_is_stale(facts: Facts) -> Facts:
    return dataclasses.replace(facts, lock_state="stale")


@bad("CFG.LOCK", "warn")
def lock_is_absent(facts: Facts) -> Facts:
    return dataclasses.replace(facts, lock_state="absent")


@bad("CFG.PLANES", "warn", also=("NCCL.MARKER",))
def ring_without_planes(facts: Facts) -> Facts:
    return with_plan(facts, topology=facts.plan.topology.model_copy(update={"kind": "ring"}))


# --- access -------------------------------------------------------------------------------------


@bad("ACCESS.PROBE")
def mount_hangs(facts: Facts) -> Facts:
    return put(facts, "checkpoint", "errors", {"extents": "no answer within 20 s"})


@bad("ACCESS.PROBE", "warn")
def section_broke(facts: Facts) -> Facts:
    return put(facts, "pci", "errors", {"*": "ValueError: x"})


@bad("ACCESS.ROOT", "warn")
def no_root(facts: Facts) -> Facts:
    answer = facts.answers[NODE]
    changed = dataclasses.replace(answer, document=Document({**answer.document.data, "uid": 1000}))
    return dataclasses.replace(facts, answers={**facts.answers, NODE: changed})


@bad("ACCESS.DISTINCT")
def one_machine_twice(facts: Facts) -> Facts:
    return put(facts, "system", "boot_id", "00000000-boot")


@bad("ACCESS.NAME")
def nodes_exchanged(facts: Facts) -> Facts:
    return put(facts, "system", "hostname", "spark3")


@bad("ACCESS.NAME", "warn")
def host_has_another_name(facts: Facts) -> Facts:
    return put(facts, "system", "hostname", "promaxgb10.example.org")


def _clock(facts: Facts, offset: float) -> Facts:
    answer = facts.answers[NODE]
    data = dict(answer.document.data)
    data["started"] += offset
    data["ended"] += offset
    changed = dataclasses.replace(answer, document=Document(data))
    return dataclasses.replace(facts, answers={**facts.answers, NODE: changed})


@bad("ACCESS.CLOCK")
def clock_an_hour_ahead(facts: Facts) -> Facts:
    return _clock(facts, 3600)


@bad("ACCESS.CLOCK")
def clock_an_hour_behind(facts: Facts) -> Facts:
    return _clock(facts, -3600)


@bad("ACCESS.CLOCK", "warn")
def clock_ten_seconds_behind(facts: Facts) -> Facts:
    return _clock(facts, -10)


@bad("ACCESS.CLOCK", "warn")
def clock_not_synchronised(facts: Facts) -> Facts:
    return put(facts, "clock", "timedatectl", {"NTPSynchronized": "no"})


# --- host ---------------------------------------------------------------------------------------


@bad("HOST.ARCH")
def not_a_spark(facts: Facts) -> Facts:
    return put(facts, "system", "machine", "x86_64")


def _kernel(facts: Facts, kernel: str, *cmdline: str) -> Facts:
    facts = everywhere(facts, "system", "kernel", kernel)
    return everywhere(facts, "system", "cmdline", ["ro", *cmdline])


@bad("HOST.KERNEL_KHO")
def kernel_7_without_kho_off(facts: Facts) -> Facts:
    return _kernel(facts, "7.0.0-1019-nvidia")


@bad("HOST.KERNEL_KHO")
def more_cma_free_than_there_is(facts: Facts) -> Facts:
    return put(facts, "memory", "meminfo", "CmaFree", 9 * GIB)


@bad("HOST.SAME", "warn")
def mixed_kernels(facts: Facts) -> Facts:
    return put(facts, "system", "kernel", "6.17.0-1029-nvidia", node="spark3")


@bad("HOST.SAME", "warn")
def mixed_drivers(facts: Facts) -> Facts:
    return put(facts, "gpu", "driver", "version", "580.178.04")


@bad("HOST.SAME")
def mixed_page_sizes(facts: Facts) -> Facts:
    return put(facts, "system", "page_size", 65536)


@bad("HOST.FIRMWARE", "warn")
def old_firmware(facts: Facts) -> Facts:
    return put(facts, "system", "dmi", "bios_date", "11/03/2025")


@bad("HOST.MEMLOCK")
def unit_with_low_memlock(facts: Facts) -> Facts:
    return put(facts, "engine", "unit", "LimitMEMLOCK", "8388608")


@bad("HOST.MEMLOCK", dgx=True)
def container_with_low_memlock(facts: Facts) -> Facts:
    start = f"argv[]=/usr/bin/docker run --rm x@sha256:{'a' * 64} python3"
    return put(facts, "engine", "unit", "ExecStart", start)


@bad("HOST.MEMLOCK", "warn")
def login_with_low_memlock(facts: Facts) -> Facts:
    facts = put(facts, "engine", "unit", {"LoadState": "not-found"})
    return put(facts, "system", "limits", "memlock", {"soft": 8388608, "hard": 8388608})


@bad("HOST.MODULES")
def module_not_loaded(facts: Facts) -> Facts:
    return put(facts, "system", "modules", ["ib_uverbs", "mlx5_core", "rdma_ucm"])


@bad("HOST.SYSCTL")
def twins_answer_for_each_other(facts: Facts) -> Facts:
    return put(facts, "memory", "sysctl", f"net.ipv4.conf.{P0}.arp_ignore", "0")


@bad("HOST.SYSCTL", "warn")
def watermark_boost(facts: Facts) -> Facts:
    return put(facts, "memory", "sysctl", "vm.watermark_boost_factor", "15000")


@bad("HOST.HEADLESS")
def desktop_runs(facts: Facts) -> Facts:
    return unit(facts, "gdm.service")


@bad("HOST.HEADLESS", "warn")
def boots_to_a_desktop(facts: Facts) -> Facts:
    return put(facts, "services", "default_target", "graphical.target")


@bad("HOST.SERVICES", "warn")
def snap_runs(facts: Facts) -> Facts:
    return unit(facts, "snapd.service")


@bad("HOST.DISPLAY", "warn")
def console_on_the_gpu(facts: Facts) -> Facts:
    return put(facts, "services", "display", "fbdev", "Y")


@bad("HOST.WATCHDOG", "warn")
def no_watchdog(facts: Facts) -> Facts:
    return put(facts, "services", "watchdogs", [])


@bad("HOST.WATCHDOG", "warn")
def watchdog_not_fed(facts: Facts) -> Facts:
    return put(facts, "services", "manager", "RuntimeWatchdogUSec", "0")


@bad("HOST.WATCHDOG", "warn")
def sshd_not_protected(facts: Facts) -> Facts:
    return put(facts, "services", "sshd", [{"Id": "sshd.service", "MemoryMin": "0"}])


@bad("HOST.CPUFREQ", "warn")
def cpu_not_autonomous(facts: Facts) -> Facts:
    return put(facts, "system", "cmdline", ["ro"])


@bad("HOST.KERNEL_LOG", "warn")
def driver_ran_out_of_memory(facts: Facts) -> Facts:
    return put(facts, "kernel_log", "matches", "driver out of memory", 3)


@bad("HOST.UNITS")
def guard_failed(facts: Facts) -> Facts:
    return unit(facts, "spark-guard.service", active="failed", result="exit-code")


@bad("HOST.UNITS")
def unit_missing(facts: Facts) -> Facts:
    return unit(facts, "spark-supervisor.service", load="not-found", active="inactive")


@bad("HOST.UNITS")
def export_not_started_at_boot(facts: Facts) -> Facts:
    return unit(facts, NFS_SERVER, node="spark1", file="disabled")


@bad("HOST.UNITS")
def target_missing(facts: Facts) -> Facts:
    return unit(facts, "spark.target", load="not-found", active="inactive")


@bad("HOST.PLAN", "warn")
def another_plan_installed(facts: Facts) -> Facts:
    return put(facts, "files", "/etc/spark/plan.json", "canonical_sha256", "0" * 64)


@bad("HOST.PORTS")
def port_taken(facts: Facts) -> Facts:
    entry = {"port": facts.plan.ports.api, "address": "192.168.1.11", "process": {
        "pid": 7, "name": "python3", "unit": "other.service"}}  # fmt: skip
    return put(facts, "ports", "listening", [entry], node="spark1")


@bad("HOST.STATE")
def one_rank_left_over(facts: Facts) -> Facts:
    return unit(facts, ENGINE)


# --- memory and disks -----------------------------------------------------------------------------


@bad("HOST.MEM_AVAILABLE")
def memory_taken(facts: Facts) -> Facts:
    large = [{"pid": 9, "name": "ollama", "resident": 20 * GIB}]
    facts = put(facts, "memory", "large", large)
    return put(facts, "memory", "meminfo", "MemAvailable", 96 * GIB)


@bad("HOST.MEM_AVAILABLE")
def less_memory_than_planned(facts: Facts) -> Facts:
    facts = put(facts, "memory", "meminfo", "MemTotal", 64 * GIB)
    return put(facts, "memory", "meminfo", "MemAvailable", 60 * GIB)


@bad("HOST.MEM_AVAILABLE")
def engine_below_the_guard(facts: Facts) -> Facts:
    for node in facts.plan.nodes:
        facts = unit(facts, ENGINE, node=node.name)
    return put(facts, "memory", "meminfo", "MemAvailable", 2 * GIB)


@bad("HOST.BUDDY")
def memory_in_small_pieces(facts: Facts) -> Facts:
    zone = {
        "node": 0,
        "zone": "Normal",
        "free": [900_000, 800_000, 500_000, 9000, 90, 5, 0, 0, 0, 0, 0],
    }
    return put(facts, "memory", "buddyinfo", [zone])


@bad("HOST.SWAP", "warn")
def large_swap(facts: Facts) -> Facts:
    return put(facts, "memory", "swaps", [{"name": "/swap.img", "size": 16 * GIB, "used": GIB}])


@bad("HOST.THP", "warn")
def huge_pages_always(facts: Facts) -> Facts:
    return put(facts, "memory", "thp", "always")


@bad("HOST.DISK")
def no_room_for_caches(facts: Facts) -> Facts:
    return put(facts, "disks", "free", "/var/cache/spark-engine", "free", GIB)


@bad("HOST.DISK")
def root_full(facts: Facts) -> Facts:
    return put(facts, "disks", "free", "/", "free", 1000)


# --- network ------------------------------------------------------------------------------------


@bad("NET.LINK")
def cable_out(facts: Facts) -> Facts:
    facts = put(facts, "links", "netdevs", P0, "carrier", "0")
    return put(facts, "links", "netdevs", P0, "state", "down")


@bad("NET.LINK")
def rail_switched_off(facts: Facts) -> Facts:
    return put(facts, "links", "netdevs", P0, "carrier", None)


@bad("NET.LINK")
def netdev_missing(facts: Facts) -> Facts:
    return change(facts, lambda sections: without(sections, "links", "netdevs", P0))


@bad("NET.SPEED")
def switch_port_at_100g(facts: Facts) -> Facts:
    return put(facts, "links", "netdevs", P0, "speed", 100000)


@bad("NET.ADDRESS")
def address_lost(facts: Facts) -> Facts:
    return put(facts, "links", "addresses", P0, [])


@bad("NET.ADDRESS")
def address_besides(facts: Facts) -> Facts:
    entry = {"address": "169.254.3.4/16", "dynamic": True}

    def edit(sections: dict[str, Any]) -> None:
        sections["links"]["addresses"][P0].append(entry)

    return change(facts, edit)


@bad("NET.SUBNETS")
def bridge_in_the_subnet(facts: Facts) -> Facts:
    return put(facts, "links", "addresses", "docker0", [{"address": "10.77.0.1/16"}])


@bad("NET.MTU")
def mtu_back_to_1500(facts: Facts) -> Facts:
    return put(facts, "links", "netdevs", P0, "mtu", 1500)


def _ping(facts: Facts, netdev: str | None, received: int) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        for entry in sections["reach"]["pings"]:
            if entry["netdev"] == netdev:
                entry["received"] = received
                break

    return change(facts, edit)


@bad("NET.PEER")
def peer_silent(facts: Facts) -> Facts:
    return _ping(facts, P0, 0)


@bad("NET.NEIGHBOUR")
def peer_at_its_twin(facts: Facts) -> Facts:
    return put(facts, "links", "neighbours", 0, "mac", "4c:bb:47:00:02:03")


@bad("NET.LAN")
def head_silent(facts: Facts) -> Facts:
    return _ping(facts, None, 0)


@bad("NET.LAN")
def management_address_differs(facts: Facts) -> Facts:
    return put(facts, "links", "addresses", "enP7s7", [{"address": "192.168.1.99/24"}])


@bad("NET.LAN")
def management_address_missing(facts: Facts) -> Facts:
    return put(facts, "links", "addresses", "enP7s7", [])


@bad("NET.LAN")
def management_netdev_missing(facts: Facts) -> Facts:
    return change(facts, lambda sections: without(sections, "links", "addresses", "enP7s7"))


@bad("NET.LAN")
def name_not_resolved(facts: Facts) -> Facts:
    return put(facts, "reach", "names", "192.168.1.11", None)


@bad("NET.MANAGER", "warn")
def two_managers(facts: Facts) -> Facts:
    entry = {"file": "/etc/NetworkManager/system-connections/rail.nmconnection", "netdevs": [P0]}
    return put(facts, "managers", "networkmanager_files", [entry])


@bad("NET.MANAGER", "warn")
def two_files(facts: Facts) -> Facts:
    return put(
        facts, "managers", "netplan", [{"file": "/etc/netplan/40-cx7.yaml", "netdevs": [P0]}]
    )


@bad("NET.MANAGER", "warn")
def managed_without_a_profile(facts: Facts) -> Facts:
    facts = put(facts, "managers", "networkd", [])
    return put(facts, "managers", "networkmanager", {P0: "connected"})


@bad("NET.MANAGER", "warn", dgx=True)
def addresses_typed_by_hand(facts: Facts) -> Facts:
    return put(facts, "managers", "networkd", [])


@bad("NET.FIREWALL")
def rails_dropped(facts: Facts) -> Facts:
    return put(facts, "firewall", "nft", "rules", 0, "netdevs", ["lo", P0])


@bad("NET.FIREWALL")
def rails_dropped_by_a_nixos_chain(facts: Facts) -> Facts:
    rules = [
        "-P INPUT ACCEPT", "-N nixos-fw", "-N nixos-fw-log-refuse", "-A INPUT -j nixos-fw",
        "-A nixos-fw -i lo -j ACCEPT", "-A nixos-fw -p tcp -m tcp --dport 22 -j ACCEPT",
        "-A nixos-fw -j nixos-fw-log-refuse", "-A nixos-fw-log-refuse -j DROP",
    ]  # fmt: skip
    return put(facts, "firewall", "iptables", rules)


@bad("NET.FIREWALL", "warn")
def ufw_unread(facts: Facts) -> Facts:
    facts = put(facts, "firewall", "nft", {"chains": [], "rules": []})
    return put(facts, "firewall", "ufw", True)


# --- rdma ---------------------------------------------------------------------------------------


def _port(facts: Facts, key: str, value: Any) -> Facts:
    return put(facts, "rdma", "devices", R0, "ports", "1", key, value)


@bad("RDMA.ACTIVE")
def rdma_port_down(facts: Facts) -> Facts:
    return _port(facts, "state", "DOWN")


@bad("RDMA.ACTIVE")
def rdma_port_infiniband(facts: Facts) -> Facts:
    return _port(facts, "link_layer", "InfiniBand")


@bad("RDMA.ACTIVE")
def rdma_device_missing(facts: Facts) -> Facts:
    return change(facts, lambda sections: without(sections, "rdma", "devices", R0))


@bad("RDMA.GID")
def gid_only_version_1(facts: Facts) -> Facts:
    gids = facts.answers[NODE].document.data["sections"]["rdma"]["devices"][R0]["ports"]["1"][
        "gids"
    ]
    return _port(facts, "gids", [entry for entry in gids if entry["index"] != 3])


@bad("RDMA.GID")
def gid_of_another_netdev(facts: Facts) -> Facts:
    return put(facts, "rdma", "devices", R0, "ports", "1", "gids", 3, "netdev", "macvlan0")


@bad("RDMA.GID")
def gid_table_empty(facts: Facts) -> Facts:
    return _port(facts, "gids", [])


@bad("RDMA.GID", "warn")
def gid_indices_differ(facts: Facts) -> Facts:
    return put(facts, "rdma", "devices", R0, "ports", "1", "gids", 3, "index", 5)


@bad("RDMA.MTU")
def rdma_packets_small(facts: Facts) -> Facts:
    return put(facts, "rdma", "active_mtu", R0, 1024)


@bad("RDMA.PCIE")
def pcie_two_lanes(facts: Facts) -> Facts:
    return put(facts, "pci", "links", "0002:01:00.0", "width", "2")


@bad("RDMA.PCIE")
def pcie_gen4(facts: Facts) -> Facts:
    return put(facts, "pci", "links", "0000:01:00.0", "speed", "16.0 GT/s PCIe")


@bad("RDMA.FIRMWARE", "warn")
def mixed_card_firmware(facts: Facts) -> Facts:
    return put(facts, "rdma", "devices", R0, "firmware", "28.43.2026")


# --- gpu ----------------------------------------------------------------------------------------


@bad("GPU.DRIVER")
def driver_not_loaded(facts: Facts) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        sections["gpu"] = {"errors": {"driver": "/proc/driver/nvidia/version: No such file"}}

    return change(facts, edit)


@bad("GPU.DRIVER")
def nvidia_smi_fails(facts: Facts) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        del sections["gpu"]["gpus"]
        sections["gpu"]["errors"]["gpus"] = "nvidia-smi: status 9: failed to communicate"

    return change(facts, edit)


@bad("GPU.DRIVER", "warn")
def unproven_driver(facts: Facts) -> Facts:
    return everywhere(facts, "gpu", "driver", "version", "595.84")


@bad("GPU.IDLE")
def another_program_computes(facts: Facts) -> Facts:
    app = {"pid": 77, "name": "ollama", "memory": "[N/A]", "unit": "ollama.service"}
    return put(facts, "gpu", "apps", [app])


@bad("GPU.STATE", "warn")
def gpu_too_hot(facts: Facts) -> Facts:
    return put(facts, "gpu", "reasons", ["0x0000000000000041"])


@bad("GPU.POLLERS", "warn")
def gpu_polled(facts: Facts) -> Facts:
    return put(facts, "memory", "named", {"nvtop": 1})


# --- engine -------------------------------------------------------------------------------------


@bad("IMG.RUNTIME", dgx=True)
def no_container_runtime(facts: Facts) -> Facts:
    return put(facts, "containers", "docker", False)


@bad("IMG.RUNTIME", dgx=True)
def no_toolkit(facts: Facts) -> Facts:
    return put(facts, "containers", "toolkit", False)


@bad("IMG.RUNTIME", dgx=True)
def docker_down(facts: Facts) -> Facts:
    return put(facts, "containers", "docker_active", False)


@bad("IMG.DIGEST", dgx=True)
def another_image(facts: Facts) -> Facts:
    digest = "sha256:" + "c" * 64
    facts = put(facts, "engine", "unit", "image", f"registry.example/sglang@{digest}")
    return put(facts, "containers", "images", 0, "Digest", digest)


@bad("IMG.DIGEST", dgx=True)
def image_that_the_plan_has_not(facts: Facts) -> Facts:
    digest = "sha256:" + "d" * 64
    image = ImagePlan(name=digest, reference=None, digest=digest, runtime="docker")
    return with_plan(facts, image=image)


@bad("IMG.DIGEST", dgx=True)
def image_not_there(facts: Facts) -> Facts:
    return put(facts, "containers", "images", [])


@bad("IMG.DIGEST", dgx=True)
def image_by_tag(facts: Facts) -> Facts:
    facts = put(facts, "engine", "unit", "image", None)
    return put(
        facts, "engine", "unit", "ExecStart", "argv[]=docker run --ulimit memlock=-1 sglang:latest"
    )


@bad("IMG.DIGEST")
def another_closure(facts: Facts) -> Facts:
    start = "argv[]=spark-node exec --python /nix/store/9999-sglang-env/bin/python3 ;"
    return put(facts, "engine", "unit", "ExecStart", start)


def running(facts: Facts, image: str) -> Facts:
    """Let the engine's unit and its container run on every node."""
    for node in facts.plan.nodes:
        container = {"Names": "spark-engine", "Image": image, "State": "running"}
        facts = unit(facts, ENGINE, node=node.name)
        facts = put(facts, "containers", "running", [container], node=node.name)
    return facts


@bad("IMG.LIVE", dgx=True)
def an_older_image_runs(facts: Facts) -> Facts:
    facts = running(facts, "registry.example/sglang@sha256:" + "a" * 64)
    older = "registry.example/sglang@sha256:" + "c" * 64
    return put(facts, "containers", "running", 0, "Image", older)


@bad("IMG.LIVE", dgx=True)
def an_image_by_tag_runs_under_our_name(facts: Facts) -> Facts:
    container = {"Names": "spark-engine", "Image": "sglang:latest", "State": "running"}
    return put(facts, "containers", "running", [container])


@bad("IMG.PACKAGES")
def another_torch(facts: Facts) -> Facts:
    return put(facts, "engine", "packages", "torch", ["2.13.0"])


@bad("IMG.PACKAGES")
def another_engine_version(facts: Facts) -> Facts:
    return everywhere(facts, "engine", "packages", "sglang", ["0.5.20"])


@bad("IMG.PACKAGES", "warn")
def package_twice(facts: Facts) -> Facts:
    return everywhere(facts, "engine", "packages", "torch", ["2.14.1", "2.13.0"])


@bad("IMG.MODELCLASS")
def architecture_unknown(facts: Facts) -> Facts:
    return put(facts, "engine", "classes", "known", [])


@bad("IMG.FLASHINFER")
def old_flashinfer(facts: Facts) -> Facts:
    return everywhere(facts, "engine", "packages", "flashinfer-python", ["0.6.9"])


@bad("IMG.ARCH")
def kernels_for_other_gpus(facts: Facts) -> Facts:
    return put(facts, "engine", "architectures", {"sgl_kernel/sm90/common_ops.so": [80, 90, 100]})


# --- nccl ---------------------------------------------------------------------------------------


@bad("NCCL.VERSION")
def nccl_2_28(facts: Facts) -> Facts:
    return everywhere(facts, "engine", "nccl", 0, "version", "2.28.9")


@bad("NCCL.VERSION", "warn")
def nccl_without_the_fence(facts: Facts) -> Facts:
    return everywhere(facts, "engine", "nccl", 0, "version", "2.29.3")


@bad("NCCL.SINGLE", "warn")
def two_nccl_libraries(facts: Facts) -> Facts:
    first = facts.answers[NODE].document.data["sections"]["engine"]["nccl"][0]
    second = {**first, "path": "/x/libnccl.so.2", "sha256": "1" * 64}
    return everywhere(facts, "engine", "nccl", [first, second])


@bad("NCCL.SINGLE")
def no_nccl_library(facts: Facts) -> Facts:
    return everywhere(facts, "engine", "nccl", [])


@bad("NCCL.HASH")
def nccl_replaced_on_one_rank(facts: Facts) -> Facts:
    return put(facts, "engine", "nccl", 0, "sha256", "2" * 64)


# --- checkpoint ---------------------------------------------------------------------------------


@bad("STORE.CONFIG", also=("ENGRAM.HEADER",))
def another_revision(facts: Facts) -> Facts:
    return put(facts, "checkpoint", "config", "sha256", "3" * 64)


@bad("STORE.CONFIG")
def index_missing(facts: Facts) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        del sections["checkpoint"]["index"]
        sections["checkpoint"]["errors"]["index"] = "model.safetensors.index.json: No such file"

    return change(facts, edit)


def _shard(facts: Facts, edit: Callable[[dict[str, int], str], None]) -> Facts:
    for node in facts.plan.nodes:

        def both(sections: dict[str, Any]) -> None:
            files = sections["checkpoint"]["files"]
            edit(files, sorted(files)[7])

        facts = change(facts, both, node.name)
    return facts


@bad("STORE.SHARDS")
def shard_missing(facts: Facts) -> Facts:
    return _shard(facts, lambda files, name: without(files, name))


@bad("STORE.SHARDS")
def shard_empty(facts: Facts) -> Facts:
    return _shard(facts, lambda files, name: files.update({name: 0}))


@bad("STORE.SHARDS")
def shard_truncated(facts: Facts) -> Facts:
    return _shard(facts, lambda files, name: files.update({name: GIB}))


@bad("STORE.SHARDS")
def other_number_of_shards(facts: Facts) -> Facts:
    return with_plan(facts, model=facts.plan.model.model_copy(update={"shards": 64}))


@bad("STORE.SAME")
def stale_copy(facts: Facts) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        files = sections["checkpoint"]["files"]
        files[min(files)] += 4096

    return change(facts, edit)


def _mount(facts: Facts, **changes: Any) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        for mount in sections["disks"]["mounts"]:
            if mount["where"] == facts.plan.model.path:
                mount.update(changes)

    return change(facts, edit)


@bad("STORE.MOUNT")
def mounted_from_elsewhere(facts: Facts) -> Facts:
    return _mount(facts, what="192.168.1.50:/old")


@bad("STORE.MOUNT")
def mounted_writable(facts: Facts) -> Facts:
    plan = facts.plan.nodes[1].weights.mount
    return _mount(facts, options=[option for option in plan.options if option != "ro"])


@bad("STORE.MOUNT", "warn")
def mounted_with_one_connection(facts: Facts) -> Facts:
    plan = facts.plan.nodes[1].weights.mount
    return _mount(facts, options=[option for option in plan.options if option != "nconnect=8"])


@bad("STORE.MOUNT")
def not_mounted(facts: Facts) -> Facts:
    return _mount(facts, where="/somewhere/else")


@bad("STORE.MOUNT", also=("STORE.EXPORT",))
def local_copy_shadowed(facts: Facts) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        sections["disks"]["mounts"].append(
            {
                "where": facts.plan.model.path,
                "what": "10.0.0.9:/m",
                "type": "nfs4",
                "options": ["ro"],
            }
        )

    return change(facts, edit, "spark1")


@bad("STORE.EXPORT")
def exported_to_everyone(facts: Facts) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        entry = sections["nfs"]["exports"][0]
        sections["nfs"]["exports"].append({**entry, "client": "*"})

    return change(facts, edit, "spark1")


@bad("STORE.EXPORT")
def not_exported_to_one_worker(facts: Facts) -> Facts:
    return change(facts, lambda sections: sections["nfs"]["exports"].pop(), "spark1")


@bad("STORE.EXPORT")
def exported_writable(facts: Facts) -> Facts:
    options = ["rw", "sync", "no_subtree_check", "root_squash", "fsid=0"]
    return put(facts, "nfs", "exports", 0, "options", options, node="spark1")


@bad("STORE.EXPORT", "warn")
def exported_async(facts: Facts) -> Facts:
    options = ["ro", "async", "no_subtree_check", "root_squash", "fsid=0"]
    return put(facts, "nfs", "exports", 0, "options", options, node="spark1")


@bad("STORE.EXPORT", "warn")
def few_server_threads(facts: Facts) -> Facts:
    return put(facts, "nfs", "threads", "8", node="spark1")


@bad("STORE.EXPORT")
def server_down(facts: Facts) -> Facts:
    return unit(facts, NFS_SERVER, node="spark1", active="inactive")


@bad("STORE.EXPORT")
def export_on_overlay(facts: Facts) -> Facts:
    return put(facts, "disks", "mounts", 0, "type", "overlay", node="spark1")


@bad("STORE.RPC")
def server_does_not_answer(facts: Facts) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        del sections["nfs"]["rpc"]
        sections["nfs"]["errors"]["rpc"] = "rpcinfo: status 1: program 100003 is not available"

    return change(facts, edit)


@bad("STORE.VOLUME", "warn", dgx=True)
def volume_left_over(facts: Facts) -> Facts:
    volume = {"name": "dsv41-weights", "device": ":/export", "options": "addr=10.0.0.1,ro"}
    return put(facts, "containers", "volumes", [volume])


@bad("STORE.FRAGMENTS", "warn")
def checkpoint_in_pieces(facts: Facts) -> Facts:
    files = facts.answers["spark1"].document.data["sections"]["checkpoint"]["files"]
    extents = dict.fromkeys(files, 20_000)
    return put(facts, "checkpoint", "extents", extents, node="spark1")


@bad("CFG.TABLES")
def table_on_no_rank(facts: Facts) -> Facts:
    argv = [*facts.plan.nodes[0].argv, "--speculative-dspark-sps-table-path", "/var/lib/t.json"]
    return with_node(facts, "spark1", argv=argv)


@bad("CFG.TABLES")
def table_differs(facts: Facts) -> Facts:
    for node in facts.plan.nodes:
        argv = [*node.argv, "--speculative-dspark-sps-table-path", "/var/lib/t.json"]
        facts = with_node(facts, node.name, argv=argv)
        digest = "4" * 64 if node.name == NODE else "5" * 64
        facts = put(facts, "files", "/var/lib/t.json", {"sha256": digest}, node=node.name)
    return facts


# --- engram -------------------------------------------------------------------------------------


def _first_file(facts: Facts) -> str:
    return facts.plan.nodes[1].engram.files[0].name


@bad("ENGRAM.FILES")
def rows_truncated(facts: Facts) -> Facts:
    return put(facts, "engram", "present", _first_file(facts), 4096)


@bad("ENGRAM.FILES")
def rows_missing(facts: Facts) -> Facts:
    return change(
        facts, lambda sections: without(sections, "engram", "present", _first_file(facts))
    )


@bad("ENGRAM.FILES")
def nothing_packed(facts: Facts) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        sections["engram"] |= {"present": {}, "headers": {}, "receipts": {}}

    return change(facts, edit)


def _page(facts: Facts, **changes: Any) -> Facts:
    node = facts.plan.nodes[1]
    page = header(facts.plan, node, node.engram.files[0], **changes)
    text = base64.b64encode(page).decode()
    facts = put(facts, "engram", "headers", _first_file(facts), text)
    fresh = receipt(node.engram.files[0], page)
    return put(facts, "engram", "receipts", _first_file(facts), fresh)


@bad("ENGRAM.HEADER")
def packed_for_another_rank(facts: Facts) -> Facts:
    return _page(facts, rank=2)


@bad("ENGRAM.HEADER")
def packed_for_four_ranks(facts: Facts) -> Facts:
    return _page(facts, tp=4)


@bad("ENGRAM.HEADER")
def packed_in_rows(facts: Facts) -> Facts:
    return _page(facts, layout="rows")


@bad("ENGRAM.HEADER")
def packed_from_another_model(facts: Facts) -> Facts:
    return _page(facts, config=b"\1" * 32)


@bad("ENGRAM.HEADER")
def packed_by_another_tool(facts: Facts) -> Facts:
    page = base64.b64encode(b"DSV1EN41".ljust(4096, b"\0")).decode()
    return put(facts, "engram", "headers", _first_file(facts), page)


@bad("ENGRAM.HEADER")
def header_damaged(facts: Facts) -> Facts:
    node = facts.plan.nodes[1]
    page = bytearray(header(facts.plan, node, node.engram.files[0]))
    page[300] ^= 1
    return put(facts, "engram", "headers", _first_file(facts), base64.b64encode(page).decode())


@bad("ENGRAM.RECEIPT")
def no_receipt(facts: Facts) -> Facts:
    return put(facts, "engram", "receipts", _first_file(facts), None)


@bad("ENGRAM.RECEIPT")
def receipt_of_another_file(facts: Facts) -> Facts:
    return put(facts, "engram", "receipts", _first_file(facts), "file_id", "deadbeef")


@bad("ENGRAM.SPACE", also=("ENGRAM.FILES",))
def disk_too_small(facts: Facts) -> Facts:
    facts = put(facts, "disks", "free", "/var/lib/spark/engram", "free", GIB)
    return nothing_packed(facts)


@bad("ENGRAM.DISK")
def engram_device_missing(facts: Facts) -> Facts:
    return change(facts, lambda sections: without(sections, "engram", "device"))


@bad("ENGRAM.DISK")
def engram_not_mounted(facts: Facts) -> Facts:
    return put(facts, "engram", "device", "device", "259:9")


def _engram_mount(facts: Facts, kind: str) -> Facts:
    def edit(sections: dict[str, Any]) -> None:
        sections["disks"]["mounts"][-1]["type"] = kind

    return change(facts, edit)


@bad("ENGRAM.DISK")
def engram_on_btrfs(facts: Facts) -> Facts:
    return _engram_mount(facts, "btrfs")


@bad("ENGRAM.DISK")
def direct_reads_refused(facts: Facts) -> Facts:
    return put(facts, "engram", "direct", "open: Invalid argument")


@bad("ENGRAM.NVME", "warn")
def coalescing_off(facts: Facts) -> Facts:
    text = "get-feature:0x08 (Interrupt Coalescing), Current value:00000000"
    return put(facts, "disks", "coalescing", {"nvme0": text})


# --- deep ---------------------------------------------------------------------------------------


def measured(facts: Facts) -> Facts:
    """Return the facts with good measurements."""
    deep = {}
    for node in facts.plan.nodes:
        pings = [
            {"netdev": rail.netdev, "address": peer.address, "bytes": rail.mtu, "sent": 5,
             "received": 5, "error": None}
            for rail in node.rails
            for peer in rail.peers
        ]  # fmt: skip
        load = {
            "clock_mhz": 2411.0,
            "read_gbs": 231.0,
            "total_bytes": 130_663_642_563,
            "errors": {},
        }
        sections = {"dfping": {"pings": pings, "errors": {}}, "gpu_load": load}
        deep[node.name] = Answer(Document({"probe": 1, "node": node.name, "sections": sections}))
    runs = tuple(
        Bandwidth(node.name, peer.node, rail.netdev, 97.5)
        for node in facts.plan.nodes
        for rail in node.rails
        for peer in rail.peers
    )
    return dataclasses.replace(facts, deep=deep, bandwidth=runs)


def _deep(facts: Facts, *path: Any) -> Facts:
    *keys, last, value = path
    answer = facts.deep[NODE]
    data = copy.deepcopy(answer.document.data)
    place: Any = data["sections"]
    for key in keys:
        place = place[key]
    place[last] = value
    changed = dataclasses.replace(answer, document=Document(data))
    return dataclasses.replace(facts, deep={**facts.deep, NODE: changed})


@bad("NET.DFPING")
def large_packets_lost(facts: Facts) -> Facts:
    return _deep(facts, "dfping", "pings", 0, "received", 0)


@bad("NET.DFPING", "warn")
def some_large_packets_lost(facts: Facts) -> Facts:
    return _deep(facts, "dfping", "pings", 0, "received", 3)


def _bandwidth(facts: Facts, gbits: float) -> Facts:
    first, *rest = facts.bandwidth
    return dataclasses.replace(facts, bandwidth=(dataclasses.replace(first, gbits=gbits), *rest))


@bad("RDMA.BW")
def card_wedged(facts: Facts) -> Facts:
    return _bandwidth(facts, 13.2)


@bad("RDMA.BW")
def rail_at_half_speed(facts: Facts) -> Facts:
    return _bandwidth(facts, 49.0)


@bad("GPU.CLOCK")
def clock_latched(facts: Facts) -> Facts:
    return _deep(facts, "gpu_load", "clock_mhz", 611.0)


@bad("GPU.CLOCK", "warn")
def clock_low(facts: Facts) -> Facts:
    return _deep(facts, "gpu_load", "clock_mhz", 1500.0)


@bad("GPU.BANDWIDTH")
def memory_slow(facts: Facts) -> Facts:
    return _deep(facts, "gpu_load", "read_gbs", 66.0)


@bad("GPU.BANDWIDTH", "warn")
def memory_below_the_usual(facts: Facts) -> Facts:
    return _deep(facts, "gpu_load", "read_gbs", 170.0)


@bad("GPU.CEILING")
def cuda_sees_too_little(facts: Facts) -> Facts:
    return _deep(facts, "gpu_load", "total_bytes", 101 * GIB)
