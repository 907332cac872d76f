"""The live page of a run: the workers, the curves and the faults, in a browser on this host.

LivePage       what a command with --watch tells, served while it runs
timeline       a run as frames, from its progress events; sentence.py says in words what a frame shows
feed           the runs of a page, and the browsers that follow them
page_server    the address with its token, on the loopback interface
replay         a run that was recorded, finished or not, as the same frames
tunnel         the page of a run on another host, through ssh
watch.html, watch.css, watch.js   the page itself, drawn with the report's charts.js and uPlot
"""

from shoal.watch.live import LivePage

__all__ = ["LivePage"]
