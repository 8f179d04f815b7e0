"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[str]:
    """A temporary path beside the target that replaces it at the end, or leaves nothing behind.

    An interruption at any moment leaves the target as it was. The content reaches the disk before the name does, so
    that not even a power cut leaves a short file under the final name. The file gets the permissions that any new file
    of the user gets, and keeps the target's ending, which some writers go by.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(6)}{path.suffix}")
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    permissions = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        yield str(temporary)
        with open(temporary, "rb+") as file:
            os.fchmod(file.fileno(), permissions)  # some writers make the file anew, for their user alone
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
