"""The disk cache: private, atomic, and proof against damage."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuseline.runtime.cache import DiskCache

KEY = "ab" * 32


def test_what_was_put_is_got_by_another_instance(tmp_path: Path) -> None:
    DiskCache(tmp_path / "c").put(KEY, b"\x00\ncode", {"label": "k"})
    other = DiskCache(tmp_path / "c")
    assert other.get(KEY) == b"\x00\ncode"
    (entry,) = other.entries()
    assert entry.key == KEY and entry.meta["label"] == "k"
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"", b"{}", b"not json\ncode", None])
def test_damaged_entries_are_misses_and_can_be_replaced(tmp_path: Path, damage: bytes | None) -> None:
    cache = DiskCache(tmp_path / "c")
    cache.put(KEY, b"code", {})
    path = cache.path(KEY)
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    assert cache.get(KEY) is None
    cache.put(KEY, b"code", {})
    assert cache.get(KEY) == b"code"


def test_an_entry_under_another_name_is_not_believed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c")
    cache.put(KEY, b"code", {})
    other = "cd" * 32
    cache.path(other).parent.mkdir()
    os.rename(cache.path(KEY), cache.path(other))
    assert cache.get(other) is None


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(0o777)
    cache = DiskCache(tmp_path / "c")
    cache.put(KEY, b"code", {})
    assert not cache.usable and cache.get(KEY) is None and not list((tmp_path / "c").iterdir())


def test_trimming_keeps_the_most_recently_used(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c", limit_bytes=3000)
    keys = [f"{k:02x}" * 32 for k in range(4)]
    for k, key in enumerate(keys):
        cache.put(key, b"x" * 1000, {})
        os.utime(cache.path(key), (k, k))
    cache.get(keys[0])
    assert cache.trim() == 2
    assert cache.get(keys[0]) is not None and cache.get(keys[3]) is not None and cache.get(keys[1]) is None


def test_keys_cannot_leave_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hex"):
        DiskCache(tmp_path / "c").get("../../etc/passwd")
