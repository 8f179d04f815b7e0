"""Published pickles are read; nothing they say is run."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import roadmap.plain_pickle as package
from roadmap.plain_pickle import arrays as arrays_module
from roadmap.plain_pickle import plain_content

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
    read = plain_content(path)
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
        plain_content(path)
    assert not (tmp_path / "ran").exists()


def test_arrays_of_objects_are_refused(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps({"x": [np.asarray([{}, []], dtype=object)]}))
    with pytest.raises(ValueError, match="refused an array of Python objects"):
        plain_content(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", b"\x80\x02]q\x00(K\x01"])
def test_damage_is_an_error_that_names_the_file(content, tmp_path):
    path = tmp_path / "damaged.pkl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged.pkl is not a plain pickle"):
        plain_content(path)


def content(raw: bytes, tmp_path, name="a.pkl"):
    path = tmp_path / name
    path.write_bytes(raw)
    return plain_content(path)


def refusal(raw: bytes, tmp_path) -> str:
    with pytest.raises(ValueError, match="a.pkl is not a plain pickle: ") as caught:
        content(raw, tmp_path)
    return str(caught.value)


KINDS = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(sizes=(64, 128)),
    hnp.byte_string_dtypes(min_len=1, max_len=5),
    hnp.unicode_string_dtypes(min_len=1, max_len=5),
)
ARRAYS = hnp.arrays(KINDS, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(),
    st.binary(),
    ARRAYS,
    ARRAYS.map(np.asfortranarray),
    ARRAYS.map(np.transpose),
    ARRAYS.filter(lambda a: a.size > 0).map(lambda a: a.ravel()[0]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | inner.map(lambda x: [x, (x, {"again": x})])
    ),
    max_leaves=12,
)


def same(a, b) -> bool:
    """Equal to the type, the bits, the layout and the order; of numbers in this machine's byte order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        layout = a.flags.c_contiguous == b.flags.c_contiguous and a.flags.f_contiguous == b.flags.f_contiguous
        b = b.astype(b.dtype.newbyteorder("="), order="K")  # protocol 5 keeps another one, the others do not
        return layout and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@given(value=VALUES)
def test_what_python_reads_is_read_to_the_bit(protocol, value, tmp_path_factory):
    raw = pickle.dumps(value, protocol)
    path = tmp_path_factory.getbasetemp() / "oracle.pkl"
    path.write_bytes(raw)
    assert same(plain_content(path), pickle.loads(raw))


# {'n': numpy.array([1, 513]), 's': 'caf\xe9', 'l': 7L, 'f': 0.5, 't': True} as Python 2 writes it
PYTHON_2 = {
    0: b"""(dp0
S'n'
p1
cnumpy.core.multiarray
_reconstruct
p2
(cnumpy
ndarray
p3
(I0
tp4
S'b'
p5
tp6
Rp7
(I1
(I2
tp8
cnumpy
dtype
p9
(S'i8'
p10
I0
I1
tp11
Rp12
(I3
S'<'
p13
NNNI-1
I-1
I0
tp14
bI00
S'\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x01\\x02\\x00\\x00\\x00\\x00\\x00\\x00'
p15
tp16
bsS's'
p17
S'caf\\xe9'
p18
sS'l'
p19
L7L
sS'f'
p20
F0.5
sS't'
p21
I01
s.""",
    2: b"\x80\x02}q\x00(U\x01nq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85q\x04"
    b"U\x01bq\x05\x87q\x06Rq\x07(K\x01K\x02\x85q\x08cnumpy\ndtype\nq\tU\x02i8q\nK\x00K\x01\x87q\x0bRq\x0c(K\x03U\x01<q\rNNN"
    b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x0eb\x89U\x10\x01\x00\x00\x00\x00\x00\x00\x00\x01\x02\x00\x00\x00\x00\x00\x00q\x0f"
    b"tq\x10bU\x01sq\x11T\x04\x00\x00\x00caf\xe9q\x12U\x01l\x8a\x01\x07U\x01fG?\xe0\x00\x00\x00\x00\x00\x00U\x01t\x88u.",
}


@pytest.mark.parametrize("protocol", PYTHON_2)
def test_pickles_of_python_2(protocol, tmp_path):
    expected = {"n": np.asarray([1, 513]), "s": "caf\xe9", "l": 7, "f": 0.5, "t": True}
    assert same(pickle.loads(PYTHON_2[protocol], encoding="latin1"), expected)
    assert same(content(PYTHON_2[protocol], tmp_path), expected)


@pytest.mark.parametrize(
    "file", ["revisited/gnd_roxford5k.pkl", "revisited/gnd_rparis6k.pkl", "roxford5k/gnd_roxford5k.pkl"]
)
def test_the_published_files(file, outside_data):
    with (outside_data / file).open("rb") as opened:
        assert same(plain_content(outside_data / file), pickle.load(opened, encoding="latin1"))


OBJECTS = b"cnumpy\ndtype\nX\x02\x00\x00\x00O8K\x00K\x01\x87R"
POINTER = b"C\x08" + b"A" * 8
OVER_BYTES = b"cnumpy\nndarray\nK\x01\x85" + OBJECTS + POINTER + b"\x87R"
NO_FLAGS = OBJECTS + b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
POINTERS = {
    "an array over bytes": b"\x80\x03c_codecs\nencode\nX\x01\x00\x00\x00x" + OVER_BYTES + b"\x86R.",
    "in a list": b"\x80\x03]" + OVER_BYTES + b"a.",
    "flags cleared": b"\x80\x03cnumpy.core.multiarray\nscalar\n" + NO_FLAGS + POINTER + b"\x86R.",
}
READ = """
import sys
from roadmap.plain_pickle import plain_content
try:
    print(repr(plain_content(sys.argv[1])))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("name", POINTERS)
def test_no_pointer_of_a_file_is_followed(name, tmp_path):
    """In a process of its own: following one ends it."""
    (tmp_path / "a.pkl").write_bytes(POINTERS[name])
    done = subprocess.run([sys.executable, "-c", READ, tmp_path / "a.pkl"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a.pkl is not a plain pickle: refused an array of Python objects" in done.stdout


def array_pickle(kind: bytes, shape: bytes, raw: bytes) -> bytes:
    """`_frombuffer` of bytes, a kind and a shape, whether they fit each other or not."""
    dtype = b"cnumpy\ndtype\n(X" + len(kind).to_bytes(4, "little") + kind + b"K\x00K\x01tR"
    buffer = b"B" + len(raw).to_bytes(4, "little") + raw
    return b"\x80\x03cnumpy._core.numeric\n_frombuffer\n(" + buffer + dtype + shape + b"X\x01\x00\x00\x00CtR."


HOLLOW = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (array_pickle(b"i8", b"K\x02\x85", bytes(15)), "an array of i8 and shape (2,) takes 16 bytes, not 15"),
        (array_pickle(b"i8", b"K\x02\x85", bytes(17)), "an array of i8 and shape (2,) takes 16 bytes, not 17"),
        (array_pickle(b"i8", b"J\xff\xff\xff\xff\x85", b""), "refused an array of shape (-1,)"),
        (array_pickle(b"i8", b"X\x01\x00\x00\x00a\x85", b""), "refused an array of shape a tuple"),
        (array_pickle(b"i8", b"K\x00J\xff\xff\xff\x7f\x86", b""), "more than 10,000,000 items"),
        (array_pickle(b"U0", b"K\x02\x85", b""), "refused an array of kind U0"),
        (array_pickle(b"V8", b"K\x01\x85", bytes(8)), "refused an array of kind 'V8'; only numbers and text are read"),
        (array_pickle(b"M8[ns]", b"K\x01\x85", bytes(8)), "refused an array of kind 'M8[ns]'"),
        (array_pickle(b"i8,O", b"K\x01\x85", bytes(16)), "refused an array of kind 'i8,O'"),
        (array_pickle(b"b1", b"K\x01\x85", b"\x02"), "refused truth values other than 0 and 1"),
        (array_pickle(b"U1", b"K\x01\x85", b"\xff" * 4), "refused text of characters that do not exist"),
        (pickle.dumps({1}), "refused the instruction EMPTY_SET"),
        (pickle.dumps({1: 2}), "refused the key 1; the keys of a dict are strings"),
        (pickle.dumps(2**63), "refused an integer of more than 64 bits"),
        (pickle.dumps(bytearray(3), 5), "refused a bytearray"),
        (pickle.dumps(np.ndarray), "refused a Name; only lists"),
        (pickle.dumps(np.zeros(2, "i4,f8")), "refused an array of"),
        (
            b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR.",
            "refused an array that is never filled",
        ),
        (b"(S'x'\ntibuiltins\nlist\n.", "is not a plain pickle"),
        (b"\x80\x06N.", "protocol 6 is not known"),
        (b"e.", "it goes back to a mark that it has not set"),
        (b"(a.", "it takes what it has not given"),
        (b"K\x01(K\x02e.", "it appends to 1"),
        (b"h\x07.", "it takes number 7 of its memory"),
        (b"]", "it ends too early"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(raw, reason, tmp_path):
    assert reason in refusal(raw, tmp_path)


def nested(depth: int) -> bytes:
    return b"]" * depth + b"a" * (depth - 1) + b"."


def test_depth_is_limited(tmp_path):
    assert content(nested(package.MAX_DEPTH), tmp_path)
    assert "nested more than 64 deep" in refusal(nested(package.MAX_DEPTH + 1), tmp_path)
    assert "nested more than 64 deep" in refusal(nested(1_000_000), tmp_path)


@pytest.mark.parametrize("raw", [b"]q\x00h\x00a.", b"}q\x00X\x01\x00\x00\x00ah\x00s.", b"](]q\x01(h\x01tae."])
def test_cycles_are_refused(raw, tmp_path):
    assert "a list or dict that holds itself" in refusal(raw, tmp_path)


def test_what_is_small_only_in_the_file_is_refused_at_once(tmp_path):
    """Forty lists, each twice the last one: 2**40 to whoever walks through them."""
    doubled = b"]" + b"".join(
        bytes([0x71, i]) + b"]" + b"(h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(40)
    )
    began = time.process_time()
    assert "it stands for more than" in refusal(doubled + b".", tmp_path)
    tuples = b")" + b"2\x86" * 40 + b"N."  # hashing them would take as long
    assert content(tuples, tmp_path) is None
    assert "refused the key a tuple" in refusal(b"}" + tuples[:-2] + b"Ns.", tmp_path)
    assert time.process_time() - began < 60  # of its own: walking through them would take days


def test_size_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "MAX_BYTES", 1000)
    assert "it has more than the 1,000 bytes allowed" in refusal(pickle.dumps("x" * 1000), tmp_path)
    monkeypatch.setattr("roadmap.plain_pickle.machine.MAX_VALUES", 999)
    assert "more than the 999 instructions allowed" in refusal(b"]" + b"20" * 499 + b".", tmp_path)


def test_encoding_one_text_again_and_again_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays_module, "MAX_BYTES", 1000)
    text = b"X\x64\x00\x00\x00" + b"x" * 100
    encode = b"c_codecs\nencode\n" + text + b"X\x06\x00\x00\x00latin1\x86q\x01R"
    again = b"0c_codecs\nencode\nh\x01R"
    assert content(encode + again * 9 + b".", tmp_path) == b"x" * 100
    assert "its arrays take more than the 1,000 bytes allowed" in refusal(encode + again * 10 + b".", tmp_path)


def test_sharing_is_kept_and_arrays_are_their_own(tmp_path):
    row, numbers = [1, 2], np.arange(3)
    first, second, a, b = content(pickle.dumps([row, row, numbers, numbers]), tmp_path)
    assert first is second
    assert a is b
    assert a.flags.writeable
    a[0] = 9


@given(noise=st.binary(max_size=60), where=st.integers(0, 400), protocol=st.integers(0, 5))
def test_random_damage_is_a_value_or_a_value_error(noise, where, protocol, tmp_path_factory):
    raw = bytearray(pickle.dumps(PLAIN, protocol))
    raw[where : where + len(noise)] = noise
    path = tmp_path_factory.getbasetemp() / "noise.pkl"
    path.write_bytes(raw)
    with contextlib.suppress(ValueError):
        plain_content(path)
