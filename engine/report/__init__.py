"""The self-contained `report.html` of a run."""

from engine.report.page import REPORT, write_report

__all__ = ["REPORT", "write_report"]
