"""The picture of `make demo`, for the README."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from roadmap.demo.__main__ import main

HERE = Path(__file__).parent

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        code = main(["--out", folder])
        (HERE / "demo.png").write_bytes((Path(folder) / "demo.png").read_bytes())
    sys.exit(code)
