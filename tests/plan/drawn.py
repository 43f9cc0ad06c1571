"""Valid clusters drawn by hypothesis."""

from __future__ import annotations

from typing import Any

from clusters import document
from hypothesis import strategies as st

SHAPES = [("single", 1), ("triangle", 3), ("switch", 3), ("switch", 4), ("ring", 4)]


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a valid cluster: shape, names, addresses, cabling, ports, storage, overrides."""
    kind, count = draw(st.sampled_from(SHAPES))
    data = document(kind, count)
    names = draw(
        st.lists(
            st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True),
            min_size=count,
            max_size=count,
            unique=True,
        )
    )
    hosts = draw(st.lists(st.integers(1, 250), min_size=count, max_size=count, unique=True))
    for node, name, host in zip(data["nodes"], names, hosts, strict=True):
        node["name"] = name
        node["address"] = f"192.168.7.{host}"
        node["system"] = draw(st.sampled_from(["nixos", "dgx-os"]))
        if "engram" in node and draw(st.booleans()):
            node["engram"] = {"device": f"/dev/disk/by-id/nvme-{name}"}
    data["topology"]["prefix"] = f"10.{draw(st.integers(0, 255))}.0.0/16"
    data["topology"]["mtu"] = draw(st.sampled_from([4200, 9000]))
    data["management_network"] = "192.168.7.0/24"
    data["api"] |= {"port": draw(st.integers(3000, 9999))}
    data["ports"] = {"rendezvous": draw(st.integers(21000, 29999))}
    if kind == "triangle" and draw(st.booleans()):
        # the mirrored cabling is as good
        data["topology"]["cables"] = {
            f"{names[i]}.p1": f"{names[(i + 1) % 3]}.p0" for i in range(3)
        }
    if kind == "switch" and draw(st.booleans()):
        data["topology"]["cables"] = {f"{name}.p1": "switch" for name in names}
    if kind != "ring" and count > 1:
        data["weights"] = {
            "mode": draw(st.sampled_from(["nfs", "local"])),
            "rdma": draw(st.booleans()),
        }
    if draw(st.booleans()):
        data["engine"] = {"args": {"log-level": draw(st.sampled_from(["info", "debug"]))}}
    return data
