"""What `roadmap train` can be told, and its help: every file composes, every setting and option is explained."""

from __future__ import annotations

import re

import pytest

from roadmap.cli.train_help import EXAMPLES
from roadmap.config.catalogue import GROUPS, Catalogue
from roadmap.config.composition import composed
from roadmap.config.meaning import attributes
from roadmap.config.meaning import settings as all_settings
from roadmap.config.request import given_keys
from roadmap.config.settings import Settings
from roadmap.losses.named import NAMES, constructor_parameters, required_options
from tests.cli.test_train import called

CATALOGUE = Catalogue()
OPTIONS = {group: list(CATALOGUE.options(group)) for group in GROUPS if group != "recipe"}


@pytest.fixture(scope="module")
def help_text() -> str:
    result = called("--help")
    assert result.exit_code == 0
    assert called("-h").output == result.output
    return result.output


@pytest.mark.parametrize("key", all_settings())
def test_every_setting_is_explained(key: str, help_text: str) -> None:
    setting = all_settings()[key]
    assert len(setting.meaning) > 8, f"{key} has no description in its dataclass's Attributes"
    words = re.escape(setting.meaning.replace("None", "null")).replace("\\ ", r"\s+")
    assert re.search(rf"^  {re.escape(key)}=\S+\s+{words}$", help_text, re.MULTILINE)


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
    assert all_settings()["select.by"].meaning.endswith("which flatters the result.")


def test_all_fields_are_settings() -> None:
    plain: list[str] = []
    for name, value in Settings().as_dict().items():
        plain += [name] if not isinstance(value, dict) else [f"{name}.{inner}" for inner in value]
    assert [key for key in plain if not key.startswith("loss.")] == list(all_settings())


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_is_explained(group: str, help_text: str) -> None:
    assert f"\n{group}=...  {GROUPS[group]}\n" in help_text
    options = CATALOGUE.options(group)
    assert options
    for option, headline in options.items():
        assert len(headline) > 12, f"{group}/{option}.yaml must open with a line that says what it is"
        words = re.escape(headline).replace("\\ ", r"\s+")
        assert re.search(rf"^  {option}\s+{words}$", help_text, re.MULTILINE)


def test_the_help_is_fit_to_read(help_text: str) -> None:
    lines = help_text.splitlines()
    examples = list(EXAMPLES.values())
    assert len(examples) == 5
    assert all(f"    {example}" in lines for example in examples)
    assert all(len(line) <= 110 for line in lines if not line.startswith("    roadmap "))
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in help_text
    assert "None" not in help_text


@pytest.mark.parametrize("number", range(max(len(options) for options in OPTIONS.values())))
def test_every_option_composes_as_it_says(number: int) -> None:
    """One option of each group at a time; those of a shorter group come more than once."""
    chosen = {group: options[number % len(options)] for group, options in OPTIONS.items()}
    settings = composed([f"{group}={option}" for group, option in chosen.items()]).as_dict()
    for group, option in chosen.items():
        for name, value in CATALOGUE.values(group, option).items():
            assert settings[group][name] == value, f"{group}/{option}.yaml: {name}"
            assert type(settings[group][name]) is type(value), f"{group}/{option}.yaml: {name}"


@pytest.mark.parametrize("name", NAMES)
def test_the_file_of_a_loss_is_its_constructor(name: str) -> None:
    values, notes, needed = CATALOGUE.values("loss", name), CATALOGUE.notes("loss", name), required_options(name)
    assert values.pop("name") == name
    parameters = constructor_parameters(name)
    assert list(values) == list(parameters) == list(notes)
    assert values == {key: None if key in needed else p.default for key, p in parameters.items()}


def test_there_is_a_file_for_every_loss_and_no_other() -> None:
    assert set(CATALOGUE.options("loss")) == set(NAMES)


def test_there_is_a_file_for_every_dataset_to_train_on() -> None:
    from roadmap.data.datasets import READERS

    assert set(CATALOGUE.options("data")) == set(READERS) - {"roxford5k", "rparis6k"}
    assert all(CATALOGUE.values("data", name)["name"] == name for name in CATALOGUE.options("data"))


def test_own_pictures_leave_everything_else_to_be_chosen() -> None:
    for name in ("folder", "table"):
        assert given_keys([f"data={name}"], CATALOGUE) == {"data.name"}


def test_every_model_has_rates_that_suit_it() -> None:
    assert set(CATALOGUE.options("model")) <= set(CATALOGUE.options("optim"))
    assert composed(["model=resnet50"]).optim == composed(["optim=resnet50"]).optim
    assert composed(["model=deit_small_released"]).optim == composed(["optim=fine_tune"]).optim
    assert composed(["optim=sgd", "model=resnet50"]).optim.name == "sgd"
    assert composed(["recipe=cub_vits", "model=resnet50"]).optim.lr == 3e-6


def test_the_recipe_of_glyphs_is_what_happens_by_itself() -> None:
    assert composed(["recipe=glyphs"]).as_dict() == composed([]).as_dict() | {"recipe": "glyphs"}


def test_timm_knows_the_models() -> None:
    import timm

    names = {CATALOGUE.values("model", option)["name"] for option in CATALOGUE.options("model")} - {"small_cnn"}
    assert names
    assert all(name.split(".")[0] in timm.list_models() for name in names)
    assert "resnet50.tv_in1k" in timm.list_pretrained("resnet50.*")
