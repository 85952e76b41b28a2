"""The disk cache: object code and other bytes under content keys, with JSON metadata beside them. Never pickles.

Layout: `<dir>/<2 hex>/<key>.bin` starts with one JSON line (metadata with the payload's length and SHA-256), then the
payload. Entries are written to a temporary file and renamed, so readers see all or nothing; what does not verify is ignored
and rebuilt. The directory is private to its user: one that others may write to is not used, since its code is executed.
"""
from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import platformdirs

from fuseline import log

FORMAT = 1
DEFAULT_LIMIT = 512 << 20
# How often (in stores of this process) the size limit is checked: walking the directory costs milliseconds.
TRIM_EVERY = 200


def default_directory() -> Path:
    """FUSELINE_CACHE_DIR, or the user's cache directory as the platform has it."""
    given = os.environ.get("FUSELINE_CACHE_DIR")
    return Path(given) if given else Path(platformdirs.user_cache_dir("fuseline"))


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored item as `DiskCache.entries` lists it: bytes on disk, seconds since the epoch of the last use."""

    key: str
    size: int
    used: float
    meta: dict[str, object]


class DiskCache:
    """get and put by key (hex digits). An unusable directory makes every get a miss and every put a no-op, with one warning."""

    def __init__(self, directory: Path | None = None, limit_bytes: int = DEFAULT_LIMIT) -> None:
        self.directory = directory if directory is not None else default_directory()
        self.limit_bytes = limit_bytes
        self.hits = self.misses = 0
        self._stores = 0
        self._lock = threading.Lock()
        self.usable = self._prepare()

    def _prepare(self) -> bool:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.directory.stat()
            if hasattr(os, "getuid") and facts.st_uid != os.getuid():
                raise PermissionError("it belongs to another user")
            if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError("others may write to it")
            return True
        except OSError as error:
            log.warn_once(f"cache {self.directory}", f"the cache directory {self.directory} is not used: {error}")
            return False

    def path(self, key: str) -> Path:
        if not key or any(c not in "0123456789abcdef" for c in key):
            raise ValueError(f"a cache key is made of hex digits, not {key!r}")
        return self.directory / key[:2] / f"{key}.bin"

    def get(self, key: str) -> bytes | None:
        """The payload, or None if there is none that verifies."""
        found = self._read(self.path(key)) if self.usable else None
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        return found[1]

    def _read(self, path: Path) -> tuple[dict[str, object], bytes] | None:
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        try:
            head, _, payload = raw.partition(b"\n")
            meta = json.loads(head)
            if meta["format"] != FORMAT or meta["key"] != path.stem or meta["sha256"] != hashlib.sha256(payload).hexdigest():
                raise ValueError("contents do not match")
        except (ValueError, KeyError, TypeError) as error:
            log.emit("cache", f"ignored damaged entry {path.name}: {error}")
            return None
        try:
            os.utime(path)                                   # least recently used entries go first
        except OSError:
            pass
        return meta, payload

    def put(self, key: str, data: bytes, meta: dict[str, object]) -> None:
        """Store the payload; failing to is not an error (a full disk must not stop a program)."""
        if not self.usable:
            return
        path = self.path(key)
        head = {**meta, "format": FORMAT, "key": key, "sha256": hashlib.sha256(data).hexdigest(), "created": round(time.time(), 3)}
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")     # mkstemp files are 0600
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(json.dumps(head).encode() + b"\n" + data)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            log.warn_once(f"cache write {self.directory}", f"cannot write to the cache {self.directory}: {error}")
            return
        with self._lock:
            self._stores += 1
            due = self._stores % TRIM_EVERY == 0
        if due:
            self.trim()

    def entries(self) -> Iterator[Entry]:
        if not self.usable:
            return
        for path in self.directory.glob("??/*.bin"):
            try:
                facts = path.stat()
                with path.open("rb") as file:
                    meta = json.loads(file.readline())
            except (OSError, ValueError):
                continue
            yield Entry(path.stem, facts.st_size, facts.st_mtime, meta)

    def trim(self) -> int:
        """Delete the least recently used entries until the rest is within the limit; returns how many went."""
        known = sorted(self.entries(), key=lambda e: e.used, reverse=True)
        total = gone = 0
        for entry in known:
            total += entry.size
            if total > self.limit_bytes:
                self.path(entry.key).unlink(missing_ok=True)
                gone += 1
        return gone

    def clear(self) -> int:
        """Delete every entry; returns how many there were."""
        known = list(self.entries())
        for entry in known:
            self.path(entry.key).unlink(missing_ok=True)
        return len(known)


@lru_cache(maxsize=4)
def _opened(directory: Path) -> DiskCache:
    return DiskCache(directory)


def disk_cache() -> DiskCache:
    """The process's cache in the default directory (one for each value of FUSELINE_CACHE_DIR)."""
    return _opened(default_directory())
