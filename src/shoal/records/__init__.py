"""What a run leaves behind: a small folder that is written while it runs, and how folders are found again.

recording      one run and its observers: its folder and its loggers
run_folder     the four files of a run, written as it goes
run_store      the folder of all runs: where it is, names for new runs
stored_runs    runs that are on disk: their state, and which one a name means
places         where runs are kept, and the names of their files
thinning       which events and lines are kept, so that a folder stays small
"""
