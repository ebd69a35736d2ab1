"""A split stored in several files of tokens, read as one array."""

import hashlib
import os

import numpy as np


class Shards:
    """Files of tokens as one array, with len() and slices.

    folder: that of the data; paths, lengths: of the files, in order.
    """

    ndim = 1

    def __init__(self, folder, paths, lengths, dtype):
        self.filename = folder  # a memmap has its file here
        self.files = []
        for path, n_tokens in zip(paths, lengths, strict=True):
            self.files.append(np.memmap(path, dtype, "r", shape=(n_tokens,)))
        self.ends = np.cumsum([0, *lengths])  # where each file begins, and the last one ends
        self.dtype = np.dtype(dtype)

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, part):
        """tokens[start:stop], 0 <= start; a copy if it spans several files."""
        start, stop, _ = part.indices(len(self))
        i = int(np.searchsorted(self.ends, start, side="right")) - 1  # of the file that holds `start`
        pieces = []
        while start < stop:
            end = min(stop, int(self.ends[i + 1]))
            pieces.append(self.files[i][start - self.ends[i] : end - self.ends[i]])
            start = end
            i += 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.empty(0, self.dtype), *pieces])


def shards_sha256(hashes):
    """The sha256 of a split in shards: a hash of its files' sha256 (hex), in order."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def file_stamp(tokens):
    """(inode, bytes, mtime in ns) of the file behind a memmap, which changes when the file is replaced, cut or written
    to. For Shards: a hash of the inodes, the total bytes, a hash of the sizes and mtimes, which changes when two shards
    are exchanged. If a file cannot be read: the reason."""
    try:
        if isinstance(tokens, Shards):
            stamps = [_stamp(file.filename) for file in tokens.files]
            inodes, sizes, times = zip(*stamps, strict=True)
            return hash(inodes), sum(sizes), hash((sizes, times))
        return _stamp(tokens.filename)
    except OSError as error:
        return error.strerror


def _stamp(path):
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def what_changed(before, now):
    """The difference between two stamps of a file, in words."""
    if isinstance(now, str):
        return now
    if now[1] != before[1]:
        return f"{before[1]:,} bytes then, {now[1]:,} now"
    return "replaced" if now[0] != before[0] else "written to"
