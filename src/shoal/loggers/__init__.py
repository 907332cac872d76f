"""Where the figures of a run go besides its folder: TensorBoard, Weights & Biases, MLflow, CSV, or your own.

logger        the interface: start, log, finish
figures       one table of names, so that every logger gets the same
sending       a thread for each logger: a slow or broken one cannot hold up a run
log_option    what `--log tensorboard:runs/` stands for
"""
