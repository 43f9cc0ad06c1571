"""Where NixOS and DGX OS are meant to differ, each with the reason.

Names are regular expressions. A test fails when one of these no longer occurs in any example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NFS: Final = "nixpkgs' NFS; on DGX OS the packages nfs-kernel-server and nfs-common bring it"
NETWORKD: Final = "nixpkgs' networkd for the whole machine; DGX OS has it for the rails alone"
FIREWALL: Final = "nixpkgs' firewall; DGX OS has a table of its own, spark-firewall.service"
INDEX: Final = "a file that nixpkgs makes of values which are compared"
CONTAINER: Final = "the sandbox on DGX OS is the container (spark-node exec --container)"

NIXOS_UNITS: Final[Mapping[str, str]] = {
    r"(auth-rpcgss-module|nfs-(blkmap|idmapd|mountd)|rpc-(gssd|statd)|rpcbind)\.service": NFS,
    r"nfs-client\.target": NFS,
    r"systemd-(networkd(-varlink-metrics|-wait-online@?)?|resolved)\.(service|socket)": NETWORKD,
    r"nftables\.service": FIREWALL,
    r"systemd-(fsck|makefs)@\.service": NFS,
}

NIXOS_ETC: Final[Mapping[str, str]] = {
    r"exports|nfs\.conf|idmapd\.conf|request-key\.conf": NFS,
    r"systemd/network/45-spark-lan\.network": (
        "the LAN of a DGX OS node is its owner's: netplan has it, and with it the way in"
    ),
    r"systemd/network/99-.*|systemd/(networkd|resolved)\.conf|resolv(conf)?\.conf": NETWORKD,
    r"nsswitch\.conf": NETWORKD,
    r"modprobe\.d/nixos\.conf": FIREWALL,  # ip_tables is kept out beside nftables
    r"modules-load\.d/nixos\.conf|sysctl\.d/60-nixos\.conf|tmpfiles\.d|udev/.*": INDEX,
    r"systemd/((system|user)(-generators|-shutdown|\.conf)?|generator-environment\.json)": INDEX,
    r"hostname|hosts|dbus-1|polkit-1/.*|terminfo|pam/.*|pam\.d/.*": INDEX,
}

NIXOS_GONE: Final[Mapping[str, str]] = {
    r"dhcpcd\.(service|exit-hook)|resolvconf\.service": NETWORKD,
    r"network(-local-commands|ing-scripted)?\.(service|target)": NETWORKD,
    r"firewall\.service": FIREWALL,
}

NIXOS_PACKAGES: Final[Mapping[str, str]] = {
    r"nfs-utils|rpcbind|keyutils": NFS,
    r"nftables": FIREWALL,
    r"spark-engram": "for people at the prompt; on DGX OS it is in the image",
}

NIXOS_USERS: Final[Mapping[str, str]] = {"rpc": NFS}

DGX_UNITS: Final[Mapping[str, str]] = {
    "spark-recover.service": "generations of files; NixOS has its own",
    "spark-firewall.service": FIREWALL,
}

SETTINGS: Final[Mapping[tuple[str, str], str]] = {
    **{
        ("spark-engine.service", key): CONTAINER
        for key in (
            "BindReadOnlyPaths",
            "CapabilityBoundingSet",
            "DeviceAllow",
            "DevicePolicy",
            "Group",
            "LockPersonality",
            "NoNewPrivileges",
            "PrivateTmp",
            "ProtectClock",
            "ProtectControlGroups",
            "ProtectHome",
            "ProtectHostname",
            "ProtectKernelLogs",
            "ProtectKernelModules",
            "ProtectKernelTunables",
            "ProtectProc",
            "ProtectSystem",
            "RestrictAddressFamilies",
            "RestrictNamespaces",
            "RestrictRealtime",
            "RestrictSUIDSGID",
            "SystemCallArchitectures",
            "SystemCallErrorNumber",
            "SystemCallFilter",
            "UMask",
            "User",
            "WorkingDirectory",
        )
    },
    ("spark-engine.service", "CacheDirectory"): "tmpfiles.d makes it: the client runs as root",
    ("spark-engine.service", "CacheDirectoryMode"): "likewise",
    **{
        ("spark-engram-pack.service", key): CONTAINER
        for key in (
            "CapabilityBoundingSet",
            "LockPersonality",
            "MemoryDenyWriteExecute",
            "NoNewPrivileges",
            "PrivateDevices",
            "PrivateTmp",
            "ProtectClock",
            "ProtectHome",
            "ProtectHostname",
            "ProtectKernelLogs",
            "ProtectKernelModules",
            "ProtectSystem",
            "ReadWritePaths",
            "RestrictAddressFamilies",
            "RestrictNamespaces",
            "RestrictRealtime",
            "RestrictSUIDSGID",
            "SystemCallArchitectures",
            "SystemCallErrorNumber",
            "SystemCallFilter",
            "UMask",
        )
    },
}
"""Settings of a unit that only one of the systems has."""

TMPFILES: Final[Mapping[str, str]] = {
    "/var/cache/spark-engine": "CacheDirectory= of the unit makes it on NixOS",
}
