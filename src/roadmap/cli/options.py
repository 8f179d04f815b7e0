"""The options that verbs about models share."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from roadmap.cli.data import NAMES
from roadmap.cli.telling import SKIP, say_start, tell_errors
from roadmap.config.settings import PACKING, POOLINGS, PRECISIONS, DataSettings, HardwareSettings
from roadmap.locations import check_root, checkpoint_of, run_around

if TYPE_CHECKING:
    from roadmap.data import Pack, Records
    from roadmap.data.pictures.shards import OnError
    from roadmap.encoder import Encoder

PASSED = ("device", "precision", "image", "resize", "weights", "pooling", "dim", "batch", "flip")  # to Encoder.open
PICTURES, MODEL, COMPUTING = "The pictures", "The model", "Computing"  # panels of the help text


def _option(panel: str, text: str, least: int | None = None) -> Any:
    return typer.Option(help=text, min=least, rich_help_panel=panel)


@dataclass(frozen=True)
class Asked:
    """Which pictures, which model and how, as typed; None where nothing was. Each field is an option."""

    data: Annotated[str | None, _option(PICTURES, f"One of: {', '.join(NAMES)}; by default the run's dataset.")] = None
    root: Annotated[Path | None, _option(PICTURES, "Folder of the dataset; for `table`, the file; glyphs: none.")] = (
        None
    )
    split: Annotated[
        str | None,
        _option(PICTURES, "test, train, val or all; embed: also query or gallery."),
    ] = None
    image: Annotated[int | None, _option(PICTURES, "Side of what the model sees; by default the run's, or 224.", 1)] = (
        None
    )
    resize: Annotated[
        int | None,
        _option(PICTURES, "Shorter side before the centre is cut out; by default the run's, or 8/7 of --image.", 1),
    ] = None
    pack: Annotated[
        str,
        _option(
            PICTURES,
            f"A pack of pictures: {', '.join(PACKING)}; auto uses one that is there, yes and compressed make one.",
        ),
    ] = "auto"
    on_error: Annotated[
        str | None,
        _option(
            PICTURES,
            "A picture that cannot be decoded: raise stops, skip leaves it out; by default as in the run, or raise.",
        ),
    ] = None
    weights: Annotated[
        str | None,
        _option(MODEL, "Weights of a timm model: hub (the default), random, or a .safetensors or .pth file."),
    ] = None
    pooling: Annotated[
        str | None, _option(MODEL, f"Pooling of a timm model: {', '.join(POOLINGS)}; auto is what it was trained with.")
    ] = None
    dim: Annotated[
        int | None, _option(MODEL, "Add to a timm model a random projection to this many dimensions.", 1)
    ] = None
    flip: Annotated[bool, _option(MODEL, "Average each vector with that of the mirror image; takes twice as long.")] = (
        False
    )
    device: Annotated[str, _option(COMPUTING, "auto, cpu, cuda, cuda:1, mps; auto: as in the run, or a GPU.")] = "auto"
    precision: Annotated[
        str | None,
        _option(COMPUTING, f"{', '.join(PRECISIONS)}; by default the run's, or auto: bf16 on a GPU, 32 elsewhere."),
    ] = None
    batch: Annotated[
        int | None,
        _option(COMPUTING, "Pictures that go through the model at once; by default as in the run, or 256.", 1),
    ] = None

    def when_damaged(self, encoder: Encoder) -> OnError:
        """What to do with a picture that cannot be decoded, in the type that the library takes."""
        return encoder.on_error if self.on_error is None else "skip" if self.on_error == "skip" else "raise"

    def typed(self) -> dict[str, object]:
        """The options that have no default, and what was given for them."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.default is None}

    def encoder(self, model: str) -> Encoder:
        """The model that was asked for. What is wrong with what was typed is told before torch is imported."""
        DataSettings(pack=self.pack, on_error=self.on_error or "raise")
        HardwareSettings(precision=self.precision or "auto")
        checkpoint = checkpoint_of(model)
        of_run = checkpoint is not None and run_around(checkpoint) is not None
        if self.data is not None and not (of_run and self.root is None):
            check_root(self.data, self.root)
        elif not of_run:
            raise ValueError(f"--data is missing: which pictures? One of {', '.join(NAMES)}; folder for your own")
        say_start(f"opening    {model}")
        from roadmap.encoder import Encoder

        return Encoder.open(model, **{name: getattr(self, name) for name in PASSED})

    def pictures(self, encoder: Encoder, records: Records) -> tuple[Pack | None, str]:
        """The pack that the pictures are read from, if any, and a sentence that says so. For a single pass none is made
        unasked."""
        from roadmap.data import pack_for

        asked = self.pack in ("yes", "compressed")
        return pack_for(records, encoder.side, self.pack, on_error=self.when_damaged(encoder), make=asked)


def about_models(verb: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of `Asked` beside the verb's own; they reach it as one. Its errors are told."""
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
    hints = get_type_hints(Asked, include_extras=True)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(Asked)
    ]

    def command(**given: Any) -> None:
        asked = Asked(**{f.name: given.pop(f.name) for f in dataclasses.fields(Asked)})
        with tell_errors(damaged=SKIP):
            verb(asked, **given)

    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    return command
