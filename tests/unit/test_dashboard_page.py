"""The dashboard's documents: whole, closed, readable."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode

import pytest

from kvortex.cache.misses import Miss
from kvortex.dashboard.page import pages

DOCUMENTS = {"dashboard": pages().dashboard, "key form": pages().key_form}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_names_no_other_place(name):
    addresses = set(re.findall(r"https?://[^\"' )]+", DOCUMENTS[name]))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a namespace's name, never fetched"
    assert not re.findall(r"(?:src|href)=\"(?!data:,)", DOCUMENTS[name])
    assert "@import" not in DOCUMENTS[name]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_script_and_style_is_allowed_by_its_hash_and_nothing_else_is(name):
    policy = pages().policy
    parts = re.findall(r"<(?:script type=\"module\"|style)>(.*?)</(?:script|style)>", DOCUMENTS[name], re.DOTALL)
    assert len(parts) == 2
    for part in parts:
        assert b64encode(hashlib.sha256(part.encode()).digest()).decode() in policy
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


def test_nothing_is_left_to_be_filled_in():
    for document in DOCUMENTS.values():
        assert "/*" not in document


def test_every_reason_has_words_on_the_page():
    for miss in Miss:
        assert f'"{miss.value}": "' in pages().dashboard


def palettes() -> list[dict[str, str]]:
    style = re.search(r"<style>(.*?)</style>", pages().dashboard, re.DOTALL)
    assert style is not None
    light, dark = re.findall(r":root \{(.*?)\}", style[1], re.DOTALL)[:2]
    return [dict(re.findall(r"--(\w+): (#\w+);", text)) for text in (light, dark)]


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it: 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_colours_stand_out_in_light_and_dark(palette):
    for background in ("paper", "card"):
        for text in ("ink", "soft", "bad"):
            assert contrast(palette[text], palette[background]) >= 4.5, (text, background)
        for line in ("a", "b", "c", "good", "focus"):
            assert contrast(palette[line], palette[background]) >= 3, (line, background)
