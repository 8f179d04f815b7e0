"""The YAML files that `roadmap train` composes: GROUP/OPTION.yaml is chosen by GROUP=OPTION."""
