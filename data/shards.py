"""A split stored in several files of tokens, read as one array."""

import functools
import hashlib
import os

import numpy as np

MOST_OPEN = 200  # files of all datasets open at once: a process may open 1,024, and a dataset can have 6,000


class Shards:
    """Files of tokens as one array, with len() and slices.

    folder: the dataset's folder; paths, lengths: the files in order, and how many tokens each has.
    """

    ndim = 1

    def __init__(self, folder, paths, lengths, dtype):
        self.filename = folder  # a memmap keeps the path of its file under this name
        self.paths = paths
        self.ends = np.cumsum([0, *lengths])  # where each file begins, and the last one ends
        self.dtype = np.dtype(dtype)

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, part):
        """A copy of tokens[start:stop], 0 <= start: a view would keep its file open."""
        start, stop, _ = part.indices(len(self))
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right") - 1  # files that hold these tokens
        pieces = [np.empty(0, self.dtype)]
        for i in range(first, last + 1):
            begins = self.ends[i]
            pieces.append(opened(self, i)[max(0, start - begins) : stop - begins])
        return np.concatenate(pieces)


@functools.lru_cache(MOST_OPEN)
def opened(shards, i):
    return np.memmap(shards.paths[i], shards.dtype, "r", shape=(int(shards.ends[i + 1] - shards.ends[i]),))


def shards_sha256(hashes):
    """The sha256 of a split in shards: a hash of its files' sha256 (hex), in order."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def file_stamp(tokens):
    """Return the `stamp` of the file behind a memmap, or the reason (str) why it cannot be read. Shards give a hash of
    the inodes, the total bytes, and a hash of the sizes and mtimes, which changes if two shards are swapped."""
    try:
        if isinstance(tokens, Shards):
            stamps = [stamp(path) for path in tokens.paths]
            inodes, sizes, times = zip(*stamps, strict=True)
            return hash(inodes), sum(sizes), hash((sizes, times))
        return stamp(tokens.filename)
    except OSError as error:
        return error.strerror


def stamp(path):
    """(inode, bytes, mtime in ns) of a file: they change when it is replaced, cut or written to."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def what_changed(before, now):
    """The difference between two stamps of a file, in words."""
    if isinstance(now, str):
        return now
    if now[1] != before[1]:
        return f"{before[1]:,} bytes then, {now[1]:,} now"
    return "replaced" if now[0] != before[0] else "written to"
