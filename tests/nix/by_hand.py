"""Make ``by_hand_plans.json``: the plans that the modules make of the options in ``by-hand.nix``.

``python tests/nix/by_hand.py`` writes it, with Nix; a test compares it with what is committed, and
``tests/node/test_by_hand.py`` gives the plans to the node programs, without Nix.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from nixtool import Nix, find

PATH = Path(__file__).resolve().parent / "by_hand_plans.json"


def evaluated(nix: Nix) -> dict[str, Any]:
    """Return of each node ``messages`` (failed assertions), its ``plan`` and texts of ``units``."""
    found: dict[str, Any] = nix.evaluate("by-hand.nix")
    return {name: {"messages": node["messages"], **node["value"]} for name, node in found.items()}


def text(nodes: dict[str, Any]) -> str:
    """Return the file's content."""
    plans = {name: node["plan"] for name, node in nodes.items()}
    return json.dumps(plans, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    nix = find(f"spark-by-hand-{os.getpid()}")
    try:
        PATH.write_text(text(evaluated(nix)), encoding="utf-8")
    finally:
        shutil.rmtree(nix.source.parent)
