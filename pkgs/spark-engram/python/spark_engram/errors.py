"""Typed errors. Each carries the exit status the command line ends with."""

from __future__ import annotations


class EngramError(Exception):
    """Base class: a one-line message that says what is wrong, where, and what to do."""

    exit_status = 1
    resumable = False


class UsageError(EngramError):
    """A wrong option, configuration or path: running again unchanged cannot help."""

    exit_status = 2


class MismatchError(EngramError):
    """A packed file is damaged, or was packed for something else than what is asked for."""

    exit_status = 3


class SpaceError(EngramError):
    """The target file system has too little space. What is packed so far is kept."""

    exit_status = 4
    resumable = True


class SourceError(EngramError):
    """The checkpoint could not be read (a vanished NFS server, a short shard)."""

    exit_status = 5
    resumable = True


class TargetError(EngramError):
    """The packed file could not be written or synced."""

    exit_status = 6
    resumable = True


class BusyError(EngramError):
    """Another process is packing the same file."""

    exit_status = 7


class ReadError(EngramError):
    """A row could not be read, or its page failed its checksum. Never returns wrong rows."""

    exit_status = 8
