"""Problems met in the field, as data: number, name, and how each is caught.

Facts from public recipes and issue threads of people who serve this model on Sparks; the numbers
are stable and named in messages and in ``docs/problems.md``, which is generated from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Known:
    """A problem. ``catch``: how it can be caught, by letters of ``CATCHES``.

    ``elsewhere`` says what catches or prevents it when no check of doctor does.
    """

    number: str
    name: str
    catch: str
    elsewhere: str = ""


CATCHES: Final = {
    "D": "doctor, before a start",
    "C": "the cluster file alone",
    "L": "only the engine's log",
    "R": "only at run time",
    "N": "not at all",
}

_BENCH = "bench: fixed protocol, cache flushed, results checked"
_READY = "ready: a real generation with a deadline, from start to end of service"
_LIFE = "ranks live and die together: the supervisor stops and restarts all, with a limit"
_GUARD = "spark-guard.service stops the engine before the driver hangs the node"

PROBLEMS: Final = (
    Known("P01", "RDMA registration fails with ENOMEM: kexec handover keeps memory as CMA", "D"),
    Known("P02", "RDMA registration fails with ENOMEM on one node: locked memory limited", "D"),
    Known("P03", "First collective fails: GID index of another type or address", "D"),
    Known("P04", "All ranks spin at low power: queue pairs never complete", "D"),
    Known("P05", "GID table shifted after a link flap or network change", "D"),
    Known("P06", "GID of the right index but of RoCE v1", "D"),
    Known("P07", "Retry exceeded at first use: cold ARP", "D"),
    Known("P08", "Retry exceeded after a firmware update: MTU back to 1500", "D"),
    Known("P09", "Prefill 40 % slower: RDMA packets of 1024 bytes", "D"),
    Known("P10", "One rail works, its twin times out: both in one subnet", "C"),
    Known("P11", "Half the bandwidth: one twin not listed or not addressed", "CD"),
    Known("P12", "A few GB/s between two nodes: wrong NCCL build or one device", "D"),
    Known(
        "P13",
        "About 1 GB/s: NCCL fell back to sockets",
        "L",
        "NCCL_NET=IB in the plan makes it fail instead of falling back",
    ),
    Known("P14", "13 Gb/s although the link shows 200G: ConnectX came up degraded", "D"),
    Known("P15", "Twins of the second controller at half speed: PCIe x2", "D"),
    Known("P16", "Switch ports at 100G", "D"),
    Known("P17", "Ring of four: stock NCCL connects ranks without a cable", "CL"),
    Known("P18", "NCCL replaced on the head only", "D"),
    Known("P20", "Second PCIe plane carries nothing on a ring", "CL"),
    Known("P22", "Hang after hours: fence missing in NCCL's aarch64 send path", "D"),
    Known("P23", "Crash after a million collectives: NCCL 2.28", "D"),
    Known("P24", "Ranks dead-lock: proxy operations of NCCL 2.28 exhausted", "D"),
    Known("P25", "5 GiB pinned at start: NCCL's default buffers and channels", "C"),
    Known(
        "P26",
        "nccl-tests of 16 GiB freeze a node",
        "C",
        "we run no nccl-tests: doctor --deep uses ib_write_bw and a buffer of 2 GiB",
    ),
    Known("P27", "Rails without address after a reboot: two network managers", "D"),
    Known("P28", "Connections between ranks dropped by a firewall", "D"),
    Known(
        "P29",
        "One-shot all-reduce falls back to NCCL for large messages",
        "L",
        "not used: sglang 0.5.23 has no RoCE all-reduce",
    ),
    Known(
        "P30",
        "Hairpin path drops large messages: queue too small",
        "D",
        "not used: diagonals of a ring are not routed through the card's hairpin",
    ),
    Known("P31", "Transport errors on a switch without flow control", "R", "status: link counters"),
    Known("P32", "Node locks up: fatal PCIe error of the ConnectX", "N"),
    Known("P33", "A worker never joins the rendezvous", "R", _LIFE),
    Known("P35", "Bootstrap picks a wrong interface", "C"),
    Known("P36", "Mount refused: export lacks the worker's rail address", "C"),
    Known(
        "P37",
        "Sharing a second time mounts a wrong path",
        "C",
        "export and mount are units of the plan: starting them again changes nothing",
    ),
    Known(
        "P38",
        "Packing hangs after a stop: stop took the export down",
        "C",
        "export and mounts are started by boot, stopping spark.target leaves them up",
    ),
    Known("P39", "Worker serves an old model: left-over volume or copy", "D"),
    Known("P40", "Export refused: overlay file system", "D"),
    Known("P42", "Mounts gone after a reset: nothing mounts them at boot", "D"),
    Known(
        "P43",
        "Load at 28 MiB/s: page faults over a network file system",
        "C",
        "profiles: shards are dropped from the page cache after load; sglang 0.5.23 prefetches",
    ),
    Known("P44", "Loader threads dead-lock against NFS", "C"),
    Known("P45", "Step two to three times slower: packed file missing, silent fallback", "D"),
    Known("P46", "Packed for another number of ranks", "D"),
    Known(
        "P47",
        "Plausible but wrong output: row offset of the rank ignored",
        "R",
        "spark-engram: page numbers and file ids compared on every read; golden rows in its tests",
    ),
    Known("P48", "Short reads: truncated packed file", "D"),
    Known("P49", "Direct reads refused: NFS or odd block size", "D"),
    Known("P50", "Prefill differs by 42 % between runs: row cache and repeated text", "R", _BENCH),
    Known("P51", "NVMe coalescing judged by single reads", "D"),
    Known(
        "P52", "One start in three stalls with eight ranks", "R", "ready: a deadline for the start"
    ),
    Known("P53", "Slow reads after months: fragmented files", "D"),
    Known("P54", "Load dies near its end: page cache full", "R", _GUARD),
    Known("P56", "Files packed by another tool with another split", "D"),
    Known("P57", "Node answers ping only: driver spins on a failed allocation", "R", _GUARD),
    Known("P58", "Driver fails although memory is free: fragmented", "D"),
    Known("P59", "Node thrashes for hours: swap", "CR"),
    Known("P60", "Free memory reported as 3 GiB on an idle node", "C"),
    Known("P61", "CUDA sees less memory than there is", "D"),
    Known("P62", "Hard reset during a long prefill: transient and expandable segments", "C"),
    Known("P63", "Head dies at 200k tokens with three nodes: chunk too large", "C"),
    Known("P64", "NaN for prompts over 64 tokens: expandable segments", "C"),
    Known("P65", "KV pool differs from boot to boot: page cache counted as used", "D"),
    Known("P67", "Ray kills the engine", "C"),
    Known("P68", "Compiling kernels runs the node out of memory", "CD"),
    Known("P69", "Slow since a power event: clock latched low", "D"),
    Known("P70", "Slow with normal clocks: memory bandwidth low", "D"),
    Known("P71", "Node switches off under load", "R", "status: temperature and clocks"),
    Known("P72", "Node unreachable after a crash: no watchdog", "D"),
    Known("P73", "1 to 2 GiB missing: desktop, snap, splash", "D"),
    Known(
        "P74",
        "0.6 GB more on the head: health probe with its own CUDA context",
        "C",
        "our probes are plain HTTP from one process; containers have no health check",
    ),
    Known("P75", "Steps 0.6 ms longer: GPU polled every two seconds", "C"),
    Known("P76", "Host freezes in spite of a pinned KV pool: transient not counted", "C"),
    Known("P77", "Display memory cannot be allocated: desktop owns it", "D"),
    Known("P79", "Architecture unknown to the engine", "D"),
    Known("P80", "One rank behaves differently: images differ", "D"),
    Known("P81", "Image changed overnight: mutable tag", "C"),
    Known("P82", "No kernel image for the GPU", "D"),
    Known("P83", "Attention kernel of DSpark missing", "D"),
    Known(
        "P84",
        "Wrong output for more than 64 query rows",
        "R",
        "smoke: a long prompt with a needle",
    ),
    Known("P85", "Head hangs before HTTP: cargo probe", "C"),
    Known("P86", "Kernels are tuned anew at each boot", "C"),
    Known("P87", "Rare corrupted tokens: race in folded verification", "N"),
    Known("P88", "Ranks hang at the first request: a table missing on one", "D"),
    Known("P90", "TP 4 with EP 1 refused: expert width", "C"),
    Known("P91", "TP 8 with EP 1 refused", "C"),
    Known("P93", "Cached prefix computed again: prefix tails", "C"),
    Known("P94", "No hits in the prefix cache", "R", "bench: cached tokens are reported"),
    Known("P95", "Small requests wait with eight or more slots", "C"),
    Known(
        "P96",
        "A request runs away for hundreds of thousands of tokens",
        "C",
        "no flag of sglang 0.5.23 caps the output; clients must send max_tokens",
    ),
    Known("P97", "Logits differ between runs: fused finalize", "C"),
    Known("P98", "Hang with a healthy /health", "R", _READY),
    Known("P99", "Stall with hierarchical cache", "C"),
    Known("P100", "One rank wedges in a b12x kernel", "R", _READY),
    Known("P101", "Garbled output: branch head not pinned", "C"),
    Known("P102", "Incoherent text: variables of another engine fork", "C"),
    Known(
        "P103",
        "Override on the command line ignored",
        "C",
        "precedence is fixed (profile, cluster, node) and shown by spark-appliance show",
    ),
    Known(
        "P104",
        "Editing the launcher while it runs breaks the start",
        "N",
        "what a unit starts is a file in the Nix store or in an image: it does not change",
    ),
    Known("P106", "Freeze at NCCL start on two nodes: memory and its spikes", "D"),
    Known(
        "P107", "lmx reports success but nothing is recorded", "C", "bench: the response id is kept"
    ),
    Known("P108", "lmx rejects the hardware description", "C", "bench writes and checks the file"),
    Known("P109", "lmx shows no memory for GB10", "C", "bench writes the hardware file itself"),
    Known("P110", "CPU loops after NCCL start", "R", _READY),
)
