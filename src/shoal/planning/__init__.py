"""Planning: which strategy, period, codec and number of workers, before the first run.

workload     what a step, the model and each codec cost, measured
contenders   every setting that is looked at
message_time   what a message costs        mean_time, server_time, peer_time   formulas for a round
run_time     seconds, bytes and memory of a whole run, by these formulas
rules        the rules of thumb: which family of methods, and why
noise_scale  how many samples a step can use
short_runs   the accuracy pass: short runs in virtual time, halved again and again
curves_ahead   learning curves beside that of one worker, continued
objectives   what "best" means: a target, a time limit, epochs, bytes, a price
survivors    whom to try                   pricing      formulas and rules, as a plan
planner      plan(): all of it             script_plan  the same for a script, by time alone
script_probe   runs a script for some steps   training_plan, plan_text   the plan as a file, and in words
"""
