"""Typed errors; ``cli`` turns them into one journal line and an exit status."""

from __future__ import annotations

from spark_appliance.names import GAVE_UP_STATUS


class NodeError(Exception):
    """Something on this node is not as the plan says, or a step failed: exit status 1."""

    exit_status = 1


class PlanError(NodeError):
    """The plan or the command line cannot be used: exit status 2."""

    exit_status = 2


class GaveUpError(NodeError):
    """The supervisor has used up its restarts; systemd must not start it again by itself."""

    exit_status = GAVE_UP_STATUS
