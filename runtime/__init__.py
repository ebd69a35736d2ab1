"""The machinery around the training loop.

folder.py         a run's folder: lock, move aside, resume, save
telemetry.py      log, MFU, loss curve, Weights & Biases, progress bar
signals.py        on SIGTERM, SIGINT or SIGUSR1: finish the step and save
distributed.py    devices, processes, DDP and FSDP2, processes that do not answer
checkpoint.py     checkpoints: written whole or not at all, never unpickled
records.py        config.json, log.jsonl, result.json; the identity of the code
self_check.py     the check at every start
toys.py           small models of the same code, for the check
locate.py         where two versions of the code differ, in words
parameters.py     initialisation
counting.py       parameters, FLOPs, state sizes
errors.py         one-line errors
files.py          files replaced whole or not at all, locks
torch_private.py  all private parts of PyTorch that are used
"""
