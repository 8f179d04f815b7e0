"""What `roadmap train` can be told: groups of YAML files to choose from, recipes that combine them, and the schema.

    conf/GROUP/OPTION.yaml     chosen by GROUP=OPTION; its first line says what it is
    conf/recipe/NAME.yaml      chosen by recipe=NAME; says itself how to call it and what to expect
    schema                     `roadmap.settings.Settings`: every setting, its type and its default

`catalogue` reads the files, `meaning` the docstrings, `overrides` checks what a person typed, `composition` makes
`Settings` of it.
"""

from hydra.core.config_store import ConfigStore

from roadmap.settings import Settings

# Here, so that a process which a launcher starts has it as soon as it imports anything of this package.
ConfigStore.instance().store(name="schema", node=Settings)
