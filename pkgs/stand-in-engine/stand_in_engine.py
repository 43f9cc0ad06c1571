"""A stand-in for the engine in tests: same command line and HTTP routes, no GPU, no model.

``python3 -m sglang.launch_server ...`` of the stand-in package runs this. It refuses to start
when its command line, environment or configuration file is not what a rank must get; ranks
meet at the head as the engine's do, and a rank whose peer dies dies too. Exit status 64 means
that something handed to it was wrong; the reason is on stderr.

With ``SPARK_ENGRAM_DIR`` it opens its rank's packed files with the row store of spark-engram and
reads rows at the start and for each generation.

Routes of the head: ``/health``, ``/ready``, ``/metrics``, ``/server_info``, ``/v1/models``,
``/v1/chat/completions``; of the other ranks: ``/health``. For
tests ``/stand-in/allocate?mib=N``, which takes memory as a long prompt would.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

WRONG_SETTINGS = 64
PEER_LOST = 65

DEVICES = Path(os.environ.get("STAND_IN_DEVICES", "/sys/class/infiniband"))
"""Where RDMA devices are looked for."""

ANSWER = "42"
"""To the health probe's question, 19 + 23."""


def refuse(reason: str) -> NoReturn:
    """End with WRONG_SETTINGS and the reason."""
    print(f"stand-in engine: {reason}", file=sys.stderr, flush=True)
    os._exit(WRONG_SETTINGS)


def options(argv: list[str]) -> argparse.Namespace:
    """Parse what the stand-in looks at; flags that it does not know are the real engine's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--dist-init-addr")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--config", type=Path)
    return parser.parse_known_args(argv)[0]


def check_settings(given: argparse.Namespace, argv: list[str]) -> str | None:
    """Refuse wrong settings; return the API key of the head's configuration file."""
    index = given.model_path / "model.safetensors.index.json"
    if not index.is_file():
        refuse(f"{index} cannot be read")
    if given.tp != given.nnodes or not 0 <= given.node_rank < given.nnodes:
        refuse(f"--tp {given.tp}, --nnodes {given.nnodes}, --node-rank {given.node_rank}")
    empty = [name for name, value in os.environ.items() if name.startswith("NCCL_") and not value]
    if empty:
        refuse(f"empty variables: {', '.join(empty)}")
    if given.nnodes > 1:
        for name in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if name not in os.environ:
                refuse(f"{name} is not set")
        if not os.environ.get("NCCL_IB_GID_INDEX", "1").isdecimal():
            refuse("NCCL_IB_GID_INDEX is no number")
        missing = [
            device
            for device in os.environ["NCCL_IB_HCA"].lstrip("=").split(",")
            if not (DEVICES / device.split(":")[0]).exists()
        ]
        if missing:
            refuse(f"no such RDMA devices: {', '.join(missing)}")
    if given.config is None:
        return None
    mode = stat.S_IMODE(given.config.stat().st_mode)
    if mode != 0o600 or given.config.stat().st_uid != os.getuid():
        refuse(f"{given.config} has mode {mode:o} or another owner")
    name, _, value = given.config.read_text(encoding="utf-8").strip().partition(": ")
    if name != "api-key":
        refuse(f"{given.config} has {name!r} instead of api-key")
    key = str(json.loads(value))
    if any(key in word for word in [*argv, *os.environ.values()]):
        refuse("the key is on the command line or in the environment")
    return key


def open_rows(given: argparse.Namespace) -> list[Any]:
    """Open the packed Engram files of this rank; refuse what the row store refuses."""
    folder = os.environ.get("SPARK_ENGRAM_DIR")
    if not folder:
        return []
    from spark_engram.errors import EngramError
    from spark_engram.store import RowStore, StoreOptions

    options = StoreOptions.from_environment(os.environ)
    paths = sorted(Path(folder).glob(f"engram-l*-r{given.node_rank}of{given.tp}.bin"))
    if not paths:
        refuse(f"{folder} has no packed rows for rank {given.node_rank} of {given.tp}")
    try:
        stores = [RowStore(path, options) for path in paths]
        read_rows(stores)
    except EngramError as error:
        refuse(str(error))
    backends = ", ".join(sorted({store.backend for store in stores}))
    print(f"stand-in engine: {len(stores)} Engram files open ({backends})", flush=True)
    return stores


def read_rows(stores: list[Any]) -> None:
    """Read the first and the last row of each file; raises ReadError of spark_engram."""
    import numpy as np

    for store in stores:
        rows = store.identity.rows
        store.gather(np.array([rows.start, rows.end - 1], np.int64))


def watch(connection: socket.socket, who: str) -> None:
    """Die when the other end does: a surviving rank of the real engine hangs."""
    try:
        while connection.recv(1024):
            pass
    except OSError:
        pass
    print(f"stand-in engine: lost {who}", file=sys.stderr, flush=True)
    os._exit(PEER_LOST)


def meet(given: argparse.Namespace) -> list[socket.socket]:
    """Wait until all ranks have met at the head; returns the connections, which must stay open."""
    if given.nnodes == 1:
        return []
    host, _, port = str(given.dist_init_addr).rpartition(":")
    if given.node_rank:
        while True:
            try:
                connection = socket.create_connection((host, int(port)), timeout=600)
                break
            except OSError:
                time.sleep(0.2)
        connection.settimeout(None)
        connection.sendall(f"{given.node_rank}\n".encode())
        threading.Thread(target=watch, args=(connection, "the head"), daemon=True).start()
        return [connection]
    server = socket.create_server((host, int(port)))
    found: dict[int, socket.socket] = {}
    while len(found) < given.nnodes - 1:
        connection, _ = server.accept()
        rank = int(connection.makefile("r").readline())
        if rank in found:
            refuse(f"rank {rank} came twice")
        found[rank] = connection
        print(f"stand-in engine: rank {rank} is here", file=sys.stderr, flush=True)
    for rank, connection in found.items():
        threading.Thread(target=watch, args=(connection, f"rank {rank}"), daemon=True).start()
    return list(found.values())


class Handler(BaseHTTPRequestHandler):
    """The routes. ``key``, ``model`` and ``taken`` are set on the server."""

    server: Server

    def do_GET(self) -> None:
        """Answer the routes that only read."""
        route = urlsplit(self.path)
        if route.path == "/health" or (route.path == "/ready" and self.server.head):
            self.answer(200, {})
        elif route.path == "/metrics" and self.server.head:
            text = f"sglang:generation_tokens_total {self.server.tokens}\n"
            text += f"sglang:num_running_reqs {self.server.running}\nsglang:num_queue_reqs 0\n"
            self.send(200, "text/plain", text.encode())
        elif not self.server.head:
            self.answer(404, {})
        elif self.allowed() and route.path == "/server_info":
            self.answer(200, {"version": "stand-in", "served_model_name": self.server.model})
        elif self.allowed() and route.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": self.server.model}]})
        elif self.allowed() and route.path == "/stand-in/allocate":
            count = int(parse_qs(route.query)["mib"][0])
            self.server.taken.append(bytearray(b"x" * (count << 20)))
            self.answer(200, {"mib": count})

    def do_POST(self) -> None:
        """Answer a generation."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        if not self.allowed():
            return
        with self.server.counting():
            self.generate(body)

    def generate(self, body: dict[str, Any]) -> None:
        """Answer a generation whose key was right."""
        if self.path != "/v1/chat/completions" or body.get("model") != self.server.model:
            self.answer(404, {"error": {"message": f"no {self.path} for {body.get('model')}"}})
            return
        if self.server.stores:
            read_rows(self.server.stores)
        self.server.tokens += 1
        message = {"role": "assistant", "content": ANSWER}
        usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.answer(
            200,
            {
                "id": "stand-in",
                "object": "chat.completion",
                "model": self.server.model,
                "choices": [choice],
                "usage": usage,
            },
        )

    def allowed(self) -> bool:
        """Check the key; answers 401 by itself."""
        given = self.headers.get("Authorization", "")
        if self.server.key is None or given == f"Bearer {self.server.key}":
            return True
        self.answer(401, {"error": {"message": "invalid API key"}})
        return False

    def answer(self, status: int, body: dict[str, Any]) -> None:
        """Send JSON."""
        self.send(status, "application/json", json.dumps(body).encode())

    def send(self, status: int, kind: str, body: bytes) -> None:
        """Send bytes of a media type."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - name given there
        """Say nothing about single requests."""


class Server(ThreadingHTTPServer):
    """An HTTP server with what its handler needs."""

    def __init__(self, given: argparse.Namespace, key: str | None, stores: list[Any]) -> None:
        super().__init__((given.host, given.port), Handler)
        self.head = given.node_rank == 0
        self.stores = stores
        self.running = 0
        self._lock = threading.Lock()
        self.key = key
        self.model = given.served_model_name
        self.tokens = 0
        self.taken: list[bytearray] = []

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request while it runs."""
        with self._lock:
            self.running += 1
        try:
            yield
        finally:
            with self._lock:
                self.running -= 1


def main() -> None:
    """Run one rank."""
    words = sys.argv[1:]
    if words[:2] != ["-m", "sglang.launch_server"]:
        refuse(f"started with {words[:2]} instead of -m sglang.launch_server")
    given = options(words[2:])
    key = check_settings(given, words)
    # as sglang does (srt/entrypoints/engine.py:1185), key and all: the unit has to keep it back
    print(f"server_args={ {**vars(given), 'api_key': key} }", file=sys.stderr, flush=True)
    if os.environ.get("STAND_IN_FAIL"):
        refuse("told to fail by STAND_IN_FAIL")
    stores = open_rows(given)
    peers = meet(given)
    print(f"stand-in engine: rank {given.node_rank} of {given.nnodes} is up", flush=True)
    Server(given, key, stores).serve_forever()
    for peer in peers:
        peer.close()


if __name__ == "__main__":
    main()
