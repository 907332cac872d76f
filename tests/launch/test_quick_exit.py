"""A process that has torch ends without a search for garbage."""

import subprocess
import sys

LINES = """
import atexit, gc
from shoal.launch.quick_exit import end_quickly
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 0))
end_quickly()
print("goes on", gc.get_freeze_count())
"""


def test_objects_are_frozen_when_the_process_ends_and_not_before():
    ended = subprocess.run([sys.executable, "-c", LINES], capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n") == ["goes on 0", "frozen True", ""]
