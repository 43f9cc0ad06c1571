"""The systemd units of a node: names, order, command lines, privileges. One table for both systems.

What each setting is for, and which hardening CUDA and RDMA rule out, is in docs/node.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from spark_appliance.model.plan import EngramPlan, UnitPlan, WeightsPlan
from spark_appliance.names import (
    CONTAINER,
    ENGINE,
    ENGINE_USER,
    FABRIC,
    GAVE_UP_STATUS,
    GUARD,
    HEAD_STOP_TIMEOUT,
    NFS_SERVER,
    PACK,
    PLAN_PATH,
    READY,
    ROUTER,
    SUPERVISOR,
    TARGET,
    WORKER_STOP_TIMEOUT,
)

NETWORK_ONLINE: Final = "network-online.target"

FABRIC_DEADLINE: Final = 120
"""Seconds for links, addresses and peers: a ConnectX-7 link is up some 10 s after its peer."""

SPARK_NODE: Final = "@spark-node@"
PYTHON: Final = "@python@"
SPARK_ENGRAM: Final = "@spark-engram@"
CONTAINER_RUNTIME: Final = "@container-runtime@"
IMAGE: Final = "@image@"
ROUTER_PYTHON: Final = "@router-python@"
"""Interpreter that can import sglang_router."""

LIMITS: Final = {
    # pinned buffers of RDMA, NCCL and the Engram reader; PAM limits do not reach services
    "LimitMEMLOCK": "infinity",
    "LimitNOFILE": "1048576",
    "LimitSTACK": "67108864",
}

Settings = dict[str, str | list[str]]

_PRIVATE: Final[Mapping[str, str]] = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "PrivateTmp": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelLogs": "yes",
    "ProtectClock": "yes",
    "ProtectHostname": "yes",
    "LockPersonality": "yes",
    "RestrictNamespaces": "yes",
    "RestrictSUIDSGID": "yes",
    "SystemCallArchitectures": "native",
}
"""Holds for every service here, the engine included."""

KEY_IN_LOG: Final = """~api[_-]?keys?['"]? *[:=,] *(Some)?[([ ]*['"]"""
"""Messages that systemd (253 or newer) drops: sglang 0.5.23 logs its resolved arguments, the key in
clear text among them (srt/entrypoints/engine.py:1185); the router does so in Rust's notation.
No backslash: systemd would unescape it."""

_PROGRAM: Final[Mapping[str, str]] = {
    **_PRIVATE,
    "ProtectHome": "yes",
    "PrivateDevices": "yes",
    "MemoryDenyWriteExecute": "yes",
    "RestrictRealtime": "yes",
    "SystemCallFilter": "@system-service",
    "SystemCallErrorNumber": "EPERM",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "CapabilityBoundingSet": "",
    "UMask": "0022",
}
"""Our own programs: root by uid (for /run/spark and systemd's bus), but without capabilities."""

_RUN_SPARK: Final[Mapping[str, str]] = {
    # shared by fabric, ready, supervisor and guard; must outlive each of them
    "RuntimeDirectory": "spark",
    "RuntimeDirectoryMode": "0755",
    "RuntimeDirectoryPreserve": "yes",
}

_SURVIVES_PRESSURE: Final[Mapping[str, str]] = {
    "OOMScoreAdjust": "-1000",
    "MemoryMin": "64M",
    "MemorySwapMax": "0",
}
"""What has to act when memory runs out must not be reclaimed or killed first."""

_ENGINE: Final[Mapping[str, str | list[str]]] = {
    **_PRIVATE,
    "User": ENGINE_USER,
    "Group": ENGINE_USER,
    "CapabilityBoundingSet": "",
    "ProtectKernelTunables": "yes",
    "ProtectControlGroups": "yes",
    "ProtectProc": "invisible",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictRealtime": "yes",
    # a deny list: the engine's watchdog dumps stacks of a hung rank with ptrace (@debug)
    "SystemCallFilter": "~@clock @cpu-emulation @module @mount @obsolete @raw-io @reboot @swap",
    "SystemCallErrorNumber": "EPERM",
    "DevicePolicy": "closed",
    # by group of /proc/devices: nodes appear with the modules; rdma_cm is a misc device
    "DeviceAllow": ["char-nvidia* rw", "char-infiniband* rw", "/dev/infiniband/rdma_cm rw"],
    "UMask": "0077",
}


@dataclass(frozen=True, slots=True)
class Rank:
    """What the units of one node depend on."""

    name: str
    rank: int
    tp: int
    system: Literal["nixos", "dgx-os"]
    cables: bool
    checkpoint: str
    key_file: str | None
    ready_timeout: int
    probe_timeout: int
    weights: WeightsPlan
    engram: EngramPlan | None
    cache_directory: str
    router: bool = False

    @property
    def head(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def stop_timeout(self) -> int:
        """Seconds for the engine to stop."""
        return HEAD_STOP_TIMEOUT if self.head else WORKER_STOP_TIMEOUT

    def command(self, *words: str) -> list[str]:
        """Return the command line of a node program."""
        return [SPARK_NODE, "--plan", PLAN_PATH, "--node", self.name, *words]


@dataclass(frozen=True, slots=True)
class _Service:
    """The part of a unit that only services have."""

    exec_start: list[str] = field(default_factory=list)
    exec_start_pre: list[list[str]] = field(default_factory=list)
    exec_stop_post: list[list[str]] = field(default_factory=list)
    settings: Mapping[str, str | list[str]] = field(default_factory=dict)


def units(rank: Rank) -> list[UnitPlan]:
    """Return the units in start order, spark.target last.

    The export and the mounts have a life of their own: stopping the target leaves them up, so
    that a pack after a stop still finds the checkpoint (MiaAI-Lab PR#26). The engine is started
    by the supervisors alone: a rank that starts by itself never joins a running group. The
    supervisor waits for storage and fabric but does not require them: each start of the engine
    tries what failed once more, so that nodes which boot in any order find each other.
    """
    result: list[UnitPlan] = []
    network: list[str] = []
    if rank.cables:
        result.append(_fabric(rank))
        network = [FABRIC]
    storage: list[str] = []
    if rank.weights.export is not None:
        result.append(_unit(NFS_SERVER, "NFS server", "system", after=network, started_by="boot"))
    if rank.weights.mount is not None:
        unit = rank.weights.mount.unit
        result.append(
            _unit(
                unit,
                "Checkpoint of the head",
                "mount",
                after=network,
                requires=network,
                started_by="boot",
            )
        )
        storage.append(unit)
    if rank.engram is not None:
        if rank.engram.mount_unit is not None:
            mount = rank.engram.mount_unit
            result.append(_unit(mount, "Packed Engram rows", "mount", started_by="boot"))
            storage.append(mount)
        result.append(_pack(rank, rank.engram, storage))
        storage = [*storage, PACK]
    result.append(_guard(rank))
    needed = [*network, *storage]
    result.append(_supervisor(rank, [*needed, GUARD]))
    result.append(_engine(rank, needed))
    if rank.head:
        result.append(_ready(rank))
    if rank.router:
        result.append(_router(rank))
    wanted = [unit.name for unit in result if unit.started_by == "target"]
    result.append(
        _unit(
            TARGET,
            "One endpoint out of several Sparks: this node's part",
            "target",
            wants=wanted,
            wanted_by=["multi-user.target"],
            started_by="boot",
        )
    )
    return result


def _fabric(rank: Rank) -> UnitPlan:
    return _unit(
        FABRIC,
        "RoCE rails up, GID index resolved, ARP warm",
        "oneshot",
        after=[NETWORK_ONLINE],
        wants=[NETWORK_ONLINE],
        service=_Service(
            exec_start=rank.command("fabric", "--deadline", str(FABRIC_DEADLINE)),
            settings={
                **_PROGRAM,
                **_RUN_SPARK,
                "CapabilityBoundingSet": "CAP_NET_RAW",  # ping
                "RemainAfterExit": "yes",
                "TimeoutStartSec": str(FABRIC_DEADLINE + 60),
            },
        ),
    )


def _pack(rank: Rank, engram: EngramPlan, storage: list[str]) -> UnitPlan:
    words = engram.pack_argv[1:]
    settings: Settings = {
        "RemainAfterExit": "yes",
        "TimeoutStartSec": "infinity",
        "TimeoutStopSec": "60",  # SIGTERM writes the journal of the pack, then exits
        "Nice": "10",
        "OOMScoreAdjust": "500",
        "LimitMEMLOCK": "infinity",
    }
    pre: list[list[str]] = []
    stop_post: list[list[str]] = []
    if rank.system == "nixos":
        start = [SPARK_ENGRAM, *words]
        settings |= {
            **_PROGRAM,
            # an Engram directory may belong to anybody and lie anywhere
            "CapabilityBoundingSet": "CAP_DAC_OVERRIDE",
            "ProtectHome": "no",
            "ReadWritePaths": _path(engram.directory),
        }
    else:
        name = f"{CONTAINER}-pack"
        pre.append(_remove_container(name))
        start = [*_in_container(rank, name, "--writable-engram"), "--", "spark-engram", *words]
        stop_post = [_remove_container(name)]
    return _unit(
        PACK,
        "Pack this node's Engram rows (resumes where it stopped)",
        "oneshot",
        after=storage,
        requires=storage,
        service=_Service(start, pre, stop_post, settings),
    )


def _guard(rank: Rank) -> UnitPlan:
    words = rank.command("guard")
    if rank.system == "dgx-os":
        words += ["--container", CONTAINER, "--container-runtime", CONTAINER_RUNTIME]
    return _unit(
        GUARD,
        "Kill the engine before memory runs out",
        "notify",
        unit_settings={"StartLimitIntervalSec": "60", "StartLimitBurst": "10"},
        service=_Service(
            exec_start=words,
            settings={
                **_PROGRAM,
                **_RUN_SPARK,
                **_SURVIVES_PRESSURE,
                # writes cgroup.kill of another unit: neither of ProtectControlGroups and
                # ProtectKernelTunables; mlockall needs the limit, not the capability
                "LimitMEMLOCK": "infinity",
                # mlockall is called through ctypes, which may map writable code
                "MemoryDenyWriteExecute": "no",
                "Nice": "-20",
                "NotifyAccess": "main",
                "WatchdogSec": "15",
                "Restart": "always",
                "RestartSec": "1",
            },
        ),
    )


def _supervisor(rank: Rank, needed: list[str]) -> UnitPlan:
    return _unit(
        SUPERVISOR,
        "Start and stop all ranks together",
        "notify",
        after=[NETWORK_ONLINE, *needed],
        wants=[NETWORK_ONLINE],
        service=_Service(
            exec_start=rank.command("supervise"),
            settings={
                **_PROGRAM,
                **_RUN_SPARK,
                **_SURVIVES_PRESSURE,
                "OOMScoreAdjust": "-900",
                "NotifyAccess": "main",
                "WatchdogSec": "30",
                "Restart": "on-failure",
                "RestartSec": "5",
                "RestartPreventExitStatus": str(GAVE_UP_STATUS),
                # SIGTERM is for the supervisor alone, not for the systemctl it is waiting for
                "KillMode": "mixed",
                # the head's engine, then the workers', then some
                "TimeoutStopSec": str(HEAD_STOP_TIMEOUT + WORKER_STOP_TIMEOUT + 30),
            },
        ),
    )


def _engine(rank: Rank, needed: list[str]) -> UnitPlan:
    pre: list[list[str]] = []
    if rank.cables:
        # GID tables move when a link flaps: resolve again right before every start
        pre.append(_privileged(rank.command("fabric", "--deadline", str(FABRIC_DEADLINE))))
    pre.append(_privileged(rank.command("prepare", "--user", ENGINE_USER)))
    check = ["plugin-check", "--tp", str(rank.tp), "--rank", str(rank.rank)]
    check += ["--checkpoint", rank.checkpoint]
    settings: Settings = {
        **LIMITS,
        "RuntimeDirectory": "spark-engine",
        "RuntimeDirectoryMode": "0700",
        "TasksMax": "infinity",
        "OOMScoreAdjust": "900",
        "KillMode": "control-group",
        "TimeoutStartSec": str(FABRIC_DEADLINE + 600),
        "TimeoutStopSec": str(rank.stop_timeout),
        "Restart": "no",
    }
    if rank.head and rank.key_file is not None:
        settings |= _with_key(rank.key_file)
    stop_post: list[list[str]] = []
    if rank.system == "nixos":
        execute = rank.command("exec", "--python", PYTHON)
        if rank.engram is not None:
            pre.append([*rank.command("exec"), "--", SPARK_ENGRAM, *check])
        settings |= {
            **_ENGINE,
            "CacheDirectory": "spark-engine",
            "CacheDirectoryMode": "0750",
            "WorkingDirectory": rank.cache_directory,
        }
        if _in_home(rank.checkpoint):
            settings |= {"ProtectHome": "tmpfs", "BindReadOnlyPaths": _path(rank.checkpoint)}
        else:
            settings["ProtectHome"] = "yes"
    else:
        # The unit runs the client of the container runtime, as root; the sandbox is the
        # container: user, devices, no capabilities (spark-node exec).
        user = ["--user", ENGINE_USER]
        execute = _in_container(rank, CONTAINER, *user)
        if rank.engram is not None:
            name = f"{CONTAINER}-check"
            pre.append([*_in_container(rank, name, *user), "--", "spark-engram", *check])
        # the container has a cgroup of its own and may outlive its client, or a power cut
        pre.insert(0, _remove_container(CONTAINER))
        stop_post = [_remove_container(CONTAINER)]
    return _unit(
        ENGINE,
        f"SGLang rank {rank.rank} of {rank.tp}",
        "exec",
        after=[*needed, GUARD],
        requires=needed,
        # not required: systemd would restart the engine with the guard; the supervisor arms the
        # guard before each start and stops the group when it fails for good
        wants=[GUARD],
        started_by="supervisor",
        service=_Service(execute, pre, stop_post, settings),
    )


def _ready(rank: Rank) -> UnitPlan:
    settings: Settings = {
        **_PROGRAM,
        **_RUN_SPARK,
        "NotifyAccess": "main",
        "TimeoutStartSec": str(rank.ready_timeout + rank.probe_timeout + 60),
        "TimeoutStopSec": "10",
        "Restart": "no",
    }
    if rank.key_file is not None:
        settings |= _with_key(rank.key_file)
    return _unit(
        READY,
        "The endpoint answers a real generation",
        "notify",
        after=[ENGINE],
        requires=[ENGINE],
        started_by="supervisor",
        service=_Service(exec_start=rank.command("ready"), settings=settings),
    )


def _router(rank: Rank) -> UnitPlan:
    """Return the unit of sglang-router.

    It has a life of its own: ``stop`` leaves it up, so that the other replicas serve on.
    """
    settings: Settings = {
        **_PRIVATE,
        "DynamicUser": "yes",
        "ProtectHome": "yes",
        "PrivateDevices": "yes",
        "ProtectControlGroups": "yes",
        "ProtectKernelTunables": "yes",
        "RestrictRealtime": "yes",
        "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6",
        "SystemCallFilter": "@system-service",
        "SystemCallErrorNumber": "EPERM",
        "CapabilityBoundingSet": "",
        "LimitNOFILE": "1048576",
        "UMask": "0077",
        "Restart": "always",
        "RestartSec": "2",
        "TimeoutStopSec": "30",
    }
    if rank.key_file is not None:
        settings |= _with_key(rank.key_file)
    return _unit(
        ROUTER,
        "One address for several clusters",
        "exec",
        after=[NETWORK_ONLINE],
        wants=[NETWORK_ONLINE],
        wanted_by=["multi-user.target"],
        started_by="boot",
        service=_Service(
            exec_start=rank.command("router", "--python", ROUTER_PYTHON), settings=settings
        ),
    )


def _in_container(rank: Rank, name: str, *options: str) -> list[str]:
    runtime = ["--container-runtime", CONTAINER_RUNTIME, "--image", IMAGE]
    return rank.command("exec", "--container", name, *runtime, *options)


def _remove_container(name: str) -> list[str]:
    return [f"-{CONTAINER_RUNTIME}", "rm", "--force", name]


def _privileged(command: list[str]) -> list[str]:
    return [f"+{command[0]}", *command[1:]]


def _with_key(key_file: str) -> Settings:
    """Return the settings of a unit that is given the API key, and keeps it out of the journal."""
    return {
        "LoadCredential": f"api-key:{key_file.replace('%', '%%')}",
        "LogFilterPatterns": KEY_IN_LOG,
    }


def _path(path: str) -> str:
    """Return a path as a word of a setting that takes a list of paths."""
    text = path.replace("%", "%%")
    return f'"{text}"' if " " in text else text


def _in_home(path: str) -> bool:
    return path.startswith(("/home/", "/root/", "/run/user/"))


def _unit(
    name: str,
    description: str,
    kind: Literal["oneshot", "notify", "exec", "target", "mount", "system"],
    *,
    after: list[str] | None = None,
    requires: list[str] | None = None,
    wants: list[str] | None = None,
    wanted_by: list[str] | None = None,
    started_by: Literal["boot", "target", "supervisor"] = "target",
    unit_settings: dict[str, str] | None = None,
    service: _Service | None = None,
) -> UnitPlan:
    body = service or _Service()
    return UnitPlan(
        name=name,
        description=description,
        type=kind,
        after=after or [],
        requires=requires or [],
        wants=wants or [],
        part_of=[] if started_by == "boot" else [TARGET],
        conflicts=[],
        wanted_by=wanted_by or [],
        started_by=started_by,
        exec_start_pre=body.exec_start_pre,
        exec_start=body.exec_start,
        exec_stop_post=body.exec_stop_post,
        unit_settings=unit_settings or {},
        settings=dict(body.settings),
    )
