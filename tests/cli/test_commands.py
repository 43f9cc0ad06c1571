"""What people type: output, exit status, and that errors are lines and never tracebacks."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/cluster.yaml"))
DGX_OS = [
    name
    for name in EXAMPLES
    if "system: dgx-os" in (ROOT / "examples" / name / "cluster.yaml").read_text()
]


def test_init_check_render_show(run, tmp_path):
    started = run("init", "--topology", "triangle", "--nodes", "3")
    assert started.status == 0
    (tmp_path / "cluster.yaml").write_text(started.out)
    assert run("check").status == 0
    rendered = run("render")
    assert rendered.status == 0
    assert "wrote cluster.lock.json" in rendered.err
    shown = run("show", "spark2", "--format", "argv")
    lines = shown.out.splitlines()
    assert lines[:3] == ["python3", "-m", "sglang.launch_server"]
    assert lines[lines.index("--node-rank") + 1] == "1"


@pytest.mark.parametrize(
    ("topology", "nodes", "status"),
    [("single", 1, 0), ("pair", 2, 2), ("triangle", 3, 0), ("switch", 4, 0), ("ring", 4, 0)],
)
@pytest.mark.parametrize("system", ["nixos", "dgx-os"])
def test_what_init_prints_passes_check(run, tmp_path, topology, nodes, status, system):
    started = run("init", "--topology", topology, "--nodes", str(nodes), "--system", system)
    assert started.out.count("#") > 5
    (tmp_path / "cluster.yaml").write_text(started.out)
    assert run("check", "--quiet").status == status


@pytest.mark.parametrize("nodes", [5, 8])
def test_init_for_sizes_without_a_profile_says_so(run, tmp_path, nodes):
    started = run("init", "--topology", "switch", "--nodes", str(nodes))
    assert started.status == 0
    assert f"None is bundled for {nodes} nodes" in started.out
    (tmp_path / "cluster.yaml").write_text(started.out)
    checked = run("check")
    assert checked.status == 2
    assert "my-profile.yaml" in checked.err


def test_init_refuses_a_wrong_number_of_nodes(run):
    result = run("init", "--topology", "ring", "--nodes", "3")
    assert result.status == 2
    assert "a ring takes 4 nodes, not 3" in result.err


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_current(run, name):
    assert run("render", "--check", str(ROOT / "examples" / name / "cluster.yaml")).status == 0


def test_check_reports_every_problem_with_its_line(run, tmp_path):
    text = (ROOT / "examples" / "three-spark-triangle" / "cluster.yaml").read_text()
    text = text.replace("name: spark2\n", "name: spark1\n")
    text = text.replace("port: 8888", "port: 2049")
    (tmp_path / "cluster.yaml").write_text(text)
    result = run("check")
    assert result.status == 2
    line = 1 + text[: text.rindex("name: spark1\n")].count("\n")
    assert f"cluster.yaml:{line}:11: error: name spark1 is also that of node 1" in result.err
    assert "[ports.used-twice]" in result.err
    assert "remedy:" in result.err
    assert result.err.rstrip().endswith("cluster.yaml: 3 errors") or "errors" in result.err


def test_check_prints_the_budget(run, example):
    example("three-spark-triangle")
    result = run("check")
    assert "Memory of spark1, GiB" in result.out
    assert "117.8 of 121.69, 3.9 free" in result.out


def test_check_strict_fails_on_warnings(run, example):
    example("four-spark-switch")
    assert run("check", "--quiet").status == 0
    assert run("check", "--quiet", "--strict").status == 2


def test_check_of_a_pair_shows_the_arithmetic(run, tmp_path):
    (tmp_path / "cluster.yaml").write_text(run("init", "--topology", "pair").out)
    result = run("check")
    assert result.status == 2
    assert "37.8 GiB missing" in result.out
    assert "weights 145.0" in result.err


def test_render_is_the_same_from_everywhere(run, example, tmp_path):
    path = example("four-spark-ring")
    run("render")
    first = (tmp_path / "cluster.lock.json").read_bytes()
    other = tmp_path / "elsewhere"
    other.mkdir()
    assert run("render", str(path), "-o", str(other / "x.json"), "-q").status == 0
    assert (other / "x.json").read_bytes() == first
    assert run("render", "-o", "-").out.encode() == first


def test_render_in_other_processes_gives_the_same_bytes(example, tmp_path):
    path = example("three-spark-triangle")
    texts = []
    for seed, locale, zone in (("1", "C", "UTC"), ("77", "C.UTF-8", "Asia/Tokyo")):
        environment = {"PATH": os.defpath, "PYTHONHASHSEED": seed, "LC_ALL": locale, "TZ": zone}
        command = [sys.executable, "-m", "spark_appliance", "render", str(path), "-o", "-"]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, check=True, umask=0o077
        )
        texts.append(done.stdout)
    assert texts[0] == texts[1]


def test_stale_lock_is_told_with_a_diff(run, example):
    path = example("three-spark-triangle")
    assert run("render", "-q").status == 0
    assert run("render", "--check").status == 0
    path.write_text(path.read_text().replace("port: 8888", "port: 8889"))
    stale = run("render", "--check")
    assert stale.status == 1
    assert '+    "port": 8889' in stale.out
    assert "[plan.stale]" in stale.err
    assert "spark-appliance render cluster.yaml" in stale.err


def test_the_remedy_for_a_stale_lock_writes_that_lock(run, example):
    path = example("single-spark")
    path.rename(path.with_name("my cluster.yaml"))
    words = ["my cluster.yaml", "--system", "nixos", "-o", "a plan.json"]
    stale = run("render", "--check", *words)
    assert stale.status == 1
    shown = stale.err.strip().splitlines()[-1].partition("remedy: spark-appliance ")[2]
    assert shlex.split(shown) == ["render", *words]
    assert run(*shlex.split(shown), "-q").status == 0
    assert run("render", "--check", *words).status == 0


def test_a_comment_does_not_make_a_lock_stale(run, example):
    path = example("three-spark-triangle")
    run("render", "-q")
    path.write_text("# a remark\n" + path.read_text())
    assert run("render", "--check").status == 0


def test_a_plan_for_nixos_lies_beside_one_for_dgx_os(run, example):
    path = example("single-spark")
    assert run("render", "-q").status == 0
    result = run("render", "-q", "--system", "nixos")
    assert result.status == 0
    assert "wrote cluster.nixos.lock.json" in result.err
    systems = {
        name: json.loads((path.parent / name).read_text())["nodes"][0]["system"]
        for name in ("cluster.lock.json", "cluster.nixos.lock.json")
    }
    assert systems == {"cluster.lock.json": "dgx-os", "cluster.nixos.lock.json": "nixos"}
    path.write_text(path.read_text().replace("port: 8888", "port: 8889"))
    stale = run("render", "--check", "--system", "nixos")
    assert stale.status == 1
    assert "spark-appliance render cluster.yaml --system nixos" in stale.err


@pytest.mark.parametrize("name", DGX_OS)
def test_nixos_plans_of_the_examples_are_current(run, name):
    path = ROOT / "examples" / name / "cluster.yaml"
    assert run("render", "--check", "--system", "nixos", str(path)).status == 0


def test_render_check_without_a_lock(run, example):
    example("single-spark")
    assert run("render", "--check").status == 1


def test_render_into_a_folder_that_is_not_there(run, example):
    example("single-spark")
    result = run("render", "-o", "no/such/folder/plan.json")
    assert result.status == 1
    assert "cannot write the plan" in result.err


def test_a_failed_render_leaves_the_old_lock(run, example, tmp_path):
    path = example("single-spark")
    run("render", "-q")
    before = (tmp_path / "cluster.lock.json").read_bytes()
    path.write_text(path.read_text().replace("kind: single", "kind: ring"))
    assert run("render").status == 2
    assert (tmp_path / "cluster.lock.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cluster.lock.json", "cluster.yaml"]


def test_show_formats(run, example):
    example("three-spark-triangle")
    run("render", "-q")
    shell = shlex.split(run("show", "spark1", "--format", "shell").out)
    argv = run("show", "spark1", "--format", "argv").out.splitlines()
    env = run("show", "spark1", "--format", "env").out.splitlines()
    assert shell == ["env", *env, *argv]
    node = json.loads(run("show", "spark1", "--format", "json").out)
    assert node["argv"] == argv
    assert [f"{name}={value}" for name, value in sorted(node["env"].items())] == env
    table = run("show", "spark1").out
    for word in ("spark-engine.service", "10.77.112.1/24", "engram-l1-r0of3.bin", "rocep1s0f0"):
        assert word in table


def test_show_of_an_unknown_node(run, example):
    example("three-spark-triangle")
    run("render", "-q")
    result = run("show", "spark9")
    assert result.status == 2
    assert "use one of: spark1, spark2, spark3" in result.err


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "file.unreadable"),
        ("not json", "plan.not-json"),
        ("{}", "plan.version"),
        ("[]", "plan.version"),
        ('{"version": 1}', "schema.missing"),
    ],
)
def test_show_with_a_bad_plan(run, tmp_path, content, rule):
    if content is not None:
        (tmp_path / "cluster.lock.json").write_text(content)
    result = run("show", "spark1")
    assert result.status == 2
    assert f"[{rule}]" in result.err


@pytest.mark.parametrize("name", EXAMPLES)
def test_topology_picture_is_well_formed_and_complete(run, name, tmp_path):
    path = ROOT / "examples" / name / "cluster.yaml"
    assert run("topology", str(path), "-o", "t.svg").status == 0
    root = ElementTree.parse(tmp_path / "t.svg").getroot()  # noqa: S314
    words = " ".join("".join(element.itertext()) for element in root.iter())
    plan = json.loads((path.parent / "cluster.lock.json").read_text())
    text = run("topology", str(path)).out
    for node in plan["nodes"]:
        assert node["name"] in words
        assert f"rank {node['rank']}" in words
        for rail in node["rails"]:
            assert rail["netdev"] in words
            assert rail["address"] in words
            assert rail["address"] in text
    paths = [element for element in root.iter() if element.tag.endswith("}path")]
    assert len(paths) == len(plan["topology"]["cables"])
    # nothing is drawn outside of the picture
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    for element in root.iter():
        if "x" in element.attrib:
            assert 0 <= float(element.attrib["x"]) <= width
            assert 0 <= float(element.attrib["y"]) <= height


@pytest.mark.parametrize("what", ["cluster", "plan", "profile"])
def test_schema_is_json_schema(run, what):
    document = json.loads(run("schema", what).out)
    assert document["$schema"].startswith("https://json-schema.org/")
    assert document["additionalProperties"] is False
    assert (
        all("description" in value for value in document["properties"].values()) or what == "plan"
    )


def test_examples_hold_only_keys_of_the_schema(run):
    document = json.loads(run("schema").out)
    for name in EXAMPLES:
        data = yaml.safe_load((ROOT / "examples" / name / "cluster.yaml").read_text())
        assert set(data) <= set(document["properties"])


BAD_FILES = [
    (b"", "[yaml.empty]"),
    (b"a:\n\tb: 1\n", "[yaml.tab]"),
    (b"\xff", "[yaml.not-utf8]"),
    (b"version: 1\nversion: 1\n", "[yaml.duplicate-key]"),
    (b"x" * (10 << 20), "[file.too-large]"),
    (b"- a\n", "[schema.type]"),
]


@pytest.mark.parametrize("command", ["check", "render", "topology"])
@pytest.mark.parametrize(("raw", "rule"), BAD_FILES, ids=[rule for _, rule in BAD_FILES])
def test_bad_files_end_with_2_and_a_place(run, tmp_path, command, raw, rule):
    (tmp_path / "cluster.yaml").write_bytes(raw)
    result = run(command)
    assert result.status == 2
    assert rule in result.err
    assert "cluster.yaml:" in result.err


def test_a_file_that_is_not_there_or_a_folder(run):
    for target, words in (("nowhere.yaml", "there is no cluster file"), (".", "Is a directory")):
        result = run("check", target)
        assert result.status == 2
        assert words in result.err


def test_pipes_and_devices_are_refused_at_once(run, tmp_path, example):
    path = example("single-spark")
    os.mkfifo(tmp_path / "pipe")
    for target in ("pipe", "/dev/zero"):
        assert "no regular file" in run("check", target).err
        assert "no regular file" in run("show", "spark1", "-p", target).err
    path.write_text(path.read_text().replace("profile: single-dev", "profile: ./pipe"))
    assert "no regular file" in run("check").err


def test_output_follows_links_keeps_modes_and_spares_devices(run, example, tmp_path):
    example("single-spark")
    real = tmp_path / "real.json"
    real.write_text("old")
    real.chmod(0o600)
    (tmp_path / "link.json").symlink_to(real)
    assert run("render", "-q", "-o", "link.json").status == 0
    assert (tmp_path / "link.json").is_symlink()
    assert real.read_text().startswith("{")
    assert real.stat().st_mode & 0o777 == 0o600
    assert run("topology", "-o", "/dev/null").status == 0
    assert Path("/dev/null").is_char_device()
    assert run("topology", "-o", "-").out.startswith("<svg")
    assert run("render", "--check", "-o", "-").status == 2


def test_line_ends_make_a_lock_stale(run, example, tmp_path):
    example("single-spark")
    run("render", "-q")
    lock = tmp_path / "cluster.lock.json"
    lock.write_bytes(lock.read_bytes().replace(b"\n", b"\r\n"))
    assert run("render", "--check").status == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_another_encoding_gets_an_answer(example, tmp_path, encoding):
    path = example("three-spark-triangle")
    for command in ("check", "topology"):
        done = subprocess.run(
            [sys.executable, "-m", "spark_appliance", command, str(path)],
            env={"PATH": os.defpath, "PYTHONIOENCODING": encoding},
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_a_full_disk_and_a_closed_pipe_are_no_tracebacks(example, tmp_path):
    path = example("three-spark-triangle")
    script = f"{sys.executable} -m spark_appliance topology {path}"
    for tail in ("> /dev/full", "| head -c 1"):
        done = subprocess.run(
            ["sh", "-c", f"{script} {tail}"], capture_output=True, cwd=tmp_path, check=False
        )
        assert b"Traceback" not in done.stderr, done.stderr


def test_own_profile_by_path(run, example, tmp_path):
    path = example("single-spark")
    path.write_text(path.read_text().replace("profile: single-dev", "profile: ./mine.yaml"))
    missing = run("check")
    assert missing.status == 2
    assert "mine.yaml" in missing.err
    bundled = ROOT / "spark_appliance" / "profiles" / "data" / "single-dev.yaml"
    text = bundled.read_text().replace("name: single-dev", "name: mine")
    (tmp_path / "mine.yaml").write_text(text)
    assert run("render", "-q").status == 0
    assert json.loads((tmp_path / "cluster.lock.json").read_text())["source"]["profile"] == "mine"
    (tmp_path / "mine.yaml").write_text(text.replace("load-format", "lod-format"))
    result = run("check", "--quiet")
    assert result.status == 2
    assert "load-format" in result.err
    (tmp_path / "mine.yaml").write_text(text + "nonsense: 1\n")
    broken = run("check")
    assert broken.status == 2
    assert "mine.yaml:" in broken.err


def test_unknown_profile_is_named_at_its_line(run, example):
    path = example("single-spark")
    path.write_text(path.read_text().replace("single-dev", "single-dve"))
    result = run("check")
    assert result.status == 2
    assert "cluster.yaml:4:10: error: there is no profile 'single-dve'" in result.err


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from spark_appliance.cli import cli\n"
        "try:\n"
        "    cli.main(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'pydantic', 'yaml', 'rich', 'httpx', 'numpy'} & set(sys.modules)\n"
        "sys.exit(1 if heavy else 0)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


def test_every_command_of_the_table_has_help(run):
    from spark_appliance.cli import _COMMANDS

    for name, entry in _COMMANDS.items():
        result = run(name, "--help")
        assert result.status == 0
        assert name in result.out
        assert entry.summary in run("--help").out.replace("\n" + " " * 12, " ") or entry.summary


def test_shell_completion_lists_commands():
    environment = {
        **os.environ,
        "_SPARK_APPLIANCE_COMPLETE": "bash_complete",
        "COMP_WORDS": "spark-appliance re",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("spark-appliance")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "plain,render" in done.stdout


def test_unknown_command_and_option(run):
    assert run("rendr").status == 2
    assert run("check", "--nope").status == 2


def test_mistakes_in_a_profile_of_one_s_own_are_shown_there(run, tmp_path):
    bundled = ROOT / "spark_appliance" / "profiles" / "data" / "stable-tp3.yaml"
    profile = bundled.read_text().replace("name: stable-tp3", "name: mine")
    profile = profile.replace("args:\n", "args:\n  no-such-flag: 1\n")
    profile = profile.replace("env:\n", "env:\n  NCCL_NET: Socket\n")
    (tmp_path / "mine.yaml").write_text(profile)
    cluster = (ROOT / "examples" / "three-spark-triangle" / "cluster.yaml").read_text()
    (tmp_path / "cluster.yaml").write_text(
        cluster.replace("profile: stable-tp3", "profile: ./mine.yaml")
    )
    result = run("check")
    assert result.status == 2
    for name in ("no-such-flag", "NCCL_NET"):
        line = 1 + profile[: profile.index(f"  {name}:")].count("\n")
        assert f"mine.yaml:{line}:" in result.err, result.err


def test_a_cluster_that_does_not_fit_memory_can_be_drawn(run, tmp_path):
    (tmp_path / "cluster.yaml").write_text(run("init", "--topology", "pair", "--nodes", "2").out)
    assert run("check", "--quiet").status == 2
    drawn = run("topology")
    assert drawn.status == 0
    assert "cable 1: spark1 p0 ────────── spark2 p0" in drawn.out
    assert run("topology", "-o", "picture.svg").status == 0
    assert "</svg>" in (tmp_path / "picture.svg").read_text()
