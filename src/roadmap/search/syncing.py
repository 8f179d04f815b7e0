"""Which files are new, changed or gone since they were indexed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roadmap.search.files import file_digest
from roadmap.search.metadata import Described
from roadmap.search.rows import FileFacts

if TYPE_CHECKING:
    from roadmap.search.index import Index

Embed = Callable[[Sequence[str]], tuple[Described, Mapping[str, Sequence[Any]] | None]]


@dataclass(frozen=True)
class Changes:
    """Ids of files, each in one of these.

    Attributes:
        new: not known yet.
        changed: the content differs from what was indexed.
        deleted: known, and not there any more.
        touched: another time of change but the same content: nothing to embed, only to remember.
        same: untouched.
        skipped: untouched, and could not be embedded then: id -> why; after `sync` also what the system would not read.
    """

    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    touched: Mapping[str, FileFacts] = field(default_factory=dict)
    same: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to embed or to remove."""
        return bool(self.new or self.changed or self.deleted)


def file_facts(path: Path) -> FileFacts:
    """Size, time of change and digest of a file. A file that changes while it is read looks changed next time."""
    status = path.stat()
    return FileFacts(status.st_size, status.st_mtime_ns, file_digest(path))


def _facts_since(path: Path, before: FileFacts) -> FileFacts | None:
    """`before` itself where a file is untouched, its new facts where it was only touched, None where it is to be
    embedded again, or may not be read any more."""
    try:
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) == (before.size, before.mtime_ns):
            return before
        if status.st_size != before.size or (now := file_facts(path)).digest != before.digest:
            return None
    except OSError:
        return None
    return replace(now, problem=before.problem)


def changes_of(known: Mapping[str, FileFacts], files: Mapping[str, Path]) -> Changes:
    """What differs between the files that were indexed and those that are there (id -> path).

    A file of the same size and time is taken to be the same without reading it; one of the same size and another time
    is read and compared by its digest.
    """
    new, changed, same = [], [], []
    touched, skipped = {}, {}
    for name, path in files.items():
        before = known.get(name)
        if before is None:
            new.append(name)
            continue
        now = _facts_since(path, before)
        if now is None:
            changed.append(name)
        elif now is not before:
            touched[name] = now
        else:
            same.append(name)
            if before.problem is not None:
                skipped[name] = before.problem
    deleted = tuple(name for name in known if name not in files)
    return Changes(tuple(new), tuple(changed), deleted, touched, tuple(same), skipped)


def sync_files(index: Index, files: Mapping[str, Path], embed: Embed, at_once: int) -> Changes:
    """As `Index.sync`."""
    found = index.changes(files)
    if found.deleted:
        index.remove(found.deleted, missing="ignore")
    if found.touched:
        with index.storage.rows.commit("touch"):
            index.storage.rows.put_files(found.touched)
    wanted = [*found.new, *found.changed]
    unread: dict[str, str] = {}
    for top in range(0, len(wanted), at_once):
        unread |= _sync_part(index, {name: files[name] for name in wanted[top : top + at_once]}, embed)
    return replace(found, skipped={**found.skipped, **unread})


def _sync_part(index: Index, files: Mapping[str, Path], embed: Embed) -> dict[str, str]:
    """Which of them the system would not read, and why: without the right to, or gone meanwhile. One of a million must
    not end it all."""
    facts, unread = dict[str, FileFacts](), dict[str, str]()
    for name, path in files.items():
        try:
            facts[name] = file_facts(path)  # before it is embedded: a change meanwhile is seen next time
        except OSError as error:
            unread[name] = error.strerror or str(error)
            facts[name] = FileFacts(-1, 0, "")  # another size than any file's: tried again the next time
    embeddings, metadata = embed([name for name in files if name not in unread])
    here = set(embeddings.ids or ())
    if strange := sorted(here - files.keys()):
        raise ValueError(f"asked for {len(files)} pictures, got one that was not among them: {strange[0]!r}")
    reasons = {**embeddings.about.get("skipped", {}), **unread}
    left_out = [name for name in files if name not in here]
    for name in left_out:
        facts[name] = replace(facts[name], problem=str(reasons.get(name, "left out")))
    # one that could be read when it was indexed, and cannot any more, has no vector to be found by
    index.add(embeddings, metadata, replace=True, remove=left_out, files=facts)
    return unread
