"""The ``spark-engram`` command: parses, calls, prints."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from spark_engram import bench, check, fake, pack, receipt
from spark_engram import format as packed
from spark_engram.checkpoint import Checkpoint
from spark_engram.errors import EngramError, UsageError
from spark_engram.layout import Layout
from spark_engram.progress import JsonReporter, Reporter, TextReporter, size_text
from spark_engram.store import StoreOptions

Command = Callable[[argparse.Namespace], None]


class Interrupted(BaseException):
    """SIGTERM arrived: stop as after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (README.md lists them)."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _raise_interrupted)
    command: Command = arguments.command
    try:
        command(arguments)
    except EngramError as error:
        if getattr(arguments, "json_progress", False):
            JsonReporter(sys.stdout).emit(
                "error",
                error=type(error).__name__,
                message=str(error),
                exit_status=error.exit_status,
                resumable=error.resumable,
            )
        print(f"spark-engram: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return _stopped(128 + signal.SIGINT)
    except Interrupted:
        return _stopped(128 + signal.SIGTERM)
    return 0


def _stopped(status: int) -> int:
    print(
        "\nspark-engram: stopped; nothing is lost, the same command goes on from here",
        file=sys.stderr,
    )
    return status


def _raise_interrupted(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spark-engram", description="Packed Engram tables: make, check and measure them."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add = commands.add_parser("pack", help="pack one rank's rows from a checkpoint")
    add.set_defaults(command=_pack)
    add.add_argument("--checkpoint", type=Path, required=True, help="folder with config.json")
    add.add_argument("--output", type=Path, required=True, help="folder on the NVMe drive")
    add.add_argument("--tp", type=_positive, required=True, help="tensor-parallel size")
    add.add_argument("--rank", type=_natural, required=True, help="rank of this node")
    add.add_argument("--layer", type=_natural, action="append", help="default: every layer")
    add.add_argument("--layout", choices=("auto", "columns", "rows"), default="auto")
    add.add_argument("--revision", help="model revision (default: what the download recorded)")
    add.add_argument("--verify", action="store_true", help="re-read and compare with the source")
    add.add_argument("--restart", action="store_true", help="replace what is there already")
    add.add_argument("--readers", type=_positive, default=4, help="source reads in flight")
    add.add_argument("--json-progress", action="store_true", help="JSON lines on stdout")

    add = commands.add_parser("verify", help="re-read a packed file and check everything")
    add.set_defaults(command=_verify)
    add.add_argument("file", type=Path)
    add.add_argument("--checkpoint", type=Path, help="also compare rows with this checkpoint")
    add.add_argument("--json-progress", action="store_true", help="JSON lines on stdout")

    add = commands.add_parser("info", help="show what a packed file is")
    add.set_defaults(command=_info)
    add.add_argument("file", type=Path)
    add.add_argument("--json", action="store_true")

    add = commands.add_parser("bench", help="measure random row reads of a packed file")
    add.set_defaults(command=_bench)
    add.add_argument("file", type=Path)
    add.add_argument("--ids", type=_positive, action="append", help="batch sizes, repeatable")
    add.add_argument("--seconds", type=float, default=3.0, help="time for each batch size")
    add.add_argument("--depth", type=_positive, default=StoreOptions.depth)
    add.add_argument("--threads", type=_positive, default=StoreOptions.threads)
    add.add_argument("--backend", choices=("auto", "io_uring", "pread"), default="auto")
    add.add_argument("--sqpoll", action="store_true")
    add.add_argument("--no-fio", action="store_true", help="do not compare with fio")
    add.add_argument("--seed", type=_natural, default=0)
    add.add_argument("--json", action="store_true")

    add = commands.add_parser("fake-checkpoint", help="write a small, exactly built checkpoint")
    add.set_defaults(command=_fake)
    add.add_argument("folder", type=Path)
    add.add_argument("--rows-per-column", type=_positive, default=fake.FakeSpec.rows_per_column)
    add.add_argument("--layer", type=_natural, action="append", help="default: 1 and 14")
    add.add_argument("--seed", type=_natural, default=0)

    add = commands.add_parser("plugin-check", help="check the engine side before it starts")
    add.set_defaults(command=_plugin_check)
    add.add_argument("--tp", type=_positive, help="tensor-parallel size of the engine")
    add.add_argument("--rank", type=_natural, help="rank of this node")
    add.add_argument("--checkpoint", type=Path, help="the model folder the engine is given")
    add.add_argument("--json", action="store_true")
    return parser


def _pack(arguments: argparse.Namespace) -> None:
    layout = None if arguments.layout == "auto" else Layout[arguments.layout.upper()]
    options = pack.PackOptions(
        checkpoint=arguments.checkpoint,
        output=arguments.output,
        tp=arguments.tp,
        rank=arguments.rank,
        layers=tuple(arguments.layer or ()),
        layout=layout,
        revision=arguments.revision,
        verify=arguments.verify,
        restart=arguments.restart,
        readers=arguments.readers,
    )
    pack.pack(options, _reporter(arguments))


def _verify(arguments: argparse.Namespace) -> None:
    source = None
    if arguments.checkpoint is not None:
        identity = packed.read_identity(arguments.file)
        checkpoint = Checkpoint.read(arguments.checkpoint)
        if checkpoint.config_sha256 != identity.config_sha256:
            raise UsageError(
                f"{arguments.file} was packed from a checkpoint whose config.json has SHA-256 "
                f"{identity.config_sha256}, {arguments.checkpoint} has {checkpoint.config_sha256}"
            )
        source = checkpoint.source(checkpoint.table(identity.layer))
    pack.verify(arguments.file, source, _reporter(arguments))


def _info(arguments: argparse.Namespace) -> None:
    identity = packed.read_identity(arguments.file)
    found = receipt.read(arguments.file, identity)
    values = asdict(identity)
    values["layout"] = identity.layout.label
    values["column_bounds"] = list(identity.column_bounds)
    values |= {
        "rows": identity.rows.rows,
        "pages": identity.pages,
        "file_bytes": identity.file_bytes,
        "file_id": f"{identity.file_id:08x}",
        "receipt": found is not None,
    }
    if arguments.json:
        print(json.dumps(values))
        return
    del values["column_bounds"]
    values["columns"] = len(identity.column_bounds) - 1
    values["file_bytes"] = f"{identity.file_bytes} ({size_text(identity.file_bytes)})"
    for name, value in values.items():
        print(f"{name:14} {value}")


def _bench(arguments: argparse.Namespace) -> None:
    options = StoreOptions(
        backend=arguments.backend,
        depth=arguments.depth,
        threads=arguments.threads,
        sqpoll=arguments.sqpoll,
    )
    result = bench.run(
        arguments.file,
        options,
        batches=tuple(arguments.ids or bench.BATCHES),
        seconds=arguments.seconds,
        seed=arguments.seed,
        with_fio=not arguments.no_fio,
    )
    print(json.dumps(asdict(result)) if arguments.json else bench.text(result))


def _fake(arguments: argparse.Namespace) -> None:
    default = fake.FakeSpec()
    spec = fake.FakeSpec(
        rows_per_column=arguments.rows_per_column,
        layers=tuple(arguments.layer or default.layers),
        seed=arguments.seed,
    )
    try:
        tables = fake.write_checkpoint(arguments.folder, spec)
    except OSError as error:
        raise UsageError(f"{arguments.folder}: {error.strerror}") from error
    for table in tables:
        print(f"layer {table.layer}: {table.total_rows} rows, {table.columns} hash columns")


def _plugin_check(arguments: argparse.Namespace) -> None:
    if (arguments.tp is None) != (arguments.rank is None):
        raise UsageError("--tp and --rank go together")
    facts = check.engine_side(arguments.tp, arguments.rank, arguments.checkpoint)
    print(json.dumps(facts) if arguments.json else check.text(facts))


def _reporter(arguments: argparse.Namespace) -> Reporter:
    return JsonReporter(sys.stdout) if arguments.json_progress else TextReporter(sys.stderr)


def _positive(text: str) -> int:
    number = _natural(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
