"""Files of vectors and values that were cut or changed: read as they are, or refused by name; never a traceback."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from roadmap.embeddings import Embeddings
from roadmap.evaluation import Evaluation, evaluate
from roadmap.refinement import Whitening

KINDS = {"vectors.npz": Embeddings, "vectors.safetensors": Embeddings, "values.npz": Evaluation, "axes.npz": Whitening}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    vectors = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    some = Embeddings(vectors, torch.arange(20) % 4, tuple(map(str, range(20))), tuple("abcd"), {"name": "x"})
    for name in ("vectors.npz", "vectors.safetensors"):
        some.save(folder / name)
    evaluate(some, progress=False).save(folder / "values.npz")
    Whitening.fit(vectors).save(folder / "axes.npz")
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_any_damage_is_said_by_the_name_of_the_file(name: str, whole: Path, tmp_path: Path) -> None:
    raw, draw = (whole / name).read_bytes(), random.Random(name)
    path, refused = tmp_path / name, list[str]()
    for _ in range(200):
        damaged = bytearray(raw)
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(raw)) :]
        for _ in range(draw.choice((0, 1, 5)) if len(damaged) else 0):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            KINDS[name].load(path)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert [words for words in refused if str(path) not in words] == []


def test_an_array_that_claims_to_be_endless_is_damage(tmp_path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999, 9), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        for part in ("vectors", "labels", "mean", "axes", "text"):
            file.writestr(f"{part}.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    for kind in (Embeddings, Evaluation, Whitening):
        with pytest.raises(ValueError, match=r"x\.npz .*allocate"):
            kind.load(tmp_path / "x.npz")  # type: ignore[attr-defined]


def test_axes_that_are_of_other_vectors_are_no_whitening(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", mean=np.zeros(4, np.float32), axes=np.eye(5, dtype=np.float32))
    with pytest.raises(ValueError, match=r"w\.npz is no whitening .*: mean \(4,\) and axes \(5, 5\) do not fit"):
        Whitening.load(tmp_path / "w.npz")
    np.savez(tmp_path / "w.npz", mean=np.zeros(5, np.float32), axes=np.eye(5, dtype=np.float32))
    assert torch.equal(Whitening.load(tmp_path / "w.npz").apply(torch.eye(5)), torch.eye(5))
    with pytest.raises(FileNotFoundError, match=r"absent\.npz"):
        Whitening.load(tmp_path / "absent.npz")
