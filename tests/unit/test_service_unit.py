"""examples/kvortex.service: systemd reads it, and what it says fits what the server does."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvortex.config.arguments import split_arguments
from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import CommandLine, resolve
from kvortex.errors import UsageError
from kvortex.sizes import parse_duration

UNIT = Path(__file__).parent.parent.parent / "examples" / "kvortex.service"


def header_commands() -> list[str]:
    """What the file's own comment tells an administrator to run, in order."""
    return re.findall(r"^#   (\S.*)$", UNIT.read_text(), re.MULTILINE)


def test_its_installation_makes_the_folder_first_and_shows_the_secrets_to_nobody(tmp_path):
    """Its commands run as they stand, with every program but the shell's own and `install` a stand-in."""
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for program in ("useradd", "python3", "pip", "systemctl", "journalctl"):
        (stand_ins / program).write_text("#!/bin/sh\n")
    (stand_ins / "kvortex").write_text('#!/bin/sh\necho "model: $2" > "$4"\n')
    for program in stand_ins.iterdir():
        program.chmod(0o755)
    script = "\n".join(["umask 022", *header_commands()])
    script = script.replace("/opt/kvortex/bin", str(stand_ins)).replace("/etc/kvortex", str(tmp_path / "etc"))
    path = f"{stand_ins}:{os.environ['PATH']}"
    run = subprocess.run(["sh", "-eu", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "etc" / "kvortex.yaml").read_text() == "model: MODEL\n"
    secrets = tmp_path / "etc" / "secrets"
    assert secrets.read_text() == "VLLM_API_KEY=...\n"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    assert "chmod" not in script, "readable until then"


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(UNIT.read_text())
    return unit["Service"]


def test_systemd_finds_no_fault_with_it(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze on this machine: systemd itself was not asked")
    copy = tmp_path / UNIT.name
    # The program must be there.
    copy.write_text(UNIT.read_text().replace("/opt/kvortex/bin/kvortex", sys.executable))
    run = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True, timeout=60, check=False)
    about_it = [line for line in (run.stdout + run.stderr).splitlines() if UNIT.name in line]
    assert (run.returncode, about_it) == (0, []), run.stderr


def test_its_command_is_one_that_kvortex_takes(service):
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("kvortex", "serve")
    parsed = split_arguments(arguments)
    assert (parsed.own, parsed.vllm) == (["--config", "/etc/kvortex/kvortex.yaml"], [])


def test_it_waits_for_running_requests_as_long_as_the_server_does(service):
    resolved = resolve(CommandLine("M"), {}, MachineFacts(usable_ram_bytes=64 * 10**9, gpu_count=1))
    drain_s = resolved.vllm_value("shutdown_timeout", 0)
    assert f"{drain_s} s" in UNIT.read_text()
    assert parse_duration(f"{service['TimeoutStopSec']}s") > drain_s
    assert service["KillMode"] == "mixed"


def test_a_wrong_configuration_is_not_tried_again(service):
    assert service["Restart"] == "on-failure"
    assert int(service["RestartPreventExitStatus"]) == UsageError.exit_code
