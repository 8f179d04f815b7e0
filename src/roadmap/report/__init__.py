"""What was trained and measured, as pages that a person reads."""

from roadmap.report.retrievals import Collection as Collection
from roadmap.report.retrievals import retrieval_page as retrieval_page

__all__ = ["Collection", "retrieval_page"]
