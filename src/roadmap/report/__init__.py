"""What was trained and measured, as pages that a person reads."""

from roadmap.report.page import report as report
from roadmap.report.retrievals import Album as Album
from roadmap.report.retrievals import retrieval_page as retrieval_page

__all__ = ["Album", "report", "retrieval_page"]
