"""GPUs by name: what the project knows of them, in one table."""

import re

# Dense bf16 peak in FLOP/s and memory in bytes, from data sheets.
# The first match at the end of a word wins, so H100 PCIe comes before H100.
GPUS = {
    "GH200 480GB": (989e12, 96e9),  # beside 480 GB of its CPU
    "GH200": (989e12, 96e9),
    "H200": (989e12, 141e9),
    "H100 PCIe": (756e12, 80e9),
    "H100 NVL": (835e12, 94e9),
    "H100": (989e12, 80e9),
    "H20": (148e12, 96e9),
    "A100": (312e12, 80e9),
    "A10G": (70e12, 24e9),
    "A10": (125e12, 24e9),
    "A6000": (155e12, 48e9),
    "L4": (121e12, 24e9),
    "L40S": (362e12, 48e9),
    "B200": (2250e12, 180e9),
    "B300": (2250e12, 288e9),
    "RTX 5090": (209e12, 32e9),
    "RTX 4090": (165e12, 24e9),
    "RTX 3090": (71e12, 24e9),
}


def found(device_name):
    """(the name in GPUS, what follows it) for a driver's name or one typed by hand; (None, "") if unknown. Laptop GPUs
    do not count: they share the name but are other chips."""
    for name in GPUS:
        pattern = name.replace(" ", "[ _-]?")
        match = re.search(rf"(?<!\dx){pattern}(?![a-z\d])(?!.* Laptop)(.*)", device_name or "", re.IGNORECASE)
        if match:
            return name, match[1]
    return None, ""


def named(device_name):
    """The name in GPUS, or None."""
    return found(device_name)[0]


def memory(device_name):
    """Memory in bytes: what the name says (A100-SXM4-40GB, A100-40), else what GPUS says."""
    name, rest = found(device_name)
    said = re.search(r"(?<![a-z\d])(\d+) ?(G(i?B)?)?\b", rest, re.IGNORECASE)
    return float(said[1]) * 1e9 if said else GPUS[name][1]


def peak_flops(device_name):
    """The device's dense bf16 peak in FLOP/s; None if unknown."""
    name = named(device_name)
    return GPUS[name][0] if name else None
