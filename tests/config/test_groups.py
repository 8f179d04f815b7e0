"""What `roadmap train` can be told, and its help: every file composes, every setting and option is explained."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from roadmap.cli.train_help import EXAMPLES
from roadmap.config.composition import check_loss, settings_from
from roadmap.config.options import FOLDER, GROUPS, NAMED, attributes, options, parts_of
from roadmap.config.options import settings as all_settings
from roadmap.config.settings import SettingError, Settings
from roadmap.config.words import override_of
from roadmap.engine.auto import unresolved
from roadmap.losses.auxiliary import AUXILIARIES, FILLED_IN, auxiliary_constructor, needed_options
from roadmap.losses.named import NAMES, constructor, required_options
from tests.cli.test_train import called

OPTIONS = {group: list(options(group)) for group in GROUPS if group != "recipe"}
MOST_LINES = 80


def values_of(group: str, option: str) -> dict[str, Any]:
    """What the file of an option says, with what it takes over from another."""
    values = OmegaConf.to_container(OmegaConf.load(FOLDER / group / f"{option}.yaml"))
    assert isinstance(values, dict)
    parents = [parent for parent in values.pop("defaults", []) if parent != "_self_"]
    for parent in parents:
        values = values_of(group, parent) | values
    return {str(name): value for name, value in values.items()}


@pytest.fixture(scope="module")
def help_text() -> str:
    result = called("--help")
    assert result.exit_code == 0
    assert called("-h").output == result.output
    return result.output


@pytest.mark.parametrize("key", [key for key in all_settings() if key not in GROUPS])
def test_every_setting_is_explained(key: str, help_text: str) -> None:
    setting = all_settings()[key]
    assert len(setting.meaning) > 8, f"{key} has no description in its dataclass's Attributes"
    assert re.search(rf"\b{key.rpartition('.')[2]}\b", help_text)
    part = key.rpartition(".")[0]
    for asked in (key, part or key):
        said = " ".join(called("--help", asked).output.split())
        assert f"{key}=" in said
        assert setting.meaning in said


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_is_explained(group: str, help_text: str) -> None:
    said = " ".join(called("--help", group).output.split())
    assert said.startswith(f"{group}=... {GROUPS[group]}")
    assert options(group)
    listed = re.search(rf"^  {group}= +((?:.*\n)(?: {{14}}.*\n)*)", help_text, re.MULTILINE)
    assert listed is not None
    assert " ".join(listed[1].split()) == ", ".join(options(group))
    for option, headline in options(group).items():
        assert len(headline) > 12, f"{group}/{option}.yaml must open with a line that says what it is"
        assert f"{option} {headline}" in said


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("loss=roadmap", ["SupAP and calibration together", "rho: 100.0 # slope beyond delta"]),
        ("recipe=cub_vits", ["roadmap train recipe=cub_vits data.root=CUB_200_2011", "override /optim: cub_vits"]),
        ("model=resnet50_v1", ["stride_first: true"]),
    ],
)
def test_an_option_is_shown_whole(asked: str, expected: list[str]) -> None:
    said = called("--help", asked).output
    assert all(words in said for words in expected)
    assert "@package" not in said


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("lss", "unknown setting lss, did you mean 'loss'?"),
        ("loss=supapp", "unknown loss 'supapp', did you mean 'supap'? Options: blackboxap, "),
        ("optim.lrr", "unknown setting optim.lrr, did you mean 'optim.lr'?"),
    ],
)
def test_help_on_what_there_is_not(asked: str, message: str) -> None:
    result = called("--help", asked)
    assert result.exit_code == 2
    assert message in result.stderr


def test_descriptions_are_read_whole() -> None:
    class Described:
        """A thing.

        Attributes:
            one: begins here: and goes on
                in the next line.
            two: short.

        Args:
            three: is something else.
        """

    assert attributes(Described) == {"one": "begins here: and goes on in the next line.", "two": "short."}
    assert attributes(type("Bare", (), {})) == {}
    assert all_settings()["select.by"].meaning.endswith("where there are classes enough.")


def test_all_fields_are_settings() -> None:
    plain: list[str] = []
    for name, value in Settings().as_dict().items():
        plain += [name] if not isinstance(value, dict) else [f"{name}.{inner}" for inner in value]
    assert [key for key in plain if key.partition(".")[0] not in NAMED] == list(all_settings())


def test_the_help_is_fit_to_read(help_text: str) -> None:
    lines = help_text.splitlines()
    examples = list(EXAMPLES.values())
    assert len(examples) == 6
    assert len(lines) <= MOST_LINES
    assert all(f"    {example}" in lines for example in examples)
    assert all(len(line) <= 110 for line in lines if not line.startswith("    roadmap "))
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in help_text
    assert "None" not in help_text


@pytest.mark.parametrize("number", range(max(len(options) for options in OPTIONS.values())))
def test_every_option_composes_as_it_says(number: int) -> None:
    """One option of each group at a time; those of a shorter group come more than once."""
    chosen = {group: options[number % len(options)] for group, options in OPTIONS.items()}
    settings = settings_from([f"{group}={option}" for group, option in chosen.items()]).as_dict()
    for group, option in chosen.items():
        for name, value in values_of(group, option).items():
            assert settings[group][name] == value, f"{group}/{option}.yaml: {name}"
            assert type(settings[group][name]) is type(value), f"{group}/{option}.yaml: {name}"


@pytest.mark.parametrize("name", NAMES)
def test_the_file_of_a_loss_is_its_constructor(name: str) -> None:
    values, needed = values_of("loss", name), required_options(name)
    notes = dict(re.findall(r"^(\w+): [^#\n]*# (.*)$", parts_of("loss", name)[1], re.MULTILINE))
    assert values.pop("name") == name
    parameters = inspect.signature(constructor(name)).parameters
    assert list(values) == list(parameters) == list(notes)
    defaults = {key: list(p.default) if isinstance(p.default, tuple) else p.default for key, p in parameters.items()}
    assert values == {key: None if key in needed else default for key, default in defaults.items()}


def test_there_is_a_file_for_every_loss_and_no_other() -> None:
    assert set(options("loss")) == set(NAMES)


@pytest.mark.parametrize("name", AUXILIARIES)
def test_an_auxiliary_modules_file_is_its_constructor(name: str) -> None:
    """All options with their defaults and a few words each; what only the run knows is null."""
    values, notes = values_of("auxiliary", name), re.findall(r"^(\w+): [^#\n]*# ", parts_of("auxiliary", name)[1], re.M)
    assert values.pop("name") == name
    parameters = inspect.signature(auxiliary_constructor(name)).parameters
    assert list(values) == list(parameters) == notes
    assert values == {key: None if key in needed_options(name) else p.default for key, p in parameters.items()}
    assert set(needed_options(name)) <= set(FILLED_IN)


def test_there_is_a_file_for_every_auxiliary_module_and_no_other() -> None:
    assert set(options("auxiliary")) == {"none", *AUXILIARIES}
    assert settings_from([]).auxiliary == {"name": "none"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["auxiliary=mik"], "unknown auxiliary 'mik', did you mean 'mic'?"),
        (["auxiliary=mic", "auxiliary.cluster=3"], "unknown setting auxiliary.cluster of auxiliary=mic, did you mean"),
        (
            ["auxiliary.clusters=3"],
            "unknown setting auxiliary.clusters of auxiliary=none, did you mean 'auxiliary'? It",
        ),
    ],
)
def test_an_auxiliary_module_that_there_is_not(asked: list[str], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        settings_from(asked)
    assert message in str(caught.value)


def test_an_auxiliary_module_is_checked_before_anything_is_read() -> None:
    with pytest.raises(SettingError, match="auxiliary.clusters must be >= 1, got 0"):
        check_loss(settings_from(["auxiliary=mic", "auxiliary.clusters=0"]))
    with pytest.raises(SettingError, match="an auxiliary module is chosen with its options: auxiliary=NAME, not aux"):
        override_of("auxiliary.name=mic", False)


def test_there_is_a_file_for_every_dataset_to_train_on() -> None:
    from roadmap.data.datasets import READERS

    assert set(options("data")) == set(READERS) - {"roxford5k", "rparis6k"}
    assert all(values_of("data", name)["name"] == name for name in options("data"))


def test_own_pictures_leave_everything_else_to_be_chosen() -> None:
    for name in ("folder", "table"):
        assert unresolved(settings_from([f"data={name}"])) == unresolved(Settings())


def test_every_model_has_rates_that_suit_it() -> None:
    assert set(options("model")) <= set(options("optim"))
    assert settings_from(["model=resnet50"]).optim == settings_from(["optim=resnet50"]).optim
    assert settings_from(["model=deit_small_released"]).optim == settings_from(["optim=fine_tune"]).optim
    assert settings_from(["optim=sgd", "model=resnet50"]).optim.name == "sgd"
    assert settings_from(["recipe=cub_vits", "model=resnet50"]).optim.lr == 3e-6


def test_timm_knows_the_models() -> None:
    import timm

    names = {values_of("model", option)["name"] for option in options("model")} - {"small_cnn", "auto"}
    assert names
    assert all(name.split(".")[0] in timm.list_models() for name in names)
    assert "resnet50.tv_in1k" in timm.list_pretrained("resnet50.*")
