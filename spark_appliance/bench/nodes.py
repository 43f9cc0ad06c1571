"""What the nodes are, and what they drew while they generated: read over SSH.

nvidia-smi itself slows generation (0.6 ms a step when polled every 2 s, field notes 6.3), so a
node is never read more often than every 10 s, by one small script that stays connected.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spark_appliance.bench.result import Node, NodeSample, NodeUse, Reading
from spark_appliance.errors import OperationError, SparkError
from spark_appliance.process import Stream
from spark_appliance.ssh import Host

MIN_INTERVAL_S = 10
BUSY_PCT = 50.0
_FACTS_TIMEOUT_S = 30.0
_STOP_S = 5.0
# A reading loop ends by itself after this, should its client vanish without a word.
_LOOP_LIMIT_S = 24 * 3600

NA: Literal["N/A"] = "N/A"

# One "name=value" a line. Every command may be missing: then its line is, too.
_FACTS = """\
say() { [ -n "$2" ] && printf '%s=%s\\n' "$1" "$2"; }
first() { [ -r "$1" ] && head -n 1 "$1"; }
say kernel "$(uname -r)"
say architecture "$(uname -m)"
say os "$(. /etc/os-release 2>/dev/null && printf %s "$PRETTY_NAME")"
say nixos_system "$(readlink /run/current-system 2>/dev/null)"
say product "$(first /sys/class/dmi/id/product_name)"
say firmware.bios "$(first /sys/class/dmi/id/bios_version)"
say firmware.ec "$(first /sys/class/dmi/id/ec_firmware_release)"
for nic in /sys/class/infiniband/*; do
  [ -d "$nic" ] && say "firmware.${nic##*/}" "$(first "$nic/fw_ver")"
done
say mem_total_kib "$(awk '/^MemTotal:/ {print $2}' /proc/meminfo)"
fields="name driver_version vbios_version power.limit clocks.max.sm clocks.max.mem \
clocks.sm clocks.mem persistence_mode"
for field in $fields; do
  query="--query-gpu=$field --format=csv,noheader"
  say "gpu.$field" "$(nvidia-smi $query 2>/dev/null | head -n 1)"
done
for engine in docker podman; do
  image="$($engine container inspect --format '{{.Image}}' spark-engine 2>/dev/null)"
  [ -n "$image" ] || continue
  say image.id "$image"
  format='{{index .RepoDigests 0}}'
  say image.digest "$($engine image inspect --format "$format" "$image" 2>/dev/null)"
  break
done
exit 0
"""

# $1: seconds between readings, $2: number of readings.
_LOOP = """\
interval=$1 left=$2
fields=utilization.gpu,power.draw,temperature.gpu,clocks.sm,clocks.mem,memory.used
query="--query-gpu=$fields --format=csv,noheader,nounits"
while [ "$left" -gt 0 ]; do
  gpu="$(nvidia-smi $query 2>/dev/null | head -n 1)"
  memory="$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)"
  printf 'sample %s, %s\\n' "${gpu:-N/A, N/A, N/A, N/A, N/A, N/A}" "${memory:-N/A}" || exit 0
  left=$((left - 1))
  sleep "$interval"
done
"""


def facts(host: Host) -> dict[str, str]:
    """Return a node's kernel, driver, firmware, clocks and image. Raises as ``Host.script``."""
    return parse_facts(host.script(_FACTS, timeout=_FACTS_TIMEOUT_S).stdout)


def parse_facts(text: str) -> dict[str, str]:
    """Read ``name=value`` lines; other lines (a login banner) are ignored."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, mark, value = line.partition("=")
        if mark and name and " " not in name:
            found[name] = value.strip()
    return found


def parse_sample(line: str, t: float) -> NodeSample | None:
    """Read one ``sample`` line; None for any other line."""
    mark, _, rest = line.partition(" ")
    values = [value.strip() for value in rest.split(",")]
    if mark != "sample" or len(values) != 7:
        return None
    numbers = [_reading(value) for value in values]
    return NodeSample(
        t=t,
        sm_utilization_pct=numbers[0],
        power_w=numbers[1],
        temperature_c=numbers[2],
        sm_clock_mhz=numbers[3],
        memory_clock_mhz=numbers[4],
        gpu_memory_used_mib=numbers[5],
        mem_available_kib=numbers[6],
    )


def _reading(text: str) -> Reading:
    # nvidia-smi writes [N/A], N/A, [Not Supported] or [Unknown Error] where it has no number.
    try:
        return float(text)
    except ValueError:
        return NA


def use(samples: Iterable[NodeSample], windows: Sequence[tuple[float, float]]) -> NodeUse | None:
    """Return the means while generating: inside a window and SM utilisation >= 50 %.

    ``windows`` are (start, end) in the samples' clock. None when no reading qualifies.
    """
    chosen = [
        s
        for s in samples
        if s.sm_utilization_pct != NA
        and s.sm_utilization_pct >= BUSY_PCT
        and any(start <= s.t <= end for start, end in windows)
    ]
    if not chosen:
        return None
    memory = [s.mem_available_kib for s in chosen]
    numeric = [m for m in memory if m != NA]
    return NodeUse(
        readings=len(chosen),
        power_w=_mean(s.power_w for s in chosen),
        sm_clock_mhz=_mean(s.sm_clock_mhz for s in chosen),
        temperature_c=_mean(s.temperature_c for s in chosen),
        gpu_memory_used_mib=_mean(s.gpu_memory_used_mib for s in chosen),
        mem_available_kib=_mean(memory),
        mem_available_min_kib=min(numeric) if numeric else NA,
    )


def _mean(values: Iterable[Reading]) -> Reading:
    numeric = [v for v in values if v != NA]
    return statistics.fmean(numeric) if numeric else NA


@dataclass(slots=True)
class _Watched:
    name: str
    host: Host
    facts: dict[str, str] = field(default_factory=dict)
    samples: list[NodeSample] = field(default_factory=list)
    error: str | None = None
    known: threading.Event = field(default_factory=threading.Event)
    stream: Stream | None = None
    thread: threading.Thread | None = None


class Sampler:
    """Reads several nodes in the background, each through one SSH connection.

    A node that cannot be reached is an ``error`` in its record and never stops a measurement.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, Host]],
        interval_s: int = MIN_INTERVAL_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if interval_s < MIN_INTERVAL_S:
            raise OperationError(
                f"nodes are read every {MIN_INTERVAL_S} s at most: reading them slows generation"
            )
        self._interval_s = interval_s
        self._clock = clock
        self._origin = clock()
        self._stopping = False
        self._nodes = [_Watched(name, host) for name, host in hosts]

    def start(self, origin: float) -> None:
        """Begin to read all nodes; ``origin`` is the clock's zero. See ``ready``."""
        self._origin = origin
        for node in self._nodes:
            # Daemons: one that waits for a node must not keep an interrupted program alive.
            node.thread = threading.Thread(target=self._read, args=(node,), daemon=True)
            node.thread.start()

    @property
    def ready(self) -> bool:
        """Whether the facts of every node are known, or why they are not."""
        return all(node.known.is_set() for node in self._nodes)

    def stop(self) -> None:
        """End sampling; may be called twice."""
        self._stopping = True
        for node in self._nodes:
            if node.stream is not None:
                node.stream.stop()
        for node in self._nodes:
            if node.thread is not None:
                node.thread.join(_STOP_S)

    def nodes(self, windows: Sequence[tuple[float, float]]) -> list[Node]:
        """Return what is known so far; ``windows`` are the timed rounds (see ``use``)."""
        return [
            Node(
                name=n.name,
                facts=dict(n.facts),
                samples=list(n.samples),
                use=use(list(n.samples), windows),
                error=n.error,
            )
            for n in self._nodes
        ]

    def _read(self, node: _Watched) -> None:
        try:
            node.facts = facts(node.host)
        except SparkError as error:
            node.error = str(error)
            return
        finally:
            node.known.set()
        self._watch(node)

    def _watch(self, node: _Watched) -> None:
        if self._stopping:
            return
        count = str(_LOOP_LIMIT_S // self._interval_s)
        arguments = (str(self._interval_s), count)
        try:
            with node.host.stream_script(_LOOP, *arguments, timeout=_LOOP_LIMIT_S) as lines:
                node.stream = lines
                if self._stopping:
                    return
                for line in lines:
                    sample = parse_sample(line, round(self._clock() - self._origin, 3))
                    if sample is not None:
                        node.samples.append(sample)
        except SparkError as error:
            if not self._stopping:
                node.error = str(error)
