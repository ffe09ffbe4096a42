"""`kvortex bench transfer` where it cannot run, and what it prints where it can."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvortex.transfer.bench_flow import Beside
from kvortex.transfer.transfer_bench import COPY_ENGINE, KERNEL, WHOLE, CopyResult, Setting, TransferReport
from kvortex_cli import bench

CODE = "from kvortex_cli.main import main; main()"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE, "bench", "transfer", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def test_without_a_gpu_it_says_so_and_fails() -> None:
    done = run("--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: there is no NVIDIA GPU that torch can use here" in done.stderr
    assert "hint: run `kvortex doctor`" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--size", "4G"], "--size: '4G' is not a size"),
        (["--fragments", "4KiB,,2MiB"], "--fragments: '' is not a size"),
        (["--html", "none/page.html"], "--html none/page.html cannot be written"),
        (["--size", "1MiB"], "--size 1MiB is less than two blocks of 16 fragments of 2,097,152 bytes"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_measured(arguments: list[str], told: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {told}")


def report() -> TransferReport:
    setting = Setting("NVIDIA H200", "580.159.04", "13.0", "2.11.0", "3.6.0", "0.1.0", "Linux 6.18 x86_64")
    peak = CopyResult("load", 0, WHOLE, False, 50e9, None)
    fragments = CopyResult("load", 512 << 10, COPY_ENGINE, True, 49e9, Beside(45e9, 1.02, 1.09))
    return TransferReport(setting, 0.0162, (peak, fragments))


def test_results_are_shares_of_the_measured_peak_with_what_they_were_measured_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench._print_json(report())
    document = json.loads(capsys.readouterr().out)
    assert document["setting"]["gpu"] == "NVIDIA H200"
    assert [result["share_of_peak"] for result in document["results"]] == [1.0, 0.98]
    assert document["results"][1]["beside"] == {"bandwidth": 45e9, "mean_step": 1.02, "worst_step": 1.09}


def test_the_table_names_the_hardware_and_what_copies_cost_a_model() -> None:
    table = bench._table(report())
    assert "NVIDIA H200, driver 580.159.04, CUDA 13.0, torch 2.11.0" in str(table.title)
    cells = [list(column.cells)[1] for column in table.columns]
    assert cells == ["512 KiB", "copy engine *", "load", "49.0", "98%", "45.0", "90%", "1.02x", "1.09x"]


def test_the_page_has_the_numbers_first_plots_and_the_conditions(tmp_path: Path) -> None:
    small = CopyResult("load", 4 << 10, COPY_ENGINE, False, 3e9, Beside(2e9, 1.05, 1.2))
    kernel = CopyResult("load", 4 << 10, KERNEL, True, 46e9, None)
    whole = report()
    bench._write_page(tmp_path / "page.html", replace(whole, results=(*whole.results, small, kernel)), 4 << 30)
    text = (tmp_path / "page.html").read_text()
    for cell in ("512 KiB", "49.0", "98%", "45.0", "1.02x", "kernel *"):
        assert f"<td>{cell}</td>" in text
    assert text.index("<table>") < text.index("<svg") < text.index("Conditions")
    assert text.count("<svg") == 3
    assert ">5.0%</text>" in text, "the step that takes 1.05 times as long"
    # Smallest first; a line without any value is not in the legend.
    assert re.findall(r">(\d+ KiB)</text>", text) == ["4 KiB", "512 KiB"] * 3
    assert re.findall(r"<p>(.*?)</p>", text) == ["● load, copy engine, ■ load, kernel", *["● load, copy engine"] * 2]
    for condition in ("NVIDIA H200, driver 580.159.04", "CUDA 13.0, torch 2.11.0", "Linux 6.18", "4.295 GB", "16.2 ms"):
        assert condition in text
    assert "<script" not in text
    assert "http" not in text
