"""Files that are there whole or not at all, and folders that one process at a time writes to."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

# our own temporary names, and those that safetensors makes beside the file that it is told to write
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{12}\.partial(\..*)?|\.tmp[0-9A-Za-z]{6}")
# How a full disk is told by what gives the system's error on as text: safetensors, faiss, SQLite.
FULL_WORDS = re.compile(r"\(os error (28|122)\)|No space left on device|Disk quota exceeded|database or disk is full")
# What numpy raises when it reads a .npz file that is not whole, or is something else.
NPZ_DAMAGE = (OSError, ValueError, LookupError, EOFError, RuntimeError, MemoryError, BadZipFile, zlib.error)
log = logging.getLogger("roadmap")


@contextmanager
def whole_file(path: Path) -> Iterator[str]:
    """A temporary path beside the target that takes its place at the end, or leaves nothing behind.

    An interruption at any moment leaves the target as it was. The content reaches the disk before the name does, so
    that not even a power cut leaves a short file under the final name; when the context ends, the name is there too,
    and what is written later cannot be on the disk without it. The file gets the permissions that any new file of the
    user gets, and keeps the target's ending, which some writers go by.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    temporary = temporary_beside(path)
    try:
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except OSError as error:
        error.filename = str(path)  # the name that was asked for; nobody knows the temporary one
        raise
    permissions = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        yield str(temporary)
        os.chmod(temporary, permissions)  # some writers make the file anew, for their user alone
        settle(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def settle(temporary: Path, path: Path, with_name: bool = True) -> None:
    """What has a temporary name takes the place of `path`: the content reaches the disk, then the name.

    Without `with_name`, the name is there for all to see, and reaches the disk with the next that is waited for.
    """
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if with_name:
        sync_folder(path.parent)


def temporary_beside(path: Path) -> Path:
    """A name for what shall take the place of `path`; where a kill leaves it, `remove_leftovers` knows it."""
    return path.with_name(f".{path.stem}.{secrets.token_hex(6)}.partial{path.suffix}")


def sync_folder(folder: Path) -> None:
    """The names in a folder reach the disk, where the system can say so."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Removes what `whole_file` left in a folder when its process was killed. For the `sole_writer` of the folder."""
    for path in Path(folder).iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """While this lasts, no other process is the sole writer of the folder; it waits for one that is.

    The system lets go of the lock when its process ends, however it ends. Where there are no locks (some network
    disks), nothing is locked.
    """
    with open(Path(folder) / ".lock", "w") as file:
        _lock(file.fileno(), folder)
        yield


def _lock(handle: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on this system
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("another process writes to %s: waiting until it has finished", folder)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        pass
