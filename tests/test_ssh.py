"""SSH: the exact command line, and a real server on the loopback (slow)."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from spark_appliance import process, ssh
from spark_appliance.errors import InputError, OperationError


@pytest.fixture
def runtime(monkeypatch):
    """A private runtime folder with a short path (sockets allow about 100 bytes)."""
    folder = Path("/tmp") / f"spark-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def fake_ssh(tmp_path, monkeypatch, runtime):  # noqa: ARG001 - for its effect
    """An ``ssh`` on PATH that notes its arguments and input, and answers as told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ssh"
    program.write_text(
        "#!/bin/sh\n"
        f'printf "%s\\0" "$@" > {tmp_path}/argv\n'
        f"cat > {tmp_path}/stdin\n"
        f"cat {tmp_path}/stdout 2>/dev/null\n"
        f"cat {tmp_path}/stderr >&2 2>/dev/null\n"
        f"exit $(cat {tmp_path}/status 2>/dev/null || echo 0)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    class Fake:
        @staticmethod
        def answer(status: int = 0, stdout: str = "", stderr: str = "") -> None:
            (tmp_path / "status").write_text(str(status))
            (tmp_path / "stdout").write_text(stdout)
            (tmp_path / "stderr").write_text(stderr)

        @property
        def argv(self) -> list[str]:
            return (tmp_path / "argv").read_text().split("\0")[:-1]

        @property
        def stdin(self) -> str:
            return (tmp_path / "stdin").read_text()

    return Fake()


def test_exact_command_line(runtime):
    host = ssh.Host("admin@spark1", options=("IdentityFile=/home/me/key",), connect_timeout_s=7)
    assert host.argv(["cat", "/etc/a b", "it's"]) == [
        "ssh", "-T",
        "-o", "BatchMode=yes",
        "-o", "ConnectTimeout=7",
        "-o", "ServerAliveInterval=15",
        "-o", "ServerAliveCountMax=4",
        "-o", "ControlMaster=auto",
        "-o", "ControlPersist=60",
        "-o", f"ControlPath={runtime}/spark-appliance/%C",
        "-o", "IdentityFile=/home/me/key",
        "--", "admin@spark1", "cat '/etc/a b' 'it'\"'\"'s'",
    ]  # fmt: skip


@pytest.mark.usefixtures("runtime")
def test_another_configuration_file(tmp_path, monkeypatch):
    path = tmp_path / "ssh config"
    path.touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for value in (str(path), "~/ssh config", "ssh config"):
        monkeypatch.setenv("SPARK_SSH_CONFIG", value)
        argv = ssh.Host("spark1").argv(["true"])
        assert argv[:4] == ["ssh", "-T", "-F", str(path)]
    monkeypatch.setenv("SPARK_SSH_CONFIG", "")
    assert "-F" not in ssh.Host("spark1").argv(["true"])


@pytest.mark.parametrize("value", ["/nowhere/config", "/", "~nobody-at-all/config"])
def test_a_configuration_that_is_no_file_is_refused_at_once(monkeypatch, value):
    monkeypatch.setenv("SPARK_SSH_CONFIG", value)
    with pytest.raises(InputError, match=f"SPARK_SSH_CONFIG={value}: there is no such file"):
        ssh.Host("spark1")


def test_nix_gets_the_same_configuration(tmp_path):
    path = tmp_path / "config"
    path.touch()
    environ = {"SPARK_SSH_CONFIG": str(path)}
    assert ssh.nix_options(environ) == f"-F {path} -o BatchMode=yes"
    more = {**environ, "NIX_SSHOPTS": "-p 2222"}
    assert ssh.nix_options(more) == f"-F {path} -o BatchMode=yes -p 2222"
    assert ssh.nix_options({}) == "-o BatchMode=yes"
    for name in ("a b", "a'b", "a$b"):
        (tmp_path / name).touch()
        with pytest.raises(InputError, match="choose a path without blanks"):
            ssh.nix_options({"SPARK_SSH_CONFIG": str(tmp_path / name)})


@pytest.mark.usefixtures("runtime")
def test_host_keys_are_left_to_the_users_configuration():
    assert not any("StrictHostKeyChecking" in word for word in ssh.Host("a").argv(["true"]))


@pytest.mark.parametrize(
    "destination",
    ["spark1", "admin@192.168.1.11", "ssh://admin@spark1:2222", "spark-1.lan", "a@[fe80::1%eth0]"],
)
def test_destinations(destination):
    assert ssh.Host(destination).destination == destination


@pytest.mark.parametrize("destination", ["", "-oProxyCommand=x", "a b", "a;b", "a@-x", "a\nb"])
def test_what_is_no_destination(destination):
    with pytest.raises(InputError, match="not an SSH destination"):
        ssh.Host(destination)


@pytest.mark.parametrize(
    "option",
    [
        "StrictHostKeyChecking=no",
        "stricthostkeychecking = off",
        "StrictHostKeyChecking no",
        "UserKnownHostsFile=/dev/null",
        "BatchMode=no",
    ],
)
def test_checks_cannot_be_switched_off(option):
    with pytest.raises(InputError, match="switches a check off"):
        ssh.Host("a", options=(option,))


def test_script_travels_on_standard_input(fake_ssh):
    fake_ssh.answer(stdout="done\n")
    done = ssh.Host("spark1").script("echo secret-text", "one arg", timeout=20)
    assert done.stdout == "done\n"
    assert fake_ssh.argv[-3:] == ["--", "spark1", "sh -s -- 'one arg'"]
    assert fake_ssh.stdin == "echo secret-text"
    assert not any("secret-text" in word for word in fake_ssh.argv)


def test_remote_failure(fake_ssh):
    fake_ssh.answer(status=3, stderr="no such unit\n")
    with pytest.raises(process.FailedError, match="no such unit"):
        ssh.Host("spark1").run(["systemctl", "start", "x"], timeout=20)
    assert ssh.Host("spark1").run(["x"], timeout=20, check=False).returncode == 3


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("Host key verification failed.\r\n", "compare the key's fingerprint"),
        ("admin@spark1: Permission denied (publickey).\n", "ssh-copy-id"),
        ("ssh: connect to host spark1 port 22: Connection refused\n", "start sshd"),
        ("ssh: Could not resolve hostname spark1: Name unknown\n", "check the name"),
        ("", "ssh gave no reason"),
    ],
)
def test_no_connection(fake_ssh, stderr, words):
    fake_ssh.answer(status=255, stderr=stderr)
    with pytest.raises(ssh.UnreachableError) as caught:
        ssh.Host("spark1").run(["true"], timeout=20)
    assert str(caught.value).startswith("spark1: no SSH connection")
    assert words in str(caught.value)


def test_streamed_script(fake_ssh):
    fake_ssh.answer(stdout="a\nb\n")
    with ssh.Host("spark1").stream_script("x", timeout=20) as lines:
        assert list(lines) == ["a", "b"]
    fake_ssh.answer(status=255, stderr="Permission denied\n")
    with (
        pytest.raises(ssh.UnreachableError),
        ssh.Host("spark1").stream_script("x", timeout=20) as lines,
    ):
        list(lines)


@pytest.mark.usefixtures("runtime")
def test_runtime_folder_is_private():
    folder = ssh.runtime_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert ssh.runtime_dir() == folder
    folder.chmod(0o755)
    with pytest.raises(OperationError, match="not a private folder"):
        ssh.runtime_dir()


def test_runtime_folder_may_not_be_a_link(runtime):
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "spark-appliance").symlink_to(runtime / "elsewhere")
    with pytest.raises(OperationError, match="not a private folder"):
        ssh.runtime_dir()


def test_runtime_folder_without_xdg():
    assert ssh.runtime_dir({}) == Path(f"/tmp/spark-appliance-{os.getuid()}")


# ------------------------------------------------------------- a real sshd on the loopback


@pytest.fixture
def sshd(tmp_path, runtime):
    """A real sshd with its own keys, port and known_hosts; yields (Host maker, known_hosts)."""
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(program).exists() or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd: install openssh-server and openssh-client")
    for name in ("host", "user", "other"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    Path("/run/sshd").mkdir(exist_ok=True) if os.getuid() == 0 else None
    config = tmp_path / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nStrictModes no\n"
        f"AuthorizedKeysFile {tmp_path}/authorized\nPidFile none\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n"
        "LogLevel VERBOSE\n"
    )
    known = tmp_path / "known_hosts"
    kind, key, *_ = (tmp_path / "host.pub").read_text().split()
    known.write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    server = subprocess.Popen([program, "-D", "-e", "-f", str(config)], stderr=subprocess.PIPE,
                              text=True)  # fmt: skip
    for line in server.stderr:  # an event, not a wait: sshd says when it listens
        if "Server listening" in line:
            break
    else:
        pytest.skip(f"sshd did not start: exit status {server.wait()}")

    def host(identity: str = "user", **more: str) -> ssh.Host:
        settings = {"IdentityFile": str(tmp_path / identity), "IdentitiesOnly": "yes",
                    "UserKnownHostsFile": str(known), **more}  # fmt: skip
        options = tuple(f"{name}={value}" for name, value in settings.items())
        return ssh.Host(f"ssh://{getpass.getuser()}@127.0.0.1:{port}", options)

    yield host, known
    for control in (runtime / "spark-appliance").glob("*"):
        subprocess.run(["ssh", "-o", f"ControlPath={control}", "-O", "exit", "x"],
                       capture_output=True, check=False)  # fmt: skip
    server.kill()
    server.wait()
    server.stderr.close()


@pytest.mark.slow
def test_real_ssh(sshd, runtime):
    host, _ = sshd
    node = host()
    done = node.script('printf "%s|" "$@"; cat /proc/sys/kernel/ostype', "a b", "it's", timeout=60)
    assert done.stdout == "a b|it's|Linux\n"
    # The connection is shared and stays; a second call goes through it.
    (control,) = (runtime / "spark-appliance").glob("*")
    assert stat.S_ISSOCK(control.stat().st_mode)
    assert node.run(["cat"], timeout=60, input="through stdin").stdout == "through stdin"
    with pytest.raises(process.FailedError, match="exit status 7"):
        node.run(["sh", "-c", "exit 7"], timeout=60)
    with pytest.raises(process.TimedOutError):
        node.run(["sleep", "1000"], timeout=1.0)
    # Killing that client must not have ended the shared connection.
    assert node.run(["echo", "on"], timeout=60).stdout == "on\n"


@pytest.mark.slow
def test_real_ssh_streams_and_stops(sshd):
    host, _ = sshd
    with host().stream_script("i=0; while :; do echo $i; i=$((i+1)); sleep 0.05; done",
                              timeout=60) as lines:  # fmt: skip
        reader = iter(lines)
        assert [next(reader) for _ in range(3)] == ["0", "1", "2"]


@pytest.mark.slow
def test_real_ssh_refuses_unknown_and_changed_host_keys(sshd, tmp_path):
    host, known = sshd
    known.rename(tmp_path / "away")
    with pytest.raises(ssh.UnreachableError, match="Host key verification failed"):
        host().run(["true"], timeout=60)
    kind, key, *_ = (tmp_path / "other.pub").read_text().split()
    place = (tmp_path / "away").read_text().split()[0]
    known.write_text(f"{place} {kind} {key}\n")
    with pytest.raises(ssh.UnreachableError) as caught:
        host().run(["true"], timeout=60)
    assert "if the node was reinstalled" in str(caught.value)


@pytest.mark.slow
def test_real_ssh_wrong_key(sshd):
    host, _ = sshd
    with pytest.raises(ssh.UnreachableError, match="ssh-copy-id"):
        host("other").run(["true"], timeout=60)
