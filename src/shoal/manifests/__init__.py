"""Manifests: the files that start a run on a cluster.

cluster_run   what is to be run, whatever the cluster
batch_script  a batch script for sbatch
jobset        a JobSet for Kubernetes
trainjob      a TrainJob of Kubeflow Trainer
pods          what the two for Kubernetes share
yaml_text     plain values as YAML
"""
