"""What a run can be told: the schema (`settings`), the YAML files (`groups/`), and how Hydra composes them."""
