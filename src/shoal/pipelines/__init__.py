"""Pipelines: a model cut into stages, and what a step takes before you rent the machines.

chain            a model as layers that run one after another
layer_costs      times and memory of each layer, measured
partition        the cuts that make the slowest stage as fast as possible
schedules        GPipe, 1F1B, interleaved 1F1B: the order of work at each device
virtual_step     one step of a pipeline in virtual time
data_parallel    the same step without a pipeline
linear_layers    which fully-connected layers are worth splitting
proposal         Split: cuts, simulated steps, a recommendation
pipeline         the same split on real processes, by torch.distributed.pipelining
split_tables     its tables and sentences             split_page, split_record   the same as HTML and JSON
"""
