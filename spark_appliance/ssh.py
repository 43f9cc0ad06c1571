"""The only module that talks to nodes: the user's own OpenSSH, without prompts.

Every argument of the ``ssh`` command line is built here:

- ``BatchMode=yes``: nothing ever asks; a missing key or an unknown host key is an error.
- Host keys are judged by the user's configuration and known_hosts. No option is passed for
  them, because one on the command line would override that configuration; with ``BatchMode``
  OpenSSH's default (``ask``) refuses unknown keys. Options that would switch the check off
  are refused.
- One connection per node is shared (``ControlMaster=auto``) through a socket in a private
  folder, and closes 60 s after its last use.
- Scripts and secrets travel on standard input, never in the command line.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spark_appliance import process
from spark_appliance.errors import InputError, OperationError
from spark_appliance.process import Completed, FailedError, ProcessError, Stream

CONFIG_VARIABLE = "SPARK_SSH_CONFIG"

# ssh's own exit status for "no connection"; remote commands give theirs through. (ssh(1))
_SSH_FAILED = 255
_PERSIST_S = 60
_ALIVE_INTERVAL_S = 15
_ALIVE_COUNT = 4

# user@host, host, an address, or ssh://user@host:port; a leading "-" would be an option.
_DESTINATION = re.compile(r"(?:ssh://)?(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9_\[][A-Za-z0-9._:%\[\]-]*/?")
_WEAKENING = re.compile(
    r"(?:StrictHostKeyChecking\s*[= ]\s*(?:no|off|false)|UserKnownHostsFile\s*[= ]\s*/dev/null"
    r"|GlobalKnownHostsFile\s*[= ]\s*/dev/null|BatchMode\s*[= ]\s*no).*",
    re.IGNORECASE,
)

# What ssh prints, and what the user can do about it.
_REMEDIES = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        (
            "the node's host key is not the one in known_hosts: if the node was reinstalled, "
            "remove the old key with ssh-keygen -R; if not, do not connect"
        ),
    ),
    (
        "Host key verification failed",
        "connect once by hand (ssh DESTINATION), compare the key's fingerprint and accept it",
    ),
    (
        "Permission denied",
        (
            "put your public key on the node (ssh-copy-id), load the private key (ssh-add) or name "
            "the user in the cluster file (ssh: root@ADDRESS)"
        ),
    ),
    ("Could not resolve hostname", "check the name, or give the node's address"),
    ("Connection refused", "start sshd on the node, or correct the port"),
    ("timed out", "check that the node is up and reachable from here"),
    ("No route to host", "check that the node is up and reachable from here"),
)


class UnreachableError(ProcessError):
    """No SSH connection to the node; the message says why and what to do."""

    def __init__(self, completed: Completed, destination: str) -> None:
        self.completed = completed
        self.destination = destination
        lines = [line for line in completed.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else "ssh gave no reason"
        remedy = next((r for mark, r in _REMEDIES if mark in completed.stderr), "")
        tail = f"\n    remedy: {remedy}" if remedy else ""
        super().__init__(completed.argv, f"{destination}: no SSH connection: {reason}{tail}")


@dataclass(frozen=True, slots=True)
class Host:
    """A node as ssh knows it.

    ``destination`` is what a user types after ``ssh``: an alias from their configuration,
    ``user@host`` or ``ssh://user@host:port``. ``options`` are further ``Name=value`` settings,
    one ``-o`` each. Without ``shared`` every command makes a connection of its own: proof that
    the node can still be reached. Raises InputError for a destination that is not one, for
    options that would switch host key checks or batch mode off, or for a SPARK_SSH_CONFIG that
    is no file.
    """

    destination: str
    options: tuple[str, ...] = ()
    connect_timeout_s: int = 10
    shared: bool = True

    def __post_init__(self) -> None:
        if not _DESTINATION.fullmatch(self.destination):
            raise InputError.one(
                "ssh.bad-destination",
                f"{self.destination!r} is not an SSH destination",
                "write user@host, an alias from ~/.ssh/config, or ssh://user@host:port",
            )
        config_options()  # a wrong one is refused before anything runs
        for option in self.options:
            if _WEAKENING.fullmatch(option.strip()):
                raise InputError.one(
                    "ssh.weak-option",
                    f"the SSH option {option!r} switches a check off",
                    "accept the node's host key once by hand instead",
                )

    def argv(self, command: Sequence[str]) -> list[str]:
        """Return the local command line that runs ``command`` (its words) on the node."""
        settings = [
            "BatchMode=yes",
            f"ConnectTimeout={self.connect_timeout_s}",
            f"ServerAliveInterval={_ALIVE_INTERVAL_S}",
            f"ServerAliveCountMax={_ALIVE_COUNT}",
            *self._sharing(),
            *self.options,
        ]
        options = [word for setting in settings for word in ("-o", setting)]
        config = config_options()
        return ["ssh", "-T", *config, *options, "--", self.destination, shlex.join(command)]

    def _sharing(self) -> list[str]:
        if not self.shared:
            return ["ControlMaster=no", "ControlPath=none"]
        return [
            "ControlMaster=auto",
            f"ControlPersist={_PERSIST_S}",
            f"ControlPath={runtime_dir() / '%C'}",
        ]

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        input: str | None = None,  # noqa: A002 - the name subprocess uses
        check: bool = True,
    ) -> Completed:
        """Run one command on the node; ``input`` is its standard input.

        Raises UnreachableError, TimedOutError, ProgramMissingError and, with ``check``,
        FailedError.
        """
        done = process.run(self.argv(command), timeout=timeout, input=input, check=False)
        if done.returncode == _SSH_FAILED:
            raise UnreachableError(done, self.destination)
        if check and done.returncode != 0:
            raise FailedError(done)
        return done

    def script(
        self, text: str, *args: str, timeout: float, check: bool = True, shell: str = "sh"
    ) -> Completed:
        """Run a shell script on the node; it travels on standard input. Raises as ``run``."""
        return self.run([shell, "-s", "--", *args], timeout=timeout, input=text, check=check)

    @contextlib.contextmanager
    def stream_script(
        self, text: str, *args: str, timeout: float, shell: str = "sh"
    ) -> Iterator[Stream]:
        """Run a script on the node and read its lines while it runs (see ``process.stream``).

        Iterating raises UnreachableError where ``run`` would.
        """
        argv = self.argv([shell, "-s", "--", *args])
        try:
            with process.stream(argv, timeout=timeout, input=text) as lines:
                yield lines
        except FailedError as error:
            if error.completed.returncode == _SSH_FAILED:
                raise UnreachableError(error.completed, self.destination) from None
            raise


def config_options(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return ``-F FILE`` when ``SPARK_SSH_CONFIG`` names another configuration than the user's.

    OpenSSH has no variable for that, and takes the home directory from the user database.
    Raises InputError when it is no file that can be read.
    """
    value = environ.get(CONFIG_VARIABLE, "")
    if not value:
        return []
    try:
        path = Path(value).expanduser().absolute()
    except RuntimeError:  # ~NAME of nobody
        path = Path(value)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise InputError.one(
            "ssh.config",
            f"{CONFIG_VARIABLE}={value}: there is no such file, or it cannot be read",
            f"set {CONFIG_VARIABLE} to an OpenSSH configuration file, or unset it",
        )
    return ["-F", str(path)]


def nix_options(environ: Mapping[str, str] = os.environ) -> str:
    """Return ``NIX_SSHOPTS`` for a program of Nix: the same configuration, and no prompts.

    What the user has in ``NIX_SSHOPTS`` follows. Raises InputError for a configuration file that
    Nix would take apart: older versions split the variable at blanks, whatever the quotes.
    """
    words = config_options(environ)
    if words and not re.fullmatch(r"[A-Za-z0-9_./+,:@%=-]+", words[1]):
        raise InputError.one(
            "ssh.config-for-nix",
            f"{CONFIG_VARIABLE}={words[1]}: Nix cannot be given this path",
            "choose a path without blanks and special characters",
        )
    return " ".join([*words, "-o BatchMode=yes", environ.get("NIX_SSHOPTS", "")]).strip()


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the private (0700) folder for connection sockets, made on first use.

    It is ``$XDG_RUNTIME_DIR/spark-appliance``, or ``/tmp/spark-appliance-UID`` without one: the
    path has to be short, since a socket's may not exceed about 100 bytes. Raises OperationError
    when another user owns it or others may enter it.
    """
    base = environ.get("XDG_RUNTIME_DIR")
    uid = os.getuid()
    path = Path(base) / "spark-appliance" if base else Path(f"/tmp/spark-appliance-{uid}")  # noqa: S108 - owner and mode are checked below
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise OperationError(
            f"cannot make {path}: {error.strerror or error}\n"
            "    remedy: set XDG_RUNTIME_DIR to a folder of yours"
        ) from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid or stat.S_IMODE(info.st_mode) & 0o077:
        raise OperationError(
            f"{path} is not a private folder of yours\n"
            "    remedy: remove it, or set XDG_RUNTIME_DIR to a folder of yours"
        )
    return path
