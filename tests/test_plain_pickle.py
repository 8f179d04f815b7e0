"""Published pickles are read; nothing they say is run."""

from __future__ import annotations

import os
import pickle
import subprocess

import numpy as np
import pytest

from roadmap.plain_pickle import plain_pickle

PLAIN = {
    "numbers": [1, 2.5, None, True],
    "text": ("a", "é"),
    "array": np.arange(6).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "empty": np.asarray([], np.int64),
    "words": np.asarray(["ab", "c"]),
    "scalar": np.int64(7),
}


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_back(protocol, tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(PLAIN, protocol))
    read = plain_pickle(path)
    assert read["numbers"] == PLAIN["numbers"]
    assert read["text"] == PLAIN["text"]
    assert read["scalar"] == 7
    for name in ("array", "fortran", "empty", "words"):
        np.testing.assert_array_equal(read[name], PLAIN[name])


@pytest.mark.parametrize(
    "evil",
    [
        Calls(os.system, "touch ran"),
        Calls(eval, "open('ran', 'w')"),
        Calls(subprocess.Popen, ["touch", "ran"]),
        Calls(__import__, "os"),
        Calls(getattr, "", "join"),
        Calls(np.load, "x.npy"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_anything_else_is_refused_by_name_and_not_run(evil, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pkl"
    path.write_bytes(pickle.dumps({"imlist": [evil]}, protocol))
    with pytest.raises(ValueError, match=r"evil.pkl is not a plain pickle: refused: the pickle asks for"):
        plain_pickle(path)
    assert not (tmp_path / "ran").exists()


def test_arrays_of_objects_are_refused(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps({"x": [np.asarray([{}, []], dtype=object)]}))
    with pytest.raises(ValueError, match="refused an array of Python objects"):
        plain_pickle(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", b"\x80\x02]q\x00(K\x01"])
def test_damage_is_an_error_that_names_the_file(content, tmp_path):
    path = tmp_path / "damaged.pkl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged.pkl is not a plain pickle"):
        plain_pickle(path)
