"""Every module with hand-written options: what it makes, and what it says about bad settings."""

from __future__ import annotations

from typing import Any

import pytest
from nixtool import Nix
from nixunits import sections, words

pytestmark = pytest.mark.nix


@pytest.fixture(scope="module")
def cases(nix: Nix) -> Any:
    return nix.evaluate("cases.nix")


GOOD = [
    "fabric-good",
    "fabric-own-trust",
    "fabric-by-mac",
    "fabric-soft",
    "weights-export",
    "weights-mount",
    "engram-good",
    "engram-directory",
    "guard-good",
    "guard-ssh-by-socket",
    "engine-good",
    "router-good",
    "fleet-good",
    "hardware-good",
    "hardware-own-cache",
    "hardware-open",
    "image-good",
    "image-engram-of-the-plan",
]

BAD = {
    "fabric-empty": ("services.spark.fabric.rails is empty", "Describe each cabled"),
    "fabric-same-address": (
        "two rails are in one subnet (a 10.77.1.1/24 and b 10.77.1.1/24)",
        "a subnet of its own",
    ),
    "fabric-same-subnet": (
        "two rails are in one subnet (a 10.77.1.1/24 and b 10.77.1.129/25)",
        "a subnet of its own",
    ),
    "fabric-same-pci": ("two rails have the same pci (a and b 0000:01:00.0)", "lspci -D"),
    "fabric-same-mac": ("two rails have the same mac (a and b 4c:bb:47:00:00:01)", "ip -br link"),
    "fabric-peer-name": ("spark8.example.org is no IPv4 address", "nodes[].address"),
    "fabric-route": ("services.spark.fabric.routes", "via GATEWAY dev NETDEV"),
    "fabric-unmatched": ("services.spark.fabric.rails.enp1s0f0np0", "lspci"),
    "weights-both": ("both exports (export.enable) and mounts", "turn one of them off"),
    "weights-no-clients": ("export.clients is empty", "List the workers' rail addresses"),
    "weights-everyone": ("single IPv4 addresses", "got *"),
    "weights-root": ("must have ro and root_squash", "a worker's root"),
    "weights-what": ('mount.what is "10.77.1.1"', "ADDRESS:/PATH"),
    "engram-unstable": ("/dev/nvme0n1p3", "/dev/disk/by-id"),
    "engram-create": ("without services.spark.engram.device", "turn createFilesystem off"),
    "engram-no-command": ("packArgv is empty", "spark-engram pack"),
    "guard-order": ("is below steadyBytes", "Raise"),
    "guard-unit": ("less than 512 MiB", "3221225472"),
    "engine-no-argv": ("engine.argv is empty", "services.spark.fleet"),
    "engine-key-in-argv": ("has --api-key", "services.spark.engine.apiKeyFile"),
    "engine-key-in-store": ("is in the Nix store", "/etc/spark/api-key"),
    "engine-key-without-config": ("needs services.spark.engine.configFile", "--config"),
    "engine-rank": ("rank is 1", "counted from 0"),
    "engine-ranks": ("services.spark.engine.ranks is 3", "set services.spark.fleet.plan"),
    "engine-no-model": ("settings.model.path is not known", "Set it to the directory"),
    "engine-no-shards": ("settings.model.shards is not set", "ls /models/small/*.safetensors"),
    "engine-in-home": ("does not see homes", "to /models"),
    "engine-no-guard": ("needs services.spark.guard.enable", "power"),
    "router-no-argv": ("router.argv is empty", "router: in the cluster file"),
    "router-key-in-argv": ("has --api-key", "services.spark.router.apiKeyFile"),
    "router-key-in-store": ("is in the Nix store", "/etc/spark/api-key"),
    "router-version": ("were written for 0.0.1", "render cluster.yaml"),
    "fleet-other-file": ("another content of the cluster file cluster.yaml", "commit both"),
    "fleet-version": ("has version 99", "render cluster.yaml"),
    "fleet-node": ('node is "spark7"', "spark1, spark2, spark3"),
    "fleet-hash": ("another cluster file", "render cluster.yaml"),
    "fleet-dgx-os": ("is a dgx-os node", "system: nixos"),
    "hardware-swap": ("swap is configured", "Remove swapDevices"),
    "hardware-x86": ("a DGX Spark is aarch64", 'hostPlatform = "aarch64-linux"'),
    "image-locked-out": ("nobody could log in", "services.openssh"),
    "image-password": ("the password of root", "hashedPasswordFile"),
    "image-empty-password": ("the password of root", "log in by key"),
    "image-autologin": ("services.getty.autologinUser", "Set it to null"),
    "image-ssh-password": ("SSH would accept passwords", "PasswordAuthentication"),
    "image-ssh-root": ("SSH would accept passwords", "prohibit-password"),
    "image-esp-name": ("without a leading slash", "spark/node"),
}


def test_every_case_is_judged(cases: Any) -> None:
    assert set(cases) == {*GOOD, *BAD}


@pytest.mark.parametrize("name", GOOD)
def test_good_settings_pass(cases: Any, name: str) -> None:
    assert cases[name]["messages"] == []


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_settings_are_refused_with_a_remedy(cases: Any, name: str) -> None:
    what, remedy = BAD[name]
    (message,) = cases[name]["messages"]
    text = " ".join(message.split())
    assert what in text
    assert remedy in text
    assert "services.spark." in text or "hardware.spark" in text


def test_fabric_by_hand(cases: Any) -> None:
    value = cases["fabric-good"]["value"]
    service = sections(value["unit"])["Service"]
    assert words(service["ExecStart"][0])[:6] == [
        "@spark-node@",
        "--plan",
        "/etc/spark/plan.json",
        "--node",
        "spark9",
        "fabric",
    ]
    route = sections(value["network"])["Route"]
    assert route == {"Destination": ["10.77.9.0/24"], "Gateway": ["10.77.1.2"]}
    (node,) = value["plan"]["nodes"]
    assert node["rails"][0]["peers"] == [{"node": "spark8", "address": "10.77.1.2"}]
    assert sections(value["target"])["Unit"]["Wants"] == ["spark-fabric.service"]
    assert value["sysctl"] == {
        "net.ipv4.conf.enp1s0f0np0.arp_ignore": "1",
        "net.ipv4.conf.enp1s0f0np0.arp_announce": "2",
        "net.ipv4.conf.enp1s0f0np0.rp_filter": "1",
    }
    rule = 'ip saddr { 192.168.1.8 } accept comment "other Sparks"\n'
    firewall = value["firewall"]
    assert sorted(firewall.pop("trustedInterfaces")) == ["enp1s0f0np0", "lo"]
    assert firewall == {
        "extraInputRules": rule,
        "allowedTCPPorts": [],
        "checkReversePath": True,
        "nftables": True,
    }
    assert sorted(cases["fabric-own-trust"]["value"]) == ["enp1s0f0np0", "lo", "tailscale0"]
    assert cases["fabric-by-mac"]["value"] == {"MACAddress": "4c:bb:47:00:00:01"}
    soft = cases["fabric-soft"]["value"]
    assert "rdma link add rocep1s0f0 type rxe netdev eth1" in soft["script"]
    assert soft["requiredBy"] == soft["before"] == ["spark-fabric.service"]
    assert "rdma_rxe" in soft["kernelModules"]


def test_weights_by_hand(cases: Any) -> None:
    export = cases["weights-export"]["value"]
    options = "ro,sync,no_subtree_check,root_squash,fsid=0"
    assert export["exports"] == (
        f"/models/DeepSeek-V4.1-Flash 10.77.1.2({options}) 10.77.2.3({options})\n"
    )
    assert export["nproc"] == 32
    assert export["nfsd"] == {
        "rdma": True,
        "rdma-port": 20049,
        "vers3": False,
        "vers4.0": False,
        "vers4.1": False,
        "vers4.2": True,
    }
    mount = cases["weights-mount"]["value"]
    assert sections(mount["mount"])["Mount"]["Where"] == ["/srv/my models"]
    assert mount["automount"] == ["multi-user.target"]
    assert mount["readAhead"] == {"default": 16384}


def test_engram_by_hand(cases: Any) -> None:
    value = cases["engram-good"]["value"]
    service = sections(value["pack"])["Service"]
    assert words(service["ExecStart"][0]) == [
        "@spark-engram@",
        "pack",
        "--checkpoint",
        "/models/a b",
        "--output",
        "/mnt/engram",
        "--tp",
        "1",
        "--rank",
        "0",
    ]
    assert service["ReadWritePaths"] == ["/mnt/engram"]
    pack = sections(value["pack"])["Unit"]
    assert pack["Requires"] == ["mnt-engram.mount"]
    mount = sections(value["mount"])["Mount"]
    assert mount["What"] == ["/dev/disk/by-id/nvme-x-part3"]
    assert mount["Type"] == ["ext4"]
    assert value["formatRequiredBy"] == ["mnt-engram.mount"]
    assert "/bin/spark-engram-format" in value["format"]
    assert 'ATTR{queue/scheduler}="none"' in value["udev"]
    assert value["tmpfiles"]["/mnt/engram"]["d"]["mode"] == "0755"
    directory = cases["engram-directory"]["value"]
    assert directory["format"] is False
    assert "/var/lib/spark/engram" not in directory["mounts"]


def test_guard_by_hand(cases: Any) -> None:
    value = cases["guard-good"]["value"]
    assert sections(value["unit"])["Service"]["OOMScoreAdjust"] == ["-1000"]
    assert value["sshd"] == {"MemoryMin": "64M", "OOMScoreAdjust": -1000}
    assert cases["guard-ssh-by-socket"]["value"] == {
        "connection": value["sshd"],
        "daemon": False,
    }
    assert value["slice"]["MemoryMin"] == "256M"
    assert value["guard"] == {"start_bytes": 5 << 30, "steady_bytes": 3 << 30, "interval": 1}


def test_engine_by_hand(cases: Any) -> None:
    value = cases["engine-good"]["value"]
    unit = sections(value["engine"])
    assert unit["Service"]["LoadCredential"] == ["api-key:/etc/spark/api-key"]
    assert unit["Service"]["LimitMEMLOCK"] == ["infinity"]
    assert unit["Unit"]["Requires"] == []  # no cables, no mounts, no tables here
    assert unit["Unit"]["After"] == unit["Unit"]["Wants"] == ["spark-guard.service"]
    assert unit["Unit"]["Description"] == ["SGLang rank 0 of 1"]
    assert sections(value["ready"])["Unit"]["Requires"] == ["spark-engine.service"]
    assert sections(value["target"])["Unit"]["Wants"] == [
        "spark-guard.service spark-supervisor.service"
    ]
    assert value["ports"] == [8888]
    # an option comes before argv
    assert value["plan"]["model"] == {
        "path": "/models/other",
        "served_name": "/models/other",
        "shards": 1,
    }
    assert value["plan"]["nodes"][0]["env"] == {"NCCL_DEBUG": "WARN"}


def test_router_by_hand(cases: Any) -> None:
    value = cases["router-good"]["value"]
    service = sections(value["unit"])["Service"]
    assert words(service["ExecStart"][0]) == [
        *["@spark-node@", "--plan", "/etc/spark/plan.json", "--node", "spark9"],
        *["router", "--python", "@router-python@"],
    ]
    assert service["LoadCredential"] == ["api-key:/etc/spark/api-key"]
    assert service["DynamicUser"] == ["yes"]
    assert value["wantedBy"] == ["multi-user.target"]
    assert value["ports"] == [8000]
    assert value["plan"]["router"]["argv"][:2] == ["--port", "8000"]


def test_hardware(cases: Any) -> None:
    sealed = cases["hardware-good"]["value"]
    assert "--lock-gpu-clocks=0,2200" in sealed["clock"]
    assert not sealed["driver"].startswith("580.")
    assert sealed["watchdog"] is False
    assert sealed["substituters"] == []
    assert sealed["keys"] == []
    assert sealed["trustedInterfaces"] == ["lo"]
    assert cases["hardware-own-cache"]["value"] == {
        "substituters": ["https://cache.example.org"],
        "keys": ["cache.example.org-1:AAAA", "another-1:BBBB"],
    }
    opened = cases["hardware-open"]["value"]
    assert len(opened["substituters"]) == 1
    assert opened["podman"] is True
    assert "podman+" in opened["trustedInterfaces"]
    assert opened["dashboard"] is True
    assert "kho=off" not in opened["kernelParams"]


def test_image(cases: Any) -> None:
    value = cases["image-good"]["value"]
    assert value["esp"] == ["EFI/BOOT/BOOTAA64.EFI", "EFI/Linux/spark-appliance_1.efi"]
    assert value["partitions"]["30-engram"]["Label"] == "spark-engram"
    assert value["root"] == "/dev/disk/by-partlabel/spark-root"
    assert value["passwords"] is False
    assert "ConditionFileNotEmpty=/boot/spark/authorized_keys\n" in value["keys"]
    assert " /boot/spark/authorized_keys /run/spark-keys/root\n" in value["keys"]
    # what ssh-copy-id added stays, and counts
    assert "/root/.ssh" not in value["keys"]
    assert {"/run/spark-keys/%u", "%h/.ssh/authorized_keys"} <= set(value["keyFiles"])
    assert value["partitions"]["10-esp"]["SizeMaxBytes"] == "1G"
    assert value["partitions"]["20-root"]["Type"] == "root-arm64"


def test_the_plans_engram_partition_is_made(cases: Any) -> None:
    assert cases["image-engram-of-the-plan"]["value"] is True
