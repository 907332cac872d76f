"""Planning: which strategy, period, codec and number of workers, before the first run.

workload     what a step, the model and each codec cost, measured
contenders   every setting that is looked at
message_time   what a message costs        mean_time, server_time, peer_time   formulas for a round
run_time     seconds, bytes and memory of a whole run, by these formulas
rules        the rules of thumb: which family of methods, and why
noise_scale  how many samples a step can use
trials       the accuracy pass: short runs in virtual time, halved again and again
curves_ahead   learning curves beside that of one worker, continued
objectives   what "best" means: a target, a time limit, epochs, bytes, a price
planner      plan(): all of it
"""
