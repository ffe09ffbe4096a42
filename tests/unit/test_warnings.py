"""What pyproject.toml makes of warnings: errors, but for what one package of others warns another of."""

from __future__ import annotations

import warnings

import pytest

OF_AGE = [DeprecationWarning, PendingDeprecationWarning, FutureWarning]


def warn(category: type[Warning], module: str) -> list[str]:
    """Warns as if from that module. What was shown."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn_explicit("it will be gone", category, f"{module}.py", 1, module=module)
    return [str(warning.message) for warning in shown]


@pytest.mark.parametrize("category", OF_AGE)
@pytest.mark.parametrize("module", ["torch.jit", "kvortexlike", "testsuite.tests"])
def test_what_another_package_will_lose_is_shown(category: type[Warning], module: str) -> None:
    assert warn(category, module) == ["it will be gone"]


@pytest.mark.parametrize("category", OF_AGE)
@pytest.mark.parametrize("module", ["kvortex", "kvortex.cache.gate", "kvortex_cli.main", "tests.fakes.sim_engine"])
def test_what_we_will_lose_is_an_error(category: type[Warning], module: str) -> None:
    with pytest.raises(category, match="it will be gone"):
        warn(category, module)


def test_a_warning_of_this_very_file_is_an_error() -> None:
    """Its module has the name that the filters know, however pytest imports it."""
    with pytest.raises(DeprecationWarning, match="it will be gone"):
        warnings.warn("it will be gone", DeprecationWarning, stacklevel=1)


@pytest.mark.parametrize("category", [UserWarning, RuntimeWarning, ResourceWarning])
def test_any_other_warning_is_an_error_wherever_it_comes_from(category: type[Warning]) -> None:
    with pytest.raises(category, match="it will be gone"):
        warn(category, "torch.jit")
