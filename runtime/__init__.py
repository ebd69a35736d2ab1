"""The machinery around the training loop.

folder.py         a run's folder: lock, move aside, resume, save
telemetry.py      log, MFU, loss curve, Weights & Biases, progress bar
loss_curve.py     the picture of a run's losses
signals.py        on SIGTERM, SIGINT or SIGUSR1: finish the micro-batch and save
graphs.py         micro-batches as CUDA graphs
distributed.py    devices, processes, DDP and FSDP2, unresponsive processes
checkpoint.py     checkpoints: written whole or not at all, never unpickled
records.py        config.json, log.jsonl, result.json; the identity of the code
"""
