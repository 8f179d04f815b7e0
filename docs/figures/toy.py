"""The picture of `make toy`, for the README."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from roadmap.toy.__main__ import main

HERE = Path(__file__).parent

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        code = main(["--out", folder])
        (HERE / "toy.png").write_bytes((Path(folder) / "toy.png").read_bytes())
    sys.exit(code)
