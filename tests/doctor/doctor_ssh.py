"""A program called ssh that answers as a test says, destination by destination."""

from __future__ import annotations

import json
from pathlib import Path

_SSH = """\
#!/bin/sh
# the destination is the word after --, the command the one behind it
for word in "$@"; do
  [ -n "$found" ] && { where=$word; break; }
  [ "$word" = "--" ] && found=1
done
for command in "$@"; do :; done
place="$FAKE_SSH/$where"
printf '%s\\n' "$@" > "$place/argv"
[ -f "$place/hang" ] && exec sleep 1000
[ -f "$place/local" ] && exec sh -c "$command"
cat > "$place/stdin"
[ -f "$place/stdout" ] && cat "$place/stdout"
[ -f "$place/stderr" ] && cat "$place/stderr" >&2
exit "$(cat "$place/status")"
"""

TIMED_OUT = "ssh: connect to host 192.168.1.12 port 22: Connection timed out\n"
REFUSED = "ssh: connect to host 192.168.1.12 port 22: Connection refused\n"
CHANGED_KEY = (
    "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.\n"
)
NO_KEY = "root@192.168.1.12: Permission denied (publickey).\n"


class FakeSsh:
    """Install with ``environ`` in the environment; say per destination what it does."""

    def __init__(self, base: Path, path: str) -> None:
        self.base = base
        (base / "bin").mkdir(parents=True)
        program = base / "bin" / "ssh"
        program.write_text(_SSH)
        program.chmod(0o755)
        self.environ = {"PATH": f"{base / 'bin'}:{path}", "FAKE_SSH": str(base / "hosts")}

    def host(
        self, destination: str, *, stdout: str = "", stderr: str = "", status: int = 0
    ) -> Path:
        place = self.base / "hosts" / destination
        place.mkdir(parents=True, exist_ok=True)
        (place / "stdout").write_text(stdout)
        (place / "stderr").write_text(stderr)
        (place / "status").write_text(str(status))
        return place

    def hangs(self, destination: str) -> None:
        (self.host(destination) / "hang").touch()

    def runs_here(self, destination: str) -> None:
        (self.host(destination) / "local").touch()

    def argv(self, destination: str) -> list[str]:
        return (self.base / "hosts" / destination / "argv").read_text().splitlines()

    def stdin(self, destination: str) -> str:
        return (self.base / "hosts" / destination / "stdin").read_text()


def line(document: dict[str, object]) -> str:
    return json.dumps(document) + "\n"
