"""`python -m roadmap` is the `roadmap` command."""

from roadmap.cli.app import main

if __name__ == "__main__":
    main()
