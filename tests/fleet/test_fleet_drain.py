"""The drain with a real packet filter, in network namespaces: who still reaches the engine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.fleet import drain

PORT = 8888
HEAD, REMOTE = "10.99.7.1", "10.99.7.2"
NOBODY = 65534

SERVER = """\
import sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

gate = threading.Event()
seen = []

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def chunk(self, text):
        self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(text), text))

    def do_GET(self):
        if self.path == "/release":
            gate.set()
        elif self.path != "/seen":
            seen.append(self.path)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.path.startswith("/slow"):
            self.chunk(b"begin ")
            gate.wait(60)
        self.chunk(" ".join(seen).encode() if self.path == "/seen" else b"end")
        self.chunk(b"")

server = ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Handler)
server.daemon_threads = True
print("listening", flush=True)
server.serve_forever()
"""

CLIENT = """\
import encodings.idna, http.client, json, os, sys  # idna: nobody may not read root's Python

host, port, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setuid(uid)
connections, answers = {}, {}
print("null", flush=True)
for line in sys.stdin:
    verb, name, path = json.loads(line)
    try:
        if verb == "get":
            if name not in connections:
                connections[name] = http.client.HTTPConnection(host, port, timeout=30)
                connections[name].connect()
                # a pooled connection is not opened anew behind the test's back
                connections[name].auto_open = 0
            connections[name].request("GET", path)
            answers[name] = connections[name].getresponse()
            said = answers[name].read().decode() if not path.startswith("/slow") else (
                answers[name].read(6).decode()
            )
        else:
            said = answers[name].read().decode()
    except (OSError, http.client.HTTPException) as error:
        said = type(error).__name__
    print(json.dumps(said), flush=True)
"""


def command(*argv: str, text: str | None = None) -> None:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


@dataclass
class Client:
    """A process with connections by name."""

    process: subprocess.Popen[str]

    def _ask(self, *words: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def get(self, name: str, path: str) -> Any:
        return self._ask("get", name, path)

    def rest(self, name: str) -> Any:
        return self._ask("rest", name, "")


@dataclass
class Net:
    """Two hosts, ``head`` and ``remote``, joined by a cable."""

    head: str
    remote: str
    folder: Path
    stack: contextlib.ExitStack

    def start(self, space: str, text: str, *words: str) -> subprocess.Popen[str]:
        path = self.folder / f"program{len(list(self.folder.iterdir()))}.py"
        path.write_text(text)
        process = subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, str(path), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def end() -> None:
            process.kill()
            process.communicate()

        self.stack.callback(end)
        return process

    def client(self, space: str, host: str, uid: int) -> Client:
        client = Client(self.start(space, CLIENT, host, str(PORT), str(uid)))
        assert client.hear() is None
        return client

    def nft(self, *argv: str, text: str | None = None) -> None:
        command("ip", "netns", "exec", self.head, *argv, text=text)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    if os.geteuid() != 0:
        pytest.skip("needs root for network namespaces")
    for program in ("ip", "nft"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (packages iproute2, nftables)")
    head, remote = f"spark-{os.getpid()}-h", f"spark-{os.getpid()}-r"
    with contextlib.ExitStack() as stack:
        try:
            for space in (head, remote):
                command("ip", "netns", "add", space)
                stack.callback(command, "ip", "netns", "delete", space)
                command("ip", "-n", space, "link", "set", "lo", "up")
            command("ip", "netns", "exec", head, "nft", "list", "ruleset")
            command(
                *("ip", "-n", head, "link", "add", "cable", "type", "veth"),
                *("peer", "name", "cable", "netns", remote),
            )
        except RuntimeError as error:
            pytest.skip(f"needs network namespaces and nf_tables: {error}")
        for space, address in ((head, HEAD), (remote, REMOTE)):
            command("ip", "-n", space, "address", "add", f"{address}/24", "dev", "cable")
            command("ip", "-n", space, "link", "set", "cable", "up")
        yield Net(head, remote, tmp_path, stack)


def test_nothing_new_reaches_the_engine_and_what_runs_finishes(net: Net) -> None:
    server = net.start(net.head, SERVER, str(PORT))
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    outside = net.client(net.remote, HEAD, 0)  # root elsewhere is a stranger here
    router = net.client(net.head, "127.0.0.1", NOBODY)
    router_by_address = net.client(net.head, HEAD, NOBODY)
    root = net.client(net.head, "127.0.0.1", 0)
    strangers = (outside, router, router_by_address)
    for number, client in enumerate(strangers):
        assert client.get("pooled", f"/before{number}") == "end"
        assert client.get("running", f"/slow{number}") == "begin "
    before = root.get("first", "/seen")

    net.nft("nft", "-f", "-", text=drain.rules(PORT))
    for client in strangers:
        assert client.get("new", "/new") == "ConnectionRefusedError"
        assert client.get("pooled", "/again") == "ConnectionResetError"
    # the ready probe and the report, on connections of before and on new ones
    assert root.get("first", "/seen") == before
    assert root.get("second", "/release") == "end"
    for client in strangers:
        assert client.rest("running") == "end"
    assert root.get("third", "/seen") == before

    net.nft("sh", "-c", drain._REMOVE, "sh", drain.TABLE)
    for client in strangers:
        assert client.get("after", "/after") == "end"
    net.nft("sh", "-c", drain._REMOVE, "sh", drain.TABLE)  # harmless when it is gone


def test_closing_twice_is_closing_once(net: Net) -> None:
    for _ in range(2):
        net.nft("nft", "-f", "-", text=drain.rules(PORT))
    net.nft("nft", "delete", "table", "inet", drain.TABLE)
