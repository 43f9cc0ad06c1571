"""A file tree and programs that look like one Spark of a plan, for the real probe to look at.

Values are those that the field reports of healthy, idle, installed nodes: kernel 6.17 or 7.0 with
kho=off, driver 580.173.02, ConnectX firmware 28.45.4028, 116 GiB available, PCIe Gen5 x4.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import shutil
import struct
from pathlib import Path

from spark_appliance import lockfile
from spark_appliance.doctor.engram_header import LAYOUTS, crc32c
from spark_appliance.doctor.request import PLAN_FILE, UNWANTED_UNITS, request
from spark_appliance.model.plan import EngramFile, NodePlan, Plan

SHARDS = 48
TENSOR_BYTES = 510_310_549_975 - SHARDS * 200_000
CONFIG = b'{"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}'
BLOCKED = "00:00:00:00:00:00"
STORE_PYTHON = "/nix/store/0000-sglang-env"
IMAGE = "registry.example/sglang@sha256:" + "a" * 64

_PROGRAM = """\
#!/bin/sh
key=$(printf '%s' "$*" | sha256sum | cut -c1-16)
for name in "$key" default; do
  file="$SPARK_FAKE/${0##*/}/$name"
  [ -f "$file" ] && exec cat "$file"
done
echo "unexpected: $0 $*" >&2
exit 99
"""

PROGRAMS = (
    *("docker", "dmesg", "ibv_devinfo", "ip", "iptables", "nft", "nmcli", "nvidia-smi"),
    *("nvme", "ping", "rpcinfo", "systemctl", "timedatectl"),
)


class FakeSpark:
    """The tree of one node below ``base``; ``root`` is its /, ``environ`` what the probe needs."""

    def __init__(self, base: Path, plan: Plan, node: NodePlan) -> None:
        self.base, self.plan, self.node = base, plan, node
        self.root = base / "root"
        self.environ = {
            "PATH": str(base / "bin"),  # what this machine has, podman say, is not the node's
            "SPARK_FAKE": str(base / "answers"),
        }
        (base / "bin").mkdir(parents=True)
        for name in PROGRAMS:
            program = base / "bin" / name
            program.write_text(_PROGRAM)
            program.chmod(0o755)
        for name in ("cat", "cut", "sha256sum", "sleep"):
            (base / "bin" / name).symlink_to(str(shutil.which(name)))
        self._system()
        self._memory()
        self._network()
        self._rdma()
        self._gpu()
        self._services()
        self._storage()
        self._engram()
        self._engine()

    def file(self, path: str, content: str | bytes) -> Path:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        return target

    def link(self, path: str, target: str) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def says(self, text: str, *argv: str) -> None:
        """Let a program print a text, for exactly these arguments or, without any, for all."""
        program, *words = argv
        key = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16] if words else "default"
        target = self.base / "answers" / program / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def remove(self, program: str) -> None:
        (self.base / "bin" / program).unlink()

    def mac(self, node: NodePlan, netdev: str) -> str:
        index = [rail.netdev for rail in node.rails].index(netdev)
        return f"4c:bb:47:00:{node.rank:02x}:{index:02x}"

    def _system(self) -> None:
        self.file("/proc/sys/kernel/osrelease", "6.17.0-1031-nvidia\n")
        self.file("/proc/sys/kernel/hostname", f"{self.node.name}\n")
        self.file("/proc/cmdline", "BOOT_IMAGE=/boot/vmlinuz root=LABEL=root ro "
                                   "cppc_cpufreq.auto_sel_mode=1\n")  # fmt: skip
        self.file("/proc/uptime", "86400.10 1700000.00\n")
        self.file("/proc/sys/kernel/random/boot_id", f"0000000{self.node.rank}-boot\n")
        self.file("/etc/os-release", 'ID=nixos\nVERSION_ID="26.05"\n')
        for name, value in {
            "sys_vendor": "NVIDIA", "product_name": "NVIDIA_DGX_Spark", "board_name": "P4242",
            "bios_vendor": "AMI", "bios_version": "5.36_0ACUM018", "bios_date": "05/14/2026",
        }.items():  # fmt: skip
            self.file(f"/sys/class/dmi/id/{name}", value + "\n")
        for name in [*self.node.kernel_modules, "nvidia"]:
            (self.root / "sys/module" / name).mkdir(parents=True)
        self.file("/proc/modules", "mlx5_ib 1 0 - Live 0x0\nnf_tables 1 0 - Live 0x0\n")
        self.file("/sys/module/nvidia_drm/parameters/modeset", "Y\n")
        self.file("/sys/module/nvidia_drm/parameters/fbdev", "N\n")
        self.file("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        self.file("/sys/class/watchdog/watchdog0/identity", "SBSA Generic Watchdog\n")
        self.file("/sys/class/watchdog/watchdog0/state", "active\n")
        self.file("/sys/class/watchdog/watchdog0/timeout", "30\n")
        self.says("Timezone=UTC\nNTP=yes\nNTPSynchronized=yes\n", "timedatectl", "show")
        self.says("usb 1-1: new device\n", "dmesg", "--notime")

    def _memory(self) -> None:
        self.file(
            "/proc/meminfo",
            "MemTotal:       127601664 kB\nMemFree:        118000000 kB\n"
            "MemAvailable:   121634816 kB\n"
            "CmaTotal:          65536 kB\nCmaFree:           60000 kB\n"
            "HugePages_Total:       0\n",
        )
        self.file(
            "/proc/buddyinfo",
            "Node 0, zone      DMA     10     10     10     10     10      8      8      8      5 "
            "     3    200\n"
            "Node 0, zone   Normal   5000   4000   3000   2000   1000    800    500    300    200 "
            "    100  28000\n",
        )
        self.file("/proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n")
        for name, value in self.node.sysctl.items():
            self.file("/proc/sys/" + name.replace(".", "/"), value + "\n")
        self.file("/proc/sys/vm/min_free_kbytes", "45166\n")
        self.file("/proc/1/comm", "systemd\n")
        self.file("/proc/1/statm", "40000 3000 2000 1 0 9000 0\n")

    def _network(self) -> None:
        node, addresses, neighbours = self.node, [], []
        addresses.append({"ifname": "lo", "addr_info": [
            {"family": "inet", "local": "127.0.0.1", "prefixlen": 8}]})  # fmt: skip
        self._netdev(node.lan_interface, "4c:bb:47:ff:00:01", 1500, 10000)
        addresses.append({"ifname": node.lan_interface, "addr_info": [
            {"family": "inet", "local": node.address, "prefixlen": 24},
            {"family": "inet6", "local": "fe80::1", "prefixlen": 64}]})  # fmt: skip
        pong = "2 packets transmitted, 2 received, 0% packet loss, time 300ms\n"
        self.says(pong, "ping")
        for rail in node.rails:
            self._netdev(rail.netdev, self.mac(node, rail.netdev), rail.mtu, 200000)
            where = f"/sys/class/net/{rail.netdev}/device"
            self.link(where, f"../../../bus/pci/devices/{rail.pci}")
            address, _, prefix = rail.address.partition("/")
            addresses.append({"ifname": rail.netdev, "addr_info": [
                {"family": "inet", "local": address, "prefixlen": int(prefix)}]})  # fmt: skip
            for peer in rail.peers:
                there = self.plan.node(peer.node)
                other = next(r for r in there.rails if r.address.split("/")[0] == peer.address)
                mac = self.mac(there, other.netdev)
                neighbours.append({"dst": peer.address, "dev": rail.netdev, "lladdr": mac})
            self.file(
                f"/etc/systemd/network/40-{rail.netdev}.network",
                f"[Match]\nName={rail.netdev}\n[Network]\nAddress={rail.address}\n",
            )
        self.says(json.dumps(addresses), "ip", "-j", "addr")
        self.says(json.dumps(neighbours), "ip", "-j", "neigh")
        self.says(json.dumps([{"dst": "default", "gateway": "192.168.1.1"}]), "ip", "-j", "route")
        self.remove("nmcli")
        accept = [{"match": {"op": "==", "left": {"meta": {"key": "iifname"}},
                             "right": {"set": [rail.netdev for rail in node.rails]}}},
                  {"accept": None}]  # fmt: skip
        self.says(json.dumps({"nftables": [
            {"metainfo": {}},
            {"chain": {"family": "inet", "table": "filter", "name": "input", "hook": "input",
                       "policy": "drop"}},
            {"rule": {"family": "inet", "table": "filter", "chain": "input", "expr": accept}},
        ]}), "nft", "-j", "list", "ruleset")  # fmt: skip
        self.file("/proc/net/tcp", "  sl  local_address rem_address   st\n"
                  "   0: 00000000:0016 00000000:0000 0A 0:0 0:0 0 0 0 1234 1\n")  # fmt: skip

    def _netdev(self, name: str, mac: str, mtu: int, speed: int) -> None:
        base = f"/sys/class/net/{name}"
        values = {"address": mac, "mtu": mtu, "operstate": "up", "carrier": 1, "speed": speed}
        for key, value in values.items():
            self.file(f"{base}/{key}", f"{value}\n")

    def _rdma(self) -> None:
        devinfo = ""
        for rail in self.node.rails:
            pci = f"/sys/bus/pci/devices/{rail.pci}"
            for key, value in {
                "current_link_speed": "32.0 GT/s PCIe", "current_link_width": "4",
                "max_link_speed": "32.0 GT/s PCIe", "max_link_width": "4",
            }.items():  # fmt: skip
                self.file(f"{pci}/{key}", value + "\n")
            base = f"/sys/class/infiniband/{rail.rdma}"
            self.file(f"{base}/fw_ver", "28.45.4028\n")
            self.file(f"{base}/board_id", "NVD0000000087\n")
            port = f"{base}/ports/1"
            self.file(f"{port}/state", "4: ACTIVE\n")
            self.file(f"{port}/phys_state", "5: LinkUp\n")
            self.file(f"{port}/rate", "200 Gb/sec (4X HDR)\n")
            self.file(f"{port}/link_layer", "Ethernet\n")
            self.file(f"{port}/hw_counters/packet_seq_err", "0\n")
            mapped = ipaddress.IPv6Address(
                f"::ffff:{ipaddress.IPv4Interface(rail.address).ip}"
            ).exploded
            table = [
                ("fe80:0000:0000:0000:4ebb:47ff:fe00:0001", "IB/RoCE v1"),
                ("fe80:0000:0000:0000:4ebb:47ff:fe00:0001", "RoCE v2"),
                (mapped, "IB/RoCE v1"),
                (mapped, "RoCE v2"),
                ("0000:0000:0000:0000:0000:0000:0000:0000", ""),
            ]
            for index, (gid, kind) in enumerate(table):
                self.file(f"{port}/gids/{index}", gid + "\n")
                if kind:
                    self.file(f"{port}/gid_attrs/types/{index}", kind + "\n")
                    self.file(f"{port}/gid_attrs/ndevs/{index}", rail.netdev + "\n")
            devinfo += (
                f"hca_id:\t{rail.rdma}\n\ttransport:\t\tInfiniBand (0)\n"
                "\t\tport:\t1\n\t\t\tmax_mtu:\t\t4096 (5)\n\t\t\tactive_mtu:\t\t4096 (5)\n"
            )
        self.says(devinfo, "ibv_devinfo", "-v")

    def _gpu(self) -> None:
        self.file(
            "/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.173.02  Release Build\n",
        )
        self.says(
            "NVIDIA GB10, 580.173.02, P8, 208, 3003, 4.31, 38, [N/A], Enabled\n",
            "nvidia-smi",
            "--query-gpu=name,driver_version,pstate,clocks.sm,clocks.max.sm,power.draw,"
            "temperature.gpu,memory.total,persistence_mode",
            "--format=csv,noheader,nounits",
        )
        self.says(
            "0x0000000000000001\n",
            "nvidia-smi",
            "--query-gpu=clocks_event_reasons.active",
            "--format=csv,noheader,nounits",
        )
        self.says(
            "",
            "nvidia-smi",
            "--query-compute-apps=pid,process_name,used_memory",
            "--format=csv,noheader,nounits",
        )

    def _services(self) -> None:
        asked = request(self.plan, self.node)
        enabled = {unit.name for unit in self.node.units if unit.started_by == "boot"}
        ours = {unit.name for unit in self.node.units} | {"spark.target", "spark-fabric.service"}
        blocks = []
        for name in asked["units"]:
            known = name in ours
            boot = name in enabled
            blocks.append(
                f"Id={name}\nLoadState={'loaded' if known else 'not-found'}\n"
                f"ActiveState={'active' if boot else 'inactive'}\n"
                f"SubState={'running' if boot else 'dead'}\n"
                f"UnitFileState={'enabled' if boot else 'static' if known else ''}\n"
                "Result=success\n"
            )
        self.says(
            "\n".join(blocks),
            "systemctl",
            "show",
            "--property=Id,LoadState,ActiveState,SubState,UnitFileState,Result",
            "--",
            *asked["units"],
        )
        self.says("multi-user.target\n", "systemctl", "get-default")
        self.says("", "systemctl", "list-units", "--state=failed", "--plain", "--no-legend")
        self.says(
            "RuntimeWatchdogUSec=30s\nDefaultLimitMEMLOCK=8388608\n",
            "systemctl",
            "show",
            "--property=RuntimeWatchdogUSec,DefaultLimitMEMLOCK",
        )
        self.says(
            "Id=ssh.service\nLoadState=not-found\nMemoryMin=0\nOOMScoreAdjust=0\n\n"
            "Id=sshd.service\nLoadState=loaded\nMemoryMin=67108864\nOOMScoreAdjust=-900\n",
            "systemctl",
            "show",
            "--property=Id,LoadState,MemoryMin,OOMScoreAdjust",
            "--",
            "ssh.service",
            "sshd.service",
        )
        assert not set(UNWANTED_UNITS) & ours

    def _storage(self) -> None:
        node, path = self.node, self.plan.model.path
        self.file(f"{path}/config.json", CONFIG)
        names = [f"model-{n:05d}-of-{SHARDS:05d}.safetensors" for n in range(1, SHARDS + 1)]
        for number, name in enumerate(names):
            size = TENSOR_BYTES // SHARDS + 200_000 + (TENSOR_BYTES % SHARDS if not number else 0)
            shard = self.file(f"{path}/{name}", b"")
            with shard.open("r+b") as file:
                file.truncate(size)
        index = {
            "metadata": {"total_size": TENSOR_BYTES},
            "weight_map": {f"layers.{n}.weight": name for n, name in enumerate(names)},
        }
        self.file(f"{path}/model.safetensors.index.json", json.dumps(index))
        lines = ["24 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw"]
        if node.weights.mount is not None:
            hidden = ("nofail", "_netdev", "ro")
            options = [o for o in node.weights.mount.options if o not in hidden]
            lines.append(
                f"80 24 0:60 / {path} ro,noatime shared:9 - nfs4 {node.weights.mount.what} "
                f"ro,{','.join(options)},addr=10.0.0.1,local_lock=none"
            )
            self.says(
                "program 100003 version 4 ready and waiting\n",
                "rpcinfo", "-T", "tcp", node.weights.mount.what.rpartition(":")[0], "nfs", "4",
            )  # fmt: skip
        if node.engram is not None and node.engram.device is not None:
            self.file("/dev/nvme1n1", b"")
            self.link(node.engram.device, "../../nvme1n1")
            # a plain file has device number 0:0
            lines.append(
                f"81 24 0:0 / {node.engram.directory} rw,noatime shared:10 - xfs /dev/nvme1n1 rw"
            )
        self.file("/proc/self/mountinfo", "\n".join(lines) + "\n")
        if node.weights.export is not None:
            export = node.weights.export
            options = ",".join([*export.options, "wdelay", "hide", "sec=sys", "secure"])
            self.file(
                "/var/lib/nfs/etab",
                "".join(f"{export.path}\t{client}({options})\n" for client in export.clients),
            )
            self.file("/proc/fs/nfsd/threads", f"{export.threads}\n")
            self.file("/proc/fs/nfsd/versions", "+3 +4 +4.1 +4.2\n")
        for name in ("nvme0n1", "nvme1n1"):
            self.file(f"/sys/block/{name}/queue/read_ahead_kb", "128\n")
            self.file(f"/sys/block/{name}/device/model", "SAMSUNG MZALC4T0HBL1\n")
        self.file("/dev/nvme0", b"")
        self.says(
            "get-feature:0x08 (Interrupt Coalescing), Current value:0x00000107\n",
            "nvme", "get-feature", "/dev/nvme0", "-f", "8",
        )  # fmt: skip
        self.file(PLAN_FILE, lockfile.dump_own(self.plan, self.node.name))
        (self.root / node.cache_directory.lstrip("/")).mkdir(parents=True)

    def _engram(self) -> None:
        plan = self.node.engram
        for file in plan.files if plan is not None else ():
            page = header(self.plan, self.node, file)
            target = self.file(f"{plan.directory}/{file.name}", page)
            with target.open("r+b") as stream:
                stream.truncate(file.bytes)
            self.file(f"{plan.directory}/{file.name}.receipt.json", json.dumps(receipt(file, page)))

    def _engine(self) -> None:
        start = f"{STORE_PYTHON}/bin/python3"
        properties = "LoadState,ActiveState,ExecStart,LimitMEMLOCK,MainPID,UnitFileState"
        self.unit_properties = properties
        self.says(
            "LoadState=loaded\nActiveState=inactive\nLimitMEMLOCK=infinity\nMainPID=0\n"
            "UnitFileState=static\nExecStart={ path=/nix/store/1-spark-node/bin/spark-node ; "
            f"argv[]=spark-node --plan {PLAN_FILE} exec --python {start} ; ignore_errors=no }}\n",
            "systemctl", "show", f"--property={properties}", "--", "spark-engine.service",
        )  # fmt: skip
        self.site(f"{STORE_PYTHON}/lib/python3.13/site-packages")
        self.file(start, b"")
        self.remove("docker")

    def site(self, site: str) -> None:
        """Put the engine's packages into a directory."""
        for name in (
            "sglang-0.5.23", "torch-2.14.1", "flashinfer_python-0.7.2", "sgl_kernel-0.4.0",
            "nvidia_nccl_cu13-2.30.7",
        ):  # fmt: skip
            self.file(f"{site}/{name}.dist-info/METADATA", "")
        self.file(
            f"{site}/sglang/srt/configs/deepseek_v41.py",
            'if architectures == ["DeepseekV41ForCausalLM"]:\n    pass\n',
        )
        self.file(
            f"{site}/nvidia/nccl/lib/libnccl.so.2",
            b"\x7fELF...NCCL version 2.30.7+cuda13.0...",
        )
        self.file(f"{site}/sgl_kernel/sm100/common_ops.abi3.so", fatbin(90, 100, 121))

    def docker(self) -> None:
        """Make it a node that runs the engine's image with docker."""
        program = self.base / "bin" / "docker"
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        self.says(
            "LoadState=loaded\nActiveState=inactive\nLimitMEMLOCK=infinity\nMainPID=0\n"
            "UnitFileState=static\nExecStart={ path=/usr/bin/docker ; argv[]=/usr/bin/docker run "
            f"--rm --network host --ulimit memlock=-1:-1 {IMAGE} python3 ; ignore_errors=no }}\n",
            "systemctl", "show", f"--property={self.unit_properties}", "--", "spark-engine.service",
        )  # fmt: skip
        self.says("active\n", "systemctl", "is-active", "docker.service")
        row = {"Repository": "registry.example/sglang", "Tag": "<none>", "ID": "sha256:" + "b" * 64,
               "Digest": "sha256:" + "a" * 64}  # fmt: skip
        form = ("--format", "{{json .}}")
        self.says(json.dumps(row) + "\n", "docker", "image", "ls", "--digests", "--no-trunc", *form)
        self.says("", "docker", "ps", "--no-trunc", *form)
        self.says("", "docker", "volume", "ls", "-q")
        layer = "/var/lib/docker/overlay2/1/diff"
        graph = {"Name": "overlay2", "Data": {"UpperDir": layer, "LowerDir": ""}}
        self.says(
            json.dumps(graph),
            "docker",
            "image",
            "inspect",
            "--format",
            "{{json .GraphDriver}}",
            IMAGE,
        )
        self.site(f"{layer}/opt/sglang/lib/python3.13/site-packages")
        self.file("/etc/cdi/nvidia.yaml", "cdiVersion: 0.5.0\n")
        shutil.rmtree(self.root / "nix")


def header(plan: Plan, node: NodePlan, file: EngramFile, **changes: object) -> bytes:
    """Return a header page as pkgs/spark-engram/FORMAT.md lays it out."""
    values: dict[str, object] = {
        "layer": file.layer, "tp": plan.parallel.tp, "rank": node.rank, "layout": file.layout,
        "row_start": file.row_start, "row_end": file.row_end, "file_bytes": file.bytes,
        "config": hashlib.sha256(CONFIG).digest(),
        "revision": (plan.model.revision or "").encode(),
    } | changes  # fmt: skip
    layouts = {name: number for number, name in LAYOUTS.items()}
    pages = int(values["file_bytes"]) // 4096 - 1
    fixed = struct.pack(
        "<8s6I3Q6I2Q2I32s64s", b"SPENGRAM", 1, 4096, values["layer"], values["tp"], values["rank"],
        layouts[values["layout"]], values["row_start"], values["row_end"], 384_016_682, 264, 256, 8,
        4096, 15, 24, pages, values["file_bytes"], 16384, 0x1234ABCD, values["config"],
        values["revision"],
    )  # fmt: skip
    body = fixed.ljust(4092, b"\0")
    return body + struct.pack("<I", crc32c(body))


def receipt(file: EngramFile, page: bytes) -> dict[str, object]:
    file_id = struct.unpack_from("<I", page, 100)[0]
    return {
        "format": "spark-engram-receipt", "version": 1, "file": file.name,
        "file_bytes": file.bytes, "file_id": f"{file_id:08x}", "packer": "spark-engram 0.1.0",
        "segments": ["00000000"],
    }  # fmt: skip


def fatbin(*architectures: int) -> bytes:
    """Return bytes with a fat binary of empty device code for some architectures."""
    entries = b"".join(
        struct.pack("<HHIQIIIIQQ", 2, 1, 48, 16, 0, 0, 0, number, 0, 0) + b"\0" * 16
        for number in architectures
    )
    return b"\x7fELF" + b"\0" * 60 + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
