"""The report of a campaign: a page for everybody and a brief for who owns the GPUs and who pays for them.

A section a module; figures apart from sections; texts in `texts/`, markup in `templates/`. `page.build_report` puts
them together. matplotlib and pandas take a second to import: whoever only plans or sweeps imports nothing of this room.
"""

from kvtrial.analysis.report.page import build_brief, build_report

__all__ = ["build_brief", "build_report"]
