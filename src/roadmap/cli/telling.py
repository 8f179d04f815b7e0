"""What every verb says in the same way: what begins, what went wrong and what helps, that it was stopped."""

from __future__ import annotations

import inspect
import os
import re
import select
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import typer

from roadmap.atomic import FULL_WORDS
from roadmap.config.settings import SettingError

FAILED, INTERRUPTED = 1, 130
STDOUT = 1
# What a person can do something about; anything else is a fault of ours and shows its traceback.
EXPECTED = (ValueError, TypeError, OSError, ImportError, RuntimeError)
# The library speaks of settings; these verbs have options for some of them.
FIELDS = (
    *("model.weights", "model.pooling", "model.dim", "data.root", "data.image", "data.resize", "data.pack"),
    *("data.on_error", "hardware.device", "hardware.precision"),
)
OPTION_OF = {field: f"--{field.partition('.')[2].replace('_', '-')}" for field in FIELDS}
OPTION_OF |= {"model.name": "MODEL", "data.name": "--data"}
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters, but for tabs and ends of lines
EXAMPLE = re.compile(r"([A-Z_]+=\S+ )?roadmap ")
# What brings a library that is not there; the others come with `train`.
EXTRA_OF = {"onnx": "export", "onnxruntime": "export", "pytorch_metric_learning": "pml", "sklearn": "report"}
EXTRA_OF |= dict.fromkeys(("faiss", "pymilvus", "milvus_lite"), "search")
EXTRA_OF |= dict.fromkeys(("fastapi", "prometheus_client", "python_multipart", "uvicorn"), "serve")
REPAIR = "Repair or remove it"
SKIP = f"{REPAIR}, or use --on-error skip"


def help_text(verb: object) -> str:
    """The docstring of a verb as it is shown by --help: paragraphs in one line, which a terminal of any width breaks
    where it must; examples, which begin in the docstring with `roadmap` or a variable, below one another."""
    shown: list[str] = []
    for paragraph in (inspect.getdoc(verb) or "").split("\n\n"):
        text = " ".join(paragraph.split())
        below = EXAMPLE.match(text) and shown and EXAMPLE.match(shown[-1])
        shown.append(f"{shown.pop()}\n{text}" if below else text)
    return "\n\n".join(shown)


def say(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(_visible(line))


def _visible(text: str) -> str:
    """Without what would steer a terminal: names of files and labels come from strangers, too."""
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say_start(line: str) -> None:
    """Says what begins, before anything slow is imported."""
    typer.secho(_visible(line), dim=True)


def say_error(line: str) -> None:
    typer.secho(f"error: {_visible(line)}", fg=typer.colors.RED, err=True)


@contextmanager
def tell_errors(stopped: str = "stopped", damaged: str = REPAIR) -> Iterator[None]:
    """Expected errors become one line on stderr and exit code 1; ROADMAP_DEBUG=1 shows the traceback instead.

    Args:
        stopped: what is said after Ctrl-C, which leaves with exit code 130.
        damaged: what helps when a picture cannot be decoded.
    """
    said, code = "", 0
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt as stop:
        said, code = stopped, getattr(stop, "exit_code", INTERRUPTED)
    except EXPECTED as error:
        if is_debugging() or is_reader_gone(error):
            raise
        said, code = advice(error, damaged), FAILED
    # outside: the error would keep alive what it came from, such as processes that wait for more work
    if code == FAILED:
        say_error(said)
    elif code:
        typer.echo(f"\n{said}", err=True)
    if code:
        raise typer.Exit(code)


def is_debugging() -> bool:
    """Whether tracebacks are wanted; our own variable counts before Hydra's."""
    return os.environ.get("ROADMAP_DEBUG", os.environ.get("HYDRA_FULL_ERROR", "")) not in ("", "0")


def is_reader_gone(error: BaseException) -> bool:
    """Whether nobody reads the output any more, as behind `| head`: there is nobody to tell, and nothing is wrong."""
    if not isinstance(error, BrokenPipeError):
        return False
    if not hasattr(select, "poll"):
        return True
    asked = select.poll()  # another pipe may have been the broken one, such as that of a process that reads pictures
    asked.register(STDOUT, 0)
    return any(state & select.POLLERR for _, state in asked.poll(0))


def _words_of(error: Exception) -> str:
    """What an error says; of the system's own, without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def advice(error: Exception, damaged: str = REPAIR) -> str:
    """The message in the words of the command line, with what helps."""
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRA_OF.get((error.name or "").partition(".")[0], "train")
        return f"this needs {error.name}: pip install 'roadmap-retrieval[{extra}]'"
    names = "|".join(map(re.escape, OPTION_OF))
    spelt = re.compile(rf"(?<![\w./-])({names})(=|(?![\w.]))")
    said = spelt.sub(lambda found: f"{OPTION_OF[found[1]]}{' ' if found[2] else ''}", _words_of(error))
    if FULL_WORDS.search(said):
        return f"the disk is full ({said}); free some space, then give the same command again"
    if (
        isinstance(error, SettingError) and error.field not in OPTION_OF
    ):  # an argument, which is called as its option is
        said = said.replace(f"{error.field}=", f"--{error.field} ")
    if type(error).__name__ == "PictureError":  # by name: importing it to look at any error would take a second
        return f"{said}. {damaged}"
    if inside := re.search(r"PictureError: (.+)", said):  # torch hands a worker's error on as text, with its traceback
        return f"{inside[1]}. {damaged}"
    return f"{said}. A smaller --batch takes less memory" if "out of memory" in said else said
