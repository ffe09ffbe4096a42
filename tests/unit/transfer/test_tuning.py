"""The cached tuning: what is kept, what is not believed."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvortex.transfer import tuning
from kvortex.transfer.tuning import TransferTuning, default_directory, file_name, read, tune, write

H200 = TransferTuning(55.3e9, 54.8e9, {4096: 4, 65536: 0})


class FakeDriver:
    gpu_uuid = "GPU-1"
    reads_host_pointers = True


class FakeProbe:
    """Bandwidths of a card, and what was asked of it."""

    def __init__(self, driver: Any) -> None:
        type(self).asked = []

    asked: ClassVar[list[object]] = []
    gathers: ClassVar[dict[int, float]] = {2: 20e9, 4: 39e9, 8: 40e9}
    copies = 2e9

    def __enter__(self) -> FakeProbe:
        return self

    def __exit__(self, *error: object) -> None: ...

    def bandwidth(self, direction: Any) -> float:
        self.asked.append(direction)
        return 25e9

    def gather_rate(self, fragment_bytes: int, num_ctas: int) -> float:
        self.asked.append((fragment_bytes, num_ctas))
        return self.gathers[num_ctas]

    def copy_rate(self, fragment_bytes: int) -> float:
        return self.copies


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvortex" / file_name("GPU-1", "580.159.04")


def test_what_was_measured_is_read_back(path: Path) -> None:
    write(path, H200)
    assert read(path) == H200
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["tuning-GPU-1-580.159.04.json"]


def test_no_name_of_a_card_or_driver_leads_out_of_the_directory(tmp_path: Path) -> None:
    """Field trial B65."""
    for uuid, version in (("../../x", "1"), ("GPU-1", "../../../x"), ("/etc/x", "a\0b")):
        name = file_name(uuid, version)
        assert (tmp_path / name).resolve().parent == tmp_path.resolve()
        assert "\0" not in name


def test_a_link_where_the_file_is_to_be_is_replaced_and_not_written_through(path: Path, tmp_path: Path) -> None:
    """Field trial B65."""
    target = tmp_path / "target"
    target.write_text("mine")
    path.parent.mkdir()
    path.symlink_to(target)
    write(path, H200)
    assert target.read_text() == "mine"
    assert not path.is_symlink()


def test_batches_last_as_long_on_every_card() -> None:
    assert H200.load_batch_bytes == 7 << 20
    assert TransferTuning(12e9, 12e9).load_batch_bytes == 1 << 20
    assert H200.store_batch_bytes == 15 << 20


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"load_bandwidth": -1.0},
        {"load_bandwidth": 1e30},
        {"store_bandwidth": None},
        {"kernel_ctas": {"4096": 1000}},
        {"kernel_ctas": {"small": 4}},
        {"kernel_ctas": [4096]},
    ],
)
def test_a_file_that_makes_no_sense_is_not_believed(path: Path, change: dict[str, object]) -> None:
    write(path, H200)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert read(path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\x00"])
def test_a_broken_file_is_not_believed(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    assert read(path) is None


def test_a_file_of_another_user_is_not_believed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, H200)
    monkeypatch.setattr("os.getuid", lambda: 12345678)
    assert read(path) is None


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write(tmp_path / "file" / "below" / "tuning.json", H200)


def test_the_directory_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "kvortex"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_directory() == Path("/home/someone/.cache/kvortex")


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> type[FakeProbe]:
    monkeypatch.setattr("kvortex.transfer.link_probe.LinkProbe", FakeProbe)
    monkeypatch.setattr(tuning, "driver_version", lambda: "580.159.04")
    gather = type("gather", (), {"is_aligned": staticmethod(lambda rows, *rest: rows[0].num_bytes % 16 == 0)})
    monkeypatch.setitem(__import__("sys").modules, "kvortex.transfer.gather", gather)
    FakeProbe.asked = []
    return FakeProbe


def test_the_fewest_thread_blocks_that_come_near_the_best_are_taken(tmp_path: Path, probed: type[FakeProbe]) -> None:
    tuned = tune(FakeDriver(), [4096], tmp_path)  # type: ignore[arg-type]
    assert tuned == TransferTuning(25e9, 25e9, {4096: 4})


def test_where_the_copy_engine_is_about_as_fast_it_is_taken(
    tmp_path: Path, probed: type[FakeProbe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProbe, "copies", 35e9)
    assert tune(FakeDriver(), [65536], tmp_path).kernel_ctas == {65536: 0}  # type: ignore[arg-type]


def test_large_and_odd_fragments_are_the_copy_engines_unasked(tmp_path: Path, probed: type[FakeProbe]) -> None:
    tuned = tune(FakeDriver(), [1 << 20, 1000], tmp_path)  # type: ignore[arg-type]
    assert tuned.kernel_ctas == {1000: 0}
    assert len(probed.asked) == 2, "the two bandwidths"


def test_a_card_is_measured_once_and_a_new_fragment_size_alone(tmp_path: Path, probed: type[FakeProbe]) -> None:
    first = tune(FakeDriver(), [4096], tmp_path)  # type: ignore[arg-type]
    probed.asked = []
    assert tune(FakeDriver(), [4096], tmp_path) == first  # type: ignore[arg-type]
    assert probed.asked == []
    assert set(tune(FakeDriver(), [4096, 8192], tmp_path).kernel_ctas) == {4096, 8192}  # type: ignore[arg-type]
    assert [size for size, _ in probed.asked] == [8192] * 3  # type: ignore[misc]


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), OSError("no room for a compiled kernel")])
def test_a_gpu_that_cannot_be_measured_is_not_tuned_and_works(
    tmp_path: Path, probed: type[FakeProbe], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(self: FakeProbe, driver: Any) -> None:
        raise error

    monkeypatch.setattr(FakeProbe, "__init__", full)
    assert tune(FakeDriver(), [4096], tmp_path).kernel_ctas == {}  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir()), "it is measured next time"
