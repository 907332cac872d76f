"""How runs are presented: live progress, the closing table, the HTML report and the JSON record.

ProgressDisplay        one line per worker during a run
closing_table   one row per run, for the terminal
advice          why runs end lower than one worker, and what to try
verdict         one sentence per run: did distribution pay?
write_html      one file with charts that opens offline
write_json      the runs as plain values
"""

from shoal.report.advice import advice
from shoal.report.display import ProgressDisplay
from shoal.report.files import write_json
from shoal.report.html import write_html
from shoal.report.reading import Record
from shoal.report.table import closing_table
from shoal.report.verdicts import verdict

__all__ = ["ProgressDisplay", "Record", "advice", "closing_table", "verdict", "write_html", "write_json"]
