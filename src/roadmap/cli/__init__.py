"""The `roadmap` command: a verb parses, calls and prints. Nothing here that cannot be called from Python."""
