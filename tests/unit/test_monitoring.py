"""Metrics reference, alert rules and Grafana dashboard name what /metrics has, and Prometheus reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvortex.cache.misses import Miss
from tools.write_metrics_reference import PAGE, empty_families, page

ROOT = Path(__file__).parent.parent.parent
ALERTS = ROOT / "examples" / "prometheus" / "kvortex_alerts.yml"
ALERT_TESTS = ROOT / "examples" / "prometheus" / "kvortex_alerts_test.yml"
SCRAPE = ROOT / "examples" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "examples" / "grafana" / "kvortex.json"


class Served:
    """A collector of the families as a server has them."""

    def collect(self) -> Iterator[Any]:
        yield from empty_families()


def exposition() -> str:
    registry = CollectorRegistry()
    registry.register(Served())  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def served() -> dict[str, dict[str, set[str]]]:
    """Each sample's name on /metrics, with the values of its labels."""
    names: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(exposition()):
        for sample in family.samples:
            labels = names.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return names


def alert_queries() -> dict[str, str]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def dashboard_queries() -> dict[str, str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {f"{p['title']} {t['refId']}": t["expr"] for p in panels for t in p["targets"]}


QUERIES = {**alert_queries(), **dashboard_queries()}
OF_PROMETHEUS = {"instance", "job"}


def test_the_metrics_reference_is_what_the_code_answers():
    text = PAGE.read_text()
    assert text == page(text), "run tools/write_metrics_reference.py"


def test_the_reference_explains_every_reason():
    assert re.findall(r"^\| `(\w+)` \| (?!counter|gauge)", PAGE.read_text(), re.MULTILINE) == [m.value for m in Miss]


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_asks_for_series_that_exist(name):
    known = served()
    selectors = re.findall(r"(kvortex_\w+)(?:\{([^}]*)\})?", QUERIES[name])
    assert selectors
    for metric, matchers in selectors:
        assert metric in known, metric
        for label, values in re.findall(r"(\w+)=~?\"([^\"]*)\"", matchers):
            if label not in OF_PROMETHEUS:
                assert set(values.split("|")) <= known[metric][label], (metric, label, values)
    for label in re.findall(r"by \(([^)]*)\)", QUERIES[name]):
        labels = {label for metric, _ in selectors for label in known[metric]}
        assert label in labels | OF_PROMETHEUS, label


def test_the_dashboard_shows_every_kind_of_thing_that_is_measured():
    shown = " ".join(dashboard_queries().values())
    for word in (
        "prompt_tokens",
        "load_bytes",
        "vram_blocks",
        "ram_blocks",
        "evicted",
        "prefetch",
        "sessions",
        "missed",
        "admission_waits",
        "verified",
    ):
        assert f"kvortex_{word}" in shown, word


def test_panels_of_the_dashboard_do_not_lie_on_each_other():
    places = [p["gridPos"] for p in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def promtool(*arguments: str, given: str = "") -> None:
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("no promtool on this machine: Prometheus itself was not asked (apt-get install prometheus)")
    run = subprocess.run([path, *arguments], input=given, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_prometheus_takes_the_configuration_and_the_rules():
    promtool("check", "config", str(SCRAPE))


def test_alerts_fire_when_they_should_and_only_then():
    promtool("test", "rules", str(ALERT_TESTS))


def test_every_alert_is_tried_both_ways():
    tests = yaml.safe_load(ALERT_TESTS.read_text())["tests"]
    tried = {(t["alertname"], bool(t.get("exp_alerts"))) for test in tests for t in test["alert_rule_test"]}
    assert tried == {(name, fires) for name in alert_queries() for fires in (True, False)}


def test_prometheus_finds_no_fault_with_the_names_on_metrics():
    promtool("check", "metrics", given=exposition())


def test_prometheus_can_read_every_query_of_the_dashboard(tmp_path):
    queries = [q.replace("$__rate_interval", "5m").replace("$instance", ".*") for q in dashboard_queries().values()]
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))
