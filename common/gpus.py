"""A table of GPUs by name: peak speed and memory."""

import re

# Dense bf16 peak in FLOP/s and memory in bytes, from data sheets.
# The first name found in a device's name wins, so H100 PCIe comes before H100.
GPUS = {
    "GH200 480GB": (989e12, 96e9),  # the 480 GB are the CPU's
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
    """Return (the name in GPUS, the text after it) for a name from a driver or a user; (None, "") if unknown. Laptop
    GPUs are unknown: they share the name but are other chips."""
    for name in GPUS:
        pattern = name.replace(" ", "[ _-]?")
        match = re.search(rf"(?<!\dx){pattern}(?![a-z\d])(?!.* Laptop)(.*)", device_name or "", re.IGNORECASE)
        if match:
            return name, match[1]
    return None, ""


def named(device_name):
    """The device's name in GPUS; None if unknown."""
    return found(device_name)[0]


def memory(device_name):
    """The device's memory in bytes: from its name (A100-SXM4-40GB, A100-40), else from GPUS."""
    name, rest = found(device_name)
    said = re.search(r"(?<![a-z\d])(\d+) ?(G(i?B)?)?\b", rest, re.IGNORECASE)
    return float(said[1]) * 1e9 if said else GPUS[name][1]


def peak_flops(device_name):
    """The device's dense bf16 peak in FLOP/s; None if unknown."""
    name = named(device_name)
    return GPUS[name][0] if name else None
