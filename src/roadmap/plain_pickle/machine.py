"""The machine that a pickle is a program for, with nothing in it that could run anything."""

from __future__ import annotations

import codecs
import io
import pickletools
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from roadmap.plain_pickle.arrays import MAX_VALUES, Buffers, Hollow, Kind, RefusedError, brief

NEWEST_PROTOCOL = 5
PLAIN = "only lists, dicts, strings, numbers and numpy arrays are read, because anything else could run code"


class Name(Enum):
    """What pickled arrays ask for. Marks on the stack, never called."""

    NDARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    ENCODE = "_codecs.encode"
    BYTES = "__builtin__.bytes"
    RECONSTRUCT = "multiarray._reconstruct"
    SCALAR = "multiarray.scalar"
    FROMBUFFER = "numeric._frombuffer"


_CORES = ("numpy.core", "numpy._core")  # before and since numpy 2
_NAMES = {name.value: name for name in (Name.NDARRAY, Name.DTYPE, Name.ENCODE, Name.BYTES)}
_NAMES |= {f"{core}.{x.value}": x for core in _CORES for x in (Name.RECONSTRUCT, Name.SCALAR, Name.FROMBUFFER)}
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}


def _instructions(raw: bytes) -> Iterator[tuple[str, Any]]:
    """(name, argument) of every instruction of a pickle, STOP included."""
    file = io.BytesIO(raw)
    for _ in range(MAX_VALUES):
        code = file.read(1)
        opcode = _OPCODES.get(code.decode("latin1"))
        if opcode is None:
            raise RefusedError(f"the instruction {code!r} is not known" if code else "it ends too early")
        if opcode.name == "STRING":  # the bytes of Python 2, which pickletools would take for ASCII
            quoted = pickletools.read_stringnl(file, decode=False)
            yield "STRING", codecs.escape_decode(quoted)[0].decode("latin1")
        else:
            yield opcode.name, None if opcode.arg is None else opcode.arg.reader(file)
        if opcode.name == "STOP":
            return
    raise RefusedError(f"it has more than the {MAX_VALUES:,} instructions allowed")


class Machine:
    """The stack, the marks in it, and the memo: what has been read and may be meant again."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.buffers = Buffers()

    def run(self, raw: bytes) -> Any:
        """What the pickle leaves on the stack."""
        for name, argument in _instructions(raw):
            if name in _VALUES:
                self.stack.append(_VALUES[name](argument))
            elif name in _STEPS:
                _STEPS[name](self, argument)
            else:
                raise RefusedError(f"refused the instruction {name}; {PLAIN}")
        return self.pop()

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise RefusedError("it takes what it has not given")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise RefusedError("it goes back to a mark that it has not set")
        first = self.marks.pop()
        items = self.stack[first:]
        del self.stack[first:]
        return items

    def drop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.pop()

    def put(self, index: int) -> None:
        self.stack.append(value := self.pop())
        self.memo[index] = value

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise RefusedError(f"it takes number {index} of its memory, where nothing is")
        value = self.memo[index]
        self.stack.append(value.values if isinstance(value, Hollow) and value.values is not None else value)

    def push_tuple(self, count: int) -> None:
        self.stack.append(tuple(reversed([self.pop() for _ in range(count)])))

    def push_name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise RefusedError(f"refused {brief(module)} as the name of a module")
        if (known := _NAMES.get(f"{module}.{name}")) is None:
            raise RefusedError(f"refused: the pickle asks for {module}.{name}; {PLAIN}")
        self.stack.append(known)

    def extend(self, items: list[Any]) -> None:
        self.stack.append(target := self.pop())
        if type(target) is not list:
            raise RefusedError(f"it appends to {brief(target)}")
        target += items

    def update(self, items: list[Any]) -> None:
        self.stack.append(target := self.pop())
        if type(target) is not dict or len(items) % 2:
            raise RefusedError(f"it sets {len(items)} keys and values of {brief(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:  # hashing anything else can take forever
                raise RefusedError(f"refused the key {brief(key)}; the keys of a dict are strings")
            target[key] = value

    def call(self) -> None:
        """The few calls that arrays are pickled as, each answered here."""
        arguments, called = self.pop(), self.pop()
        if not isinstance(arguments, tuple) or not isinstance(called, Name):
            raise RefusedError(f"refused a call of {brief(called)}; {PLAIN}")
        match (called, *arguments):
            case (Name.ENCODE, str() as text, "latin1"):
                self.stack.append(self.buffers.bytes_of(text))
            case (Name.BYTES,):  # protocols below 3 have no word for b"", the buffer of an empty array
                self.stack.append(b"")
            case (Name.DTYPE, str() | bytes() as kind, _, _):
                self.stack.append(Kind(kind))
            case (Name.RECONSTRUCT, Name.NDARRAY, _, b"b" | "b"):
                self.stack.append(Hollow())
            case (Name.SCALAR, Kind() as kind, raw):
                self.stack.append(self.buffers.array(raw, kind, ())[()])
            case (Name.SCALAR, Kind() as kind):
                raise RefusedError("refused a number without its bytes")
            case (Name.FROMBUFFER, raw, Kind() as kind, tuple() as shape, "C" | "F" as order):
                self.stack.append(self.buffers.array(raw, kind, shape, order))
            case (Name.FROMBUFFER, raw, Kind() as kind, tuple() as shape, "K", tuple() as axes):
                self.stack.append(self.buffers.transpose(raw, kind, shape, axes))
            case _:
                raise RefusedError(f"refused a call of {called.value} that no array is pickled as")

    def build(self) -> None:
        state, target = self.pop(), self.pop()
        match (target, state):
            case (Kind(), _):
                target.build(state)
                self.stack.append(target)
            case (Hollow(), (_, tuple() as shape, Kind() as kind, int() as fortran, raw)):
                target.values = self.buffers.array(raw, kind, shape, "F" if fortran else "C")
                self.stack.append(target.values)
            case _:
                raise RefusedError(f"refused to set the state of {brief(target)}; {PLAIN}")


def _same(value: Any) -> Any:
    return value


def _int64(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise RefusedError("refused an integer of more than 64 bits")
    return value


# Instructions that push a value.
_VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), _int64),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING", "FLOAT", "BINFLOAT"), _same),
    **dict.fromkeys(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _same),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), _same),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    "EMPTY_TUPLE": lambda _: (),
}


def _check_protocol(_: Machine, protocol: int) -> None:
    if protocol > NEWEST_PROTOCOL:
        raise RefusedError(f"protocol {protocol} is not known, only those up to {NEWEST_PROTOCOL}")


def _push_dict(machine: Machine, _: None) -> None:
    items = machine.pop_to_mark()
    machine.stack.append({})
    machine.update(items)


def _set_item(machine: Machine, _: None) -> None:
    value, key = machine.pop(), machine.pop()
    machine.update([key, value])


def _push_stack_name(machine: Machine, _: None) -> None:
    name, module = machine.pop(), machine.pop()
    machine.push_name(module, name)


# The others.
_STEPS: dict[str, Callable[[Machine, Any], None]] = {
    "PROTO": _check_protocol,
    **dict.fromkeys(("FRAME", "STOP"), lambda machine, _: None),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "POP": lambda machine, _: machine.drop(),
    "POP_MARK": lambda machine, _: machine.pop_to_mark().clear(),
    "DUP": lambda machine, _: machine.stack.extend([machine.pop()] * 2),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Machine.get),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "LIST": lambda machine, _: machine.stack.append(machine.pop_to_mark()),
    "DICT": _push_dict,
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "SETITEM": _set_item,
    "SETITEMS": lambda machine, _: machine.update(machine.pop_to_mark()),
    "GLOBAL": lambda machine, name: machine.push_name(*name.split(" ", 1)),
    "STACK_GLOBAL": _push_stack_name,
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}
