"""The `roadmap` command, also as `python -m roadmap`: Ctrl-C ends it quietly while it is still being imported, too."""

import os


def main() -> None:
    try:
        from roadmap.cli.app import main as command
    except KeyboardInterrupt:
        os._exit(130)
    command()


if __name__ == "__main__":
    main()
