"""`python -m roadmap` is the `roadmap` command."""

from roadmap.cli.app import app

if __name__ == "__main__":
    app(prog_name="roadmap")
