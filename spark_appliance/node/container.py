"""The engine in a container: exactly the devices, limits, mounts and rights that it needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from spark_appliance.names import CONTAINER_SLICE
from spark_appliance.node.execute import engine_command, plan_environment
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.prepare import Owner

SECCOMP_FILE: Final = "/run/spark/seccomp.json"

SECCOMP: Final[dict[str, Any]] = {
    # The runtimes' default profiles refuse io_uring, which the Engram reader needs, so this one
    # names what is refused. The container has no capability and no root: most of it would fail
    # anyway.
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [
        {
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": 1,
            "names": [
                "acct",
                "add_key",
                "bpf",
                "clock_adjtime",
                "clock_settime",
                "delete_module",
                "finit_module",
                "fsconfig",
                "fsmount",
                "fsopen",
                "fspick",
                "init_module",
                "kexec_file_load",
                "kexec_load",
                "keyctl",
                "mount",
                "mount_setattr",
                "move_mount",
                "open_by_handle_at",
                "open_tree",
                "personality",
                "pivot_root",
                "quotactl",
                "reboot",
                "request_key",
                "setdomainname",
                "sethostname",
                "setns",
                "settimeofday",
                "swapoff",
                "swapon",
                "syslog",
                "umount2",
                "unshare",
                "userfaultfd",
                "vhangup",
            ],
        }
    ],
}


LOADER_VARIABLES: Final = frozenset({"LD_PRELOAD"})
"""Variables that would change the runtime's client itself: given by value, kept from it."""


@dataclass(frozen=True, slots=True)
class Container:
    """How to run a container of the engine's image."""

    name: str
    runtime: str
    image: str
    owner: Owner | None
    """None: root inside, which may do nothing but read and write every file that it is given."""
    writable_engram: bool = False

    def argv(self, context: NodeContext, command: Sequence[str]) -> list[str]:
        """Return the command line of the runtime's client.

        Variables are given by name alone; the client takes the values from its own environment
        (``environment``), so that they appear in no process list.

        Raises:
            NodeError: when the node has rails and the fabric was not brought up.
        """
        engram = context.node.optional_view("engram")
        library = context.node.optional_view("nccl_library")
        config = context.node.optional_text("config_file")
        cache = context.node.text("cache_directory")
        words = [self.runtime, "run", "--rm", "--init", "--name", self.name]
        words += ["--log-driver", "none"]  # the client's output goes to the journal already
        words += ["--network", "host", "--ipc", "host", "--cgroup-parent", CONTAINER_SLICE]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        if self.owner is not None:
            words += ["--user", f"{self.owner.uid}:{self.owner.gid}"]
        else:
            words += ["--user", "0:0", "--cap-add", "DAC_OVERRIDE"]
        words += ["--security-opt", f"seccomp={context.path(SECCOMP_FILE)}"]
        words += ["--pids-limit", "-1"]
        words += ["--ulimit", "memlock=-1:-1", "--ulimit", "stack=67108864:67108864"]
        words += ["--ulimit", "nofile=1048576:1048576"]
        if PurePosixPath(self.runtime).name == "podman":
            words += ["--device", "nvidia.com/gpu=all"]
        else:
            words += ["--gpus", "all"]
        if context.node.views("rails"):
            words += ["--device", "/dev/infiniband"]
        words += _mount(context.plan.view("model").text("path"), readonly=True)
        words += _mount(cache, readonly=False)
        if engram is not None:
            words += _mount(engram.text("directory"), readonly=not self.writable_engram)
        if config is not None and not command:
            words += _mount(config, readonly=True)
        if library is not None:
            words += _mount(library.text("path"), readonly=True)
        words += ["--workdir", cache]
        variables = plan_environment(context, fabric=not self.writable_engram)
        for name in sorted({*variables, "HOME"}):
            # what the loader reads is for the engine, not for the runtime's client
            words += ["--env", f"{name}={variables[name]}" if name in LOADER_VARIABLES else name]
        return [*words, self.image, *engine_command(context, None, command)]


def seccomp_text() -> str:
    """Return the seccomp profile as the runtimes read it."""
    return json.dumps(SECCOMP, indent=1) + "\n"


def _mount(path: str, *, readonly: bool) -> list[str]:
    # --mount fails for a missing source, -v would create an empty directory in its place
    return ["--mount", f"type=bind,src={path},dst={path}" + (",readonly" if readonly else "")]
