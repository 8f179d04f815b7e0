"""The `roadmap` command, also as `python -m roadmap`: Ctrl-C ends it quietly while it is still being imported, too."""

import os
import sys


def main() -> None:
    try:
        from roadmap.cli.app import main as command
    except KeyboardInterrupt:
        os._exit(130)
    except ModuleNotFoundError as missing:  # of the package alone: torch and numpy, which the losses need
        if (missing.name or "roadmap").partition(".")[0] == "roadmap":
            raise
        sys.exit(f"error: the command line needs {missing.name}: pip install 'roadmap-retrieval[train]'")
    command()


if __name__ == "__main__":
    main()
