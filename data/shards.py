"""A split stored in several files of tokens, read as one array."""

import hashlib
import os

import numpy as np


class Shards:
    """Files of tokens as one array, with len() and slices.

    paths, lengths: of the files, in order.
    """

    ndim = 1

    def __init__(self, paths, lengths, dtype):
        self.files = [np.memmap(path, dtype, "r", shape=(n,)) for path, n in zip(paths, lengths, strict=True)]
        self.ends, self.dtype = np.cumsum([0, *lengths]), np.dtype(dtype)

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, part):
        """tokens[start:stop], 0 <= start; a copy if it spans several files."""
        start, stop, _ = part.indices(len(self))
        first = int(np.searchsorted(self.ends, start, side="right")) - 1
        pieces = []
        while start < stop:
            end = min(stop, int(self.ends[first + 1]))
            pieces.append(self.files[first][start - self.ends[first]:end - self.ends[first]])
            start, first = end, first + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])


def shards_sha256(entries):
    """The sha256 of a split in shards: a hash of its files' sha256, in order."""
    return hashlib.sha256("".join(entry["sha256"] for entry in entries).encode()).hexdigest()


def file_stamp(tokens):
    """(inode, bytes, mtime in ns) of the file behind a memmap, which changes when the file is replaced, cut or written
    to. For Shards: a hash of the inodes, the total bytes, a hash of the sizes and mtimes, which changes when two shards
    are exchanged. If a file cannot be read: the reason."""
    if isinstance(tokens, Shards):
        stamps = [file_stamp(file) for file in tokens.files]
        bad = next((stamp for stamp in stamps if isinstance(stamp, str)), None)
        inodes, sizes, times = zip(*stamps, strict=True) if bad is None else ((), (), ())
        return bad or (hash(inodes), sum(sizes), hash((sizes, times)))
    try:
        status = os.stat(tokens.filename)
    except OSError as error:
        return error.strerror
    return status.st_ino, status.st_size, status.st_mtime_ns
