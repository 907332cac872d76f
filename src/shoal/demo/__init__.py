"""The demo: what Shoal is good for, shown on this machine in three minutes. `shoal demo` runs it.

drawings        the task: digits drawn in code, so that no data set is needed
machine_load    how many cores there are, and how busy other programs keep them
this_machine    act 1: real processes, one worker against two; plain_ddp is DDP on the same work
eight_machines  act 2: eight machines on an office link, in virtual time
killed          act 3: a worker and the server are killed in mid-run
sentences       what the figures say, in words; every sentence depends on them
terminal, page  the last screen, and demo.html
program         the three acts, one after the other
"""
