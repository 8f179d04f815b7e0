"""A service over one index or several: an interface for programs, and a page for people.

    from roadmap.search.service import serve
    serve(["birds.index"], model="runs/first")      # http://127.0.0.1:8000 until Ctrl-C

`application` is the same as an ASGI application, `running` the same in the background of a program.
"""

from __future__ import annotations

from roadmap.search.service.app import application
from roadmap.search.service.core import Embedder
from roadmap.search.service.limits import Limits, Refusal
from roadmap.search.service.server import running, serve

__all__ = ["Embedder", "Limits", "Refusal", "application", "running", "serve"]
