"""YAML with lines: what is read, and what is refused at which line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvortex.config.yaml_file import MAX_FILE_BYTES, load_yaml_file, parse_yaml_value
from kvortex.errors import ConfigError, Place

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in ("ab", "bc", "cd", "de", "ef", "fg")
)


def write(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "kvortex.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_every_key_knows_its_line_and_a_scalar_its_spelling(tmp_path: Path) -> None:
    entries = load_yaml_file(write(tmp_path, "model: m\nkv_cache:\n  num_streams: 4\nrevision: 0123\n"))
    assert [(key, entry.line) for key, entry in entries.items()] == [
        ("model", 1),
        ("kv_cache", 2),
        ("revision", 4),
    ]
    children = entries["kv_cache"].children
    assert children is not None
    assert (children["num_streams"].value, children["num_streams"].line) == (4, 3)
    assert entries["revision"].text == "0123"


def test_a_list_keeps_its_texts_and_a_date_stays_text(tmp_path: Path) -> None:
    entries = load_yaml_file(write(tmp_path, "names: [a, 1.0]\nrevision: 2024-01-01\n"))
    assert entries["names"].items == ("a", "1.0")
    assert entries["revision"].value == "2024-01-01"


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbfmodel: m\r\nport: 1\r\n", b"model: m\nport: 1", b"---\nmodel: m\nport: 1"]
)
def test_a_byte_order_mark_windows_line_ends_and_a_missing_last_one_are_fine(tmp_path: Path, content: bytes) -> None:
    entries = load_yaml_file(write(tmp_path, content))
    assert (entries["model"].value, entries["port"].value) == ("m", 1)


def test_an_alias_is_followed(tmp_path: Path) -> None:
    assert load_yaml_file(write(tmp_path, "a: &x [1]\nb: *x\n"))["b"].value == [1]


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, '"a" is there twice: line 1 and line 3'),
        ("k:\n  a: 1\n  a: 2\n", 3, '"a" is there twice: line 2 and line 3'),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", 2, "the tag"),
        ("a: !secret x\n", 1, "the tag '!secret'"),
        ("a: !!str 1\n", 1, "the tag"),
        ("- a\n- b\n", 1, "a list"),
        ("just text\n", 1, "a single value"),
        ("", 1, "the file is empty"),
        ("# only a comment\n", 1, "the file is empty"),
        ("null\n", 1, "the file is empty"),
        ("a:\n\tb: 1\n", 2, "a tab"),
        ("\ta: 1\n", 1, "a tab"),
        ("a: [1\n", 2, "bad YAML"),
        ("a: 1\n b: 2\n", 2, "bad YAML"),
        ("a: 'x\nb: y\n", 3, "bad YAML"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: &a [*a]\n", 1, "contains itself"),
        ("a: 1\n<<: {b: 2}\n", 2, "merging"),
        ("? [a]\n: 1\n", 1, "plain name"),
        ("a: =\n", 1, "cannot be read"),
        ("a: " + "[" * 100 + "]" * 100, 1, "deep"),
        (BOMB, 4, "aliases"),
        (b"a: 1\nb: \xff\xfe\n", 2, "not UTF-8"),
        (b"a: 1\nb: \x00\n", 2, "not allowed in YAML"),
        (b"\x7fELF\x02\x01\x01\x00\x00\xb7", 1, "not UTF-8"),
    ],
)
def test_what_is_no_plain_mapping_is_refused_at_its_line(
    tmp_path: Path, content: str | bytes, line: int, said: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as refused:
        load_yaml_file(path)
    assert refused.value.place == Place(path, line)
    assert said in refused.value.message


def test_an_empty_file_is_told_what_a_minimal_one_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_yaml_file(write(tmp_path, ""))
    assert refused.value.hint is not None
    assert "model: " in refused.value.hint


def test_a_missing_file_a_directory_and_no_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_yaml_file(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="is a directory"):
        load_yaml_file(str(tmp_path))
    with pytest.raises(ConfigError, match="no file is named"):
        load_yaml_file("")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml_file("a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a: 1\n")
    Path(path).chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load_yaml_file(path)


def test_a_file_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than"):
        load_yaml_file(write(tmp_path, b"#" * (MAX_FILE_BYTES + 1)))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("0.85", 0.85),
        ("true", True),
        ("null", None),
        ("", ""),
        ("'4'", "4"),
        ("[a, b]", ["a", "b"]),
        ("128GB", "128GB"),
        ("# comment", None),
    ],
)
def test_one_value_is_read_as_yaml_and_empty_text_is_not_null(text: str, value: object) -> None:
    assert parse_yaml_value(text, Place("--set x")).value == value


def test_a_bad_single_value_is_refused_at_its_place() -> None:
    with pytest.raises(ConfigError, match="--set x: '\\[1' is not one YAML value"):
        parse_yaml_value("[1", Place("--set x"))
